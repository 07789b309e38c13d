"""From whatever a user calls a model to its ``ModelSpec``.

A model is a built-in name (``t5-3b``) or its hub id, a path (a ``config.json``, a folder that holds
one, a YAML spec), a hub id or a page's address, whose config is fetched, a config as a dict or as
transformers' own object, or a ``ModelSpec``.

A YAML spec has the keys of a ``config.json``, and ``name``. Other people's configs may hold any
keys but misspelt ones; a spec is written by hand, so a key that nothing reads is refused as a slip.
What a config leaves to its class is in ``ModelSpec.assumptions``. ``configs/models`` has examples.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from memplan.errors import (
    ConfigError,
    MemplanError,
    UnsupportedFamilyError,
    UsageError,
    did_you_mean,
)
from memplan.fast_dataclass import dataclass, replace
from memplan.model.named import Model
from memplan.model.spec import ModelSpec, Task
from memplan.sources.about_models.found_config import FoundConfig, find_config
from memplan.text import one_line

if TYPE_CHECKING:
    from memplan.model.read_log import DefaultRead, ReadLog


def load_model(
    model: Model,
    task: Task | str | None = None,
    *,
    family: str | None = None,
    num_labels: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    allow_guess: bool = False,
    allow_unknown_keys: bool = False,
) -> ModelSpec:
    """Return the shape of a model.

    ``model`` is taken for the first of these that it is: a ``ModelSpec``, a config dict or transformers'
    own config; a path that exists or is written as one; a built-in name or its hub id; a hub id. Only the last uses
    the network. ``task`` says which class is meant (default: as ``architectures`` says),
    ``num_labels`` the classes of a classification head. ``family`` overrules the config's
    ``model_type``; with ``allow_guess`` an unknown one is read as the family whose keys are most
    alike. ``allow_unknown_keys`` reads on where a key seems to be misspelt. ``ModelSpec.assumptions``
    says so of both, and of every size that the config leaves to its class. ``revision`` and
    ``token`` are for the hub: with ``revision``, a built-in name is fetched too.

    Raises ``ModelNotFoundError``, ``ConfigError``, ``UnsupportedFamilyError``, a ``HubError``, or
    ``UsageError`` for arguments that do not go together.

    >>> load_model("t5-3b").num_layers
    48
    """
    changes = {"task": task, "family": family, "num_labels": num_labels}
    if isinstance(model, ModelSpec):
        _check_complete("a ModelSpec", **changes, revision=revision)
        return model
    asked = _Asked(
        task=_to_task(task),
        family=family,
        num_labels=_checked(num_labels),
        allow_unknown_keys=allow_unknown_keys,
    )
    found = find_config(model, revision=revision, token=token)
    return _traced(found, changes) or _read_or_guess(found, asked, allow_guess=allow_guess)


def _checked(num_labels: int | None) -> int | None:
    if num_labels is not None and num_labels < 1:
        msg = f"num_labels must be at least 1, got {num_labels}"
        raise UsageError(msg)
    return num_labels


def _check_complete(what: str, **changes: object) -> None:
    """Refuse to change what says all."""
    if any(change is not None for change in changes.values()):
        *names, last = changes
        msg = f"{what} is complete: {', '.join(names)} and {last} cannot change it"
        raise UsageError(msg)


def _read_or_guess(found: FoundConfig, asked: "_Asked", *, allow_guess: bool) -> ModelSpec:
    """A config of an unknown type is read as the family whose keys are most alike, where that is allowed."""
    try:
        return _read(found, asked)
    except UnsupportedFamilyError as error:
        if asked.family is not None:
            raise
        from memplan.sources.about_models.guessed_family import guess_family

        guess = guess_family(found)
        if not allow_guess:
            raise UnsupportedFamilyError(guess.refusal) from error
    spec = _read(found, replace(asked, family=guess.family))
    return replace(spec, assumptions=(guess.confession, *spec.assumptions))


def _traced(found: FoundConfig, changes: Mapping[str, object]) -> ModelSpec | None:
    """A user's own module, where that is what was read; nothing can change it."""
    if found.config.get("format") is None or "model_type" in found.config:
        return None
    from memplan.sources.about_models.tape_file import is_tape, read_tape

    if not is_tape(found.config):
        return None
    _check_complete("a traced module", **changes)
    return read_tape(found.config, name=found.name, source=found.source)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The arguments of ``load_model`` that say how a config is read."""

    task: Task | None
    family: str | None
    num_labels: int | None
    allow_unknown_keys: bool


def _to_task(task: Task | str | None) -> Task | None:
    if task is None or isinstance(task, Task):
        return task
    try:
        return Task(task)
    except ValueError:
        names = [each.value for each in Task]
        msg = f"unknown task {task!r}.{did_you_mean(str(task), names)} Tasks: {', '.join(names)}"
        raise UsageError(msg) from None


def _read(found: FoundConfig, asked: _Asked) -> ModelSpec:
    from memplan.model.read_log import ReadLog
    from memplan.sources.about_models.defaults import class_defaults

    log = ReadLog()
    try:
        spec = _read_with(found, asked, class_defaults(), log)
    except UnsupportedFamilyError:
        raise
    except ConfigError:
        # A misspelt key says more than what follows from its absence.
        _check_keys(found, asked, log)
        raise
    if found.is_builtin:
        return replace(spec, assumptions=(found.remark,)) if found.remark else spec
    return _annotated(spec, found, asked, log)


def _read_with(
    found: FoundConfig, asked: _Asked, defaults: Mapping[str, Mapping[str, object]], log: "ReadLog"
) -> ModelSpec:
    from memplan.classes.blueprint import blueprint_of
    from memplan.families import read_model

    spec = read_model(
        found.config,
        source=found.source,
        name=one_line(found.name),
        defaults=defaults,
        task=asked.task,
        family=asked.family,
        num_labels=asked.num_labels,
        log=log,
    )
    return replace(
        spec,
        quantization=_own_quantization(found.config),
        blueprint=spec.blueprint or blueprint_of(spec, found.config, defaults.get(spec.family, {})),
    )


def _own_quantization(config: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """How the checkpoint is quantized, such that a model can be told from another by it."""
    own = config.get("quantization_config")
    if not isinstance(own, Mapping):
        return ()
    return tuple((str(key), _plain(value)) for key, value in own.items())


def _plain(value: object) -> object:
    """Lists as tuples; what is nested deeper is told by its text."""
    if isinstance(value, list):
        return tuple(each if isinstance(each, str) else str(each) for each in value)
    return str(value) if isinstance(value, Mapping) else value


def _check_keys(found: FoundConfig, asked: _Asked, log: "ReadLog") -> list[str]:
    from memplan.sources.about_models.config_check import check_keys, check_unread_parts

    accept = asked.allow_unknown_keys
    said = check_keys(log, source=found.source, is_spec=found.is_spec, accept_unknown=accept)
    if found.is_spec and not accept:
        check_unread_parts(log, source=found.source)
    return said


def _annotated(spec: ModelSpec, found: FoundConfig, asked: _Asked, log: "ReadLog") -> ModelSpec:
    """Say beside a model what of it is not the config's word, and what of the config is not in it."""
    from memplan.sources.about_models.config_check import (
        architecture_note,
        type_note,
        unmodelled_notes,
    )

    said = _check_keys(found, asked, log)
    said += _default_notes(_Reading(spec, found, asked, log))
    said += unmodelled_notes(log, source=found.source)
    if asked.family is None:
        said.append(type_note(found.config, spec.family))
        said.append(architecture_note(found.config, spec.family, spec.task, source=found.source))
    return replace(spec, assumptions=tuple(filter(None, said)))


class _Reading:
    """A config as it was read, told from others by all that it holds and is asked for."""

    __slots__ = ("_key", "asked", "found", "log", "spec")

    def __init__(self, spec: ModelSpec, found: FoundConfig, asked: _Asked, log: "ReadLog") -> None:
        self.spec, self.found, self.asked, self.log = spec, found, asked, log
        self._key = repr(found.config), asked

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reading) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=128)
def _default_notes(reading: _Reading) -> tuple[str, ...]:
    """What is the class's word and not the config's: most of the work of reading it, so done once for equal ones."""
    from memplan.sources.about_models.config_check import default_notes

    return tuple(default_notes(reading.log, lambda read: _matters(read, reading)))


def _matters(read: "DefaultRead", reading: _Reading) -> bool:
    """Whether a config that holds another value than the class's default is another model."""
    from memplan.model.read_log import ReadLog
    from memplan.sources.about_models.defaults import class_defaults, with_default

    if not isinstance(read.value, int | float):
        return True
    # One other value may happen to make the same model (twice the heads), or none at all.
    makes_another = None
    for other in dict.fromkeys((read.value + 1, 2 * read.value, read.value - 1, 1)):
        defaults = with_default(class_defaults(), read.model_type, read.key, other)
        try:
            other_spec = _read_with(reading.found, reading.asked, defaults, ReadLog())
            makes_another = not _is_same(other_spec, reading.spec)
        except MemplanError:
            continue
        if makes_another:
            return True
    return makes_another is None


def _is_same(model: ModelSpec, other: ModelSpec) -> bool:
    """A class may have sizes of which no other room asks: FSMT's table of the source."""
    if model != other or model.blueprint is None or other.blueprint is None:
        return model == other
    return model.blueprint.sizes(model) == other.blueprint.sizes(other)
