"""Plug-ins: what installed packages add by entry points of these groups.

=====================  ==============================================================================================
``memplan.models``     a config as a mapping, or a function that returns one: ``estimate NAME``
``memplan.gpus``       a card as a mapping, with the keys of ``memplan.sources.gpu_file``: ``--gpu NAME``
``memplan.engines``    options of ``memplan.estimate`` as a mapping, ``engine`` among them: ``--engine NAME``
``memplan.optimizers`` a ``memplan.training.optimizers.script.OptimizerRow``: ``--optimizer NAME``
``memplan.kernels``    a ``memplan.training.choices_of_kernels.kernels.Kernels``: ``--kernels NAME``
``memplan.readers``    an object with ``looks_like(values)`` and ``read(values)``: fields of a setup, for ``--setup FILE``
``memplan.writers``    a function of a setup and a model that returns a text: ``--emit NAME``
=====================  ==============================================================================================

A module that holds one says which interface it was written for: ``MEMPLAN_INTERFACE = 1``. A plug-in is loaded when a name is asked
for that memplan does not know itself, never before. One that cannot be used is told in a line, and is not there.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from memplan.errors import MemplanError
from memplan.fast_dataclass import dataclass
from memplan.text import one_line, shortened, shown
from memplan.upward import provided

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

INTERFACE = 1
"""Raised when what a group's objects are changes its meaning."""
KINDS = ("models", "engines", "optimizers", "kernels", "gpus", "readers", "writers")
MAX_WORDS = 200
"""Characters of what went wrong in one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlugIn:
    """One that is there, whether it can be used or not."""

    kind: str
    name: str
    origin: str
    """The package and its version."""
    value: object = None
    trouble: str = ""
    """Why it cannot be used; nothing where it can."""


def plugged(kind: str, name: str) -> Any:
    """What a plug-in of a kind offers under a name; None where there is none that can be used.

    >>> plugged("gpus", "no-such-card") is None
    True
    """
    entry = _entries(kind).get(name)
    return None if entry is None else _usable(_loaded(kind, name))


def plugged_names(kind: str) -> tuple[str, ...]:
    """Names that plug-ins of a kind have; none is loaded."""
    return tuple(_entries(kind))


def all_of(kind: str) -> tuple[Any, ...]:
    """What every plug-in of a kind offers that can be used."""
    found = (_usable(_loaded(kind, name)) for name in _entries(kind))
    return tuple(each for each in found if each is not None)


def examined() -> tuple[PlugIn, ...]:
    """Every plug-in of every kind, loaded to see whether it can be used."""
    return tuple(_loaded(kind, name) for kind in KINDS for name in _entries(kind))


def _usable(found: PlugIn) -> Any:
    """What it offers; what is wrong with it is told once."""
    if found.trouble:
        _tell(f"plug-in {found.kind}: {found.name} of {found.origin} is left out: {found.trouble}")
        return None
    return found.value


@cache
def _tell(words: str) -> None:
    provided("told", words)


@cache
def _entries(kind: str) -> "Mapping[str, EntryPoint]":
    """By name, the first package's where several have it."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for each in entry_points(group=f"memplan.{kind}"):
        found.setdefault(each.name, each)
    return found


@cache
def _loaded(kind: str, name: str) -> PlugIn:
    entry = _entries(kind)[name]
    origin = (
        "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    )
    value: object = None
    trouble = ""
    try:
        made = getattr(import_module(entry.module), "MEMPLAN_INTERFACE", None)
        if made != INTERFACE:
            trouble = f"it is written for interface {shown(made)} of plug-ins, and this memplan has {INTERFACE}"
        else:
            value = READERS[kind](name, entry.load())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a stranger's package does
        words = (
            str(error) if isinstance(error, MemplanError) else f"{type(error).__name__}: {error}"
        )
        trouble = shortened(one_line(words), MAX_WORDS)
    return PlugIn(kind=kind, name=name, origin=origin, value=value, trouble=trouble)


# -- what each kind is ---------------------------------------------------------------------------------------


def _mapping(value: object) -> Mapping[str, object]:
    """A mapping, or what a function without arguments returns."""
    found = value() if callable(value) else value
    if not isinstance(found, Mapping):
        msg = f"a mapping is wanted, not {shown(found)}"
        raise TypeError(msg)
    from memplan.sources.files import check_tree

    check_tree(found, label="it")
    return dict(found)


def _card(name: str, value: object) -> object:
    from memplan.sources.gpu_file import card_from_mapping

    return card_from_mapping({"name": name, **_mapping(value)}, source=name)


def _engine(_: str, value: object) -> object:
    found = _mapping(value)
    if "engine" not in found:
        msg = "engine is missing: which of memplan's it runs as"
        raise ValueError(msg)
    return found


def _optimizer(_: str, value: object) -> object:
    from memplan.training.optimizers.script import OptimizerRow

    return _of_class(value, OptimizerRow)


def _kernels(_: str, value: object) -> object:
    from memplan.training.choices_of_kernels.kernels import Kernels

    return _of_class(value, Kernels)


def _of_class(value: object, kind: type) -> object:
    if not isinstance(value, kind):
        msg = f"a {kind.__name__} is wanted, not {shown(value)}"
        raise TypeError(msg)
    return value


def _reader(_: str, value: Any) -> object:
    if not callable(getattr(value, "looks_like", None)) or not callable(
        getattr(value, "read", None)
    ):
        msg = "looks_like(values) and read(values) are wanted"
        raise TypeError(msg)
    return value


def _writer(_: str, value: object) -> object:
    if not callable(value):
        msg = f"a function is wanted, not {shown(value)}"
        raise TypeError(msg)
    return value


READERS: Mapping[str, Callable[[str, Any], object]] = {
    "models": lambda _, value: _mapping(value),
    "engines": _engine,
    "optimizers": _optimizer,
    "kernels": _kernels,
    "gpus": _card,
    "readers": _reader,
    "writers": _writer,
}
"""How what an entry point names becomes what is used."""


def asked_safely(origin: str, function: Callable[..., object], *arguments: object) -> object:
    """What a plug-in's function returns.

    Raises ``InputError`` for whatever it raises, in a line.
    """
    from memplan.errors import InputError

    try:
        return function(*arguments)
    except MemplanError:
        raise
    except Exception as error:
        words = shortened(one_line(f"{type(error).__name__}: {error}"), MAX_WORDS)
        msg = f"{origin}: {words}"
        raise InputError(msg) from error
