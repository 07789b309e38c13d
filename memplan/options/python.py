"""The options as keywords of ``memplan.estimate``, ``memplan.sweep`` and ``memplan.plan``.

An option's keyword is its flag's name with underscores. Its value is what is typed, or what that stands
for: a number, a member of an enum, and where several are taken a list or a range of them.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeGuard, get_args

from memplan.errors import MemplanError, UsageError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.options import questions
from memplan.options.asked import OPTION_OF_FIELD, Asked
from memplan.options.rows.shared import ALLOW, JOBS, SHARD
from memplan.options.run_times import TIME_OPTIONS
from memplan.options.table import Option

if TYPE_CHECKING:
    from memplan.search.advice import Advice


class Taken(Enum):
    """How the values of an option are taken."""

    ONE = "one"
    """One value of its kind."""
    LISTED = "listed"
    """A text, of which several are joined by commas."""
    AXIS = "axis"
    """A text for a list or a range, or the list itself."""
    CARDS = "cards"
    """Names or descriptions of GPUs."""
    AS_IT_IS = "as it is"
    """Whatever it is: its reader tells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keyword:
    """One option as a keyword."""

    name: str
    kind: type = str
    """Of one value."""
    default: object = None
    taken: Taken = Taken.ONE
    parser: Callable[[Any], Any] | None = None


def _reader_of(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if isinstance(value, bool) is not (kind is bool):
            wanted = "True or False" if kind is bool else "a number"
            msg = f"must be {wanted}, got {value!r}"
            raise ValueError(msg)
        if kind is int and isinstance(value, float) and not value.is_integer():
            msg = f"{value!r} is not a whole number"
            raise ValueError(msg)
        try:
            return kind(value)
        except (TypeError, ValueError):
            msg = f"{value!r} is not {'a whole number' if kind is int else 'a number'}"
            raise ValueError(msg) from None

    return read


def _keyword(option: Option, taken: Taken | None = None) -> Keyword:
    kinds = [each for each in get_args(option.kind) or (option.kind,) if each is not type(None)]
    is_text = not isinstance(kinds[0], type) or kinds[0] is str
    return Keyword(
        name=option.parameter,
        kind=str if is_text else kinds[0],
        default=None if taken is Taken.AXIS else option.default,
        taken=taken or TAKEN.get(option.parameter, Taken.LISTED if is_text else Taken.ONE),
        parser=option.parser,
    )


TAKEN: Mapping[str, Taken] = {
    "gpu": Taken.CARDS,
    "shard": Taken.ONE,
    **dict.fromkeys(
        ("adapter", "job", "ema", "lengths", "optim_args", "setup", "gpu_memory", "cpu_memory",
         "engine_option"),
        Taken.AS_IT_IS,
    ),
}  # fmt: skip
"""Options that are not taken as their kind says: some may be given as what is made of their text."""


def _face(*keywords: Keyword) -> dict[str, Keyword]:
    return {each.name: each for each in keywords}


_TIMES = tuple(map(_keyword, TIME_OPTIONS))
ESTIMATE = _face(*(_keyword(each) for each in questions.ESTIMATE if each is not ALLOW), *_TIMES)
"""Of ``memplan.estimate``; what may be given up is asked of its hints."""
SWEEP = _face(
    *(_keyword(each, Taken.AXIS) for each in questions.SWEEP_AXES),
    *map(_keyword, (*questions.SWEEP_ONCE, JOBS, SHARD)),
    *_TIMES,
)
"""Of ``memplan.sweep``."""
PLAN = _face(*map(_keyword, questions.PLAN), *_TIMES)
"""Of ``memplan.plan``."""


def asked_in_python(
    model: object, options: Mapping[str, object], face: Mapping[str, Keyword]
) -> Asked:
    """The question that keywords ask; None stands for the default.

    Raises ``UsageError`` for a keyword that there is not, with the nearest name, and for a value that is
    none of its kind.
    """
    given = {}
    for name, value in options.items():
        if name not in face:
            msg = f"there is no option {name!r}.{_hint(name, face)}"
            raise UsageError(msg)
        if value is not None:
            given[name] = _read(face[name], value)
    defaults = {name: each.default for name, each in face.items()}
    asked = Asked(values={"model": model, **defaults, **given}, given=frozenset(given))
    if "engine" not in given:
        return asked
    from memplan.options.plugged import with_engine_plugin

    return with_engine_plugin(asked, read_options)


def read_options(options: Mapping[str, object]) -> Asked:
    """Options of an estimate alone, without a model."""
    return asked_in_python(None, options, ESTIMATE)


def _hint(name: str, face: Mapping[str, Keyword]) -> str:
    from memplan.options.other_names import other_name

    told = other_name(f"--{name}", tuple(f"--{each.replace('_', '-')}" for each in face))
    if told:
        return f" {told[:1].upper()}{in_python(told[1:])}."
    field = OPTION_OF_FIELD.get(name)
    return f" It is called {field!r}." if field in face else did_you_mean(name, tuple(face))


def _read(keyword: Keyword, value: object) -> object:
    """A value as the options' readers take it."""
    match keyword.taken:
        case Taken.ONE:
            return _one(keyword, value)
        case Taken.LISTED:
            return ",".join(map(_text, value)) if _is_several(value) else _text(value)
        case Taken.AXIS:
            if isinstance(value, str):
                return value
            return [_item(keyword, each) for each in (value if _is_several(value) else [value])]
        case Taken.CARDS:
            return list(value) if _is_several(value) else [_plain(value)]
        case Taken.AS_IT_IS:
            return _plain(value)


def _is_several(value: object) -> TypeGuard[Iterable[object]]:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Enum)


def _item(keyword: Keyword, value: object) -> object:
    """One value of an axis: a number that is written out is read."""
    plain = _plain(value)
    if isinstance(plain, str) and keyword.kind is not str:
        return _one(keyword, plain)
    return plain


def _plain(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.value if isinstance(value, Enum) else value


def _text(value: object) -> str:
    return str(_plain(value))


def _one(keyword: Keyword, value: object) -> object:
    """One value of the keyword's kind.

    Raises ``UsageError`` for any other.
    """
    plain = _plain(value)
    if _is_several(plain):
        msg = f"{keyword.name}: one value is taken, got {plain!r}: memplan.sweep takes several"
        raise UsageError(msg)
    try:
        return (keyword.parser or _reader_of(keyword.kind))(plain)
    except ValueError as error:
        msg = f"{keyword.name}: {error}"
        raise UsageError(msg) from None


# -- errors --------------------------------------------------------------------------------------

_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")
_HEAD = re.compile(r"(\w+)(?=: )")
_NAMES = OPTION_OF_FIELD | {"zero_stage": "zero", "offload_optimizer": "offload"}


def in_python(message: str, given: Iterable[str] = ()) -> str:
    """A message about options, in terms of keywords; a field at its head too, where its was given.

    >>> in_python("--lora-dropout: means nothing without --lora: add that, or leave it out")
    'lora_dropout: means nothing without lora: add that, or leave it out'
    >>> in_python("micro_batch_size: must be at least 1", given=["batch_size"])
    'batch_size: must be at least 1'
    """
    text = _FLAG.sub(lambda match: match[1].replace("-", "_"), message)
    head = _HEAD.match(text)
    name = _NAMES.get(head[1]) if head else None
    return f"{name}{text[head.end() :]}" if head and name in set(given) else text


def advice_in_python(advice: "Advice") -> str:
    """An advice in one line, in terms of keywords."""
    from memplan.report.estimates.changes import advice_text

    return in_python(advice_text(advice))


@contextmanager
def python_words(given: Iterable[str]) -> Iterator[None]:
    """Errors that leave speak of keywords."""
    try:
        yield
    except MemplanError as error:
        error.args = (in_python(str(error), given), *error.args[1:])
        raise
