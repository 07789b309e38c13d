"""From whatever a user calls a model to its ``ModelSpec``.

A model is a built-in name (``t5-3b``) or its hub id, a path (a ``config.json``, a folder that holds
one, a YAML spec), a hub id or a page's address, whose config is fetched, a config as a dict, or a
``ModelSpec``.

A YAML spec has the keys of a ``config.json``, and ``name``. Other people's configs may hold any
keys but misspelt ones; a spec is written by hand, so a key that nothing reads is refused as a slip.
What a config leaves to its class is in ``ModelSpec.assumptions``. ``configs/models`` has examples.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.errors import (
    ConfigError,
    HubNotFoundError,
    HubOfflineError,
    MemplanError,
    ModelNotFoundError,
    UnsupportedFamilyError,
    UsageError,
    did_you_mean,
)
from memplan.fast_dataclass import dataclass
from memplan.model.spec import ModelSpec, Task
from memplan.text import one_line

if TYPE_CHECKING:
    from memplan.model.read_log import DefaultRead, ReadLog

CONFIG_FILE = "config.json"
INDEX_FILE = "model_index.json"
"""What a diffusers pipeline's folder holds in its place."""
TRANSFORMER = "transformer"
"""The folder in it of what is trained."""

_YAML_SUFFIXES = (".yaml", ".yml")
_HUB_ID = r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?"
_WHAT_WORKS = "give a built-in name (`memplan models` lists them), a path or a hub id (owner/name)"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A config and where it was found."""

    config: Mapping[str, object]
    name: str
    source: str
    is_spec: bool = False
    """Written by hand for memplan, so that every key must mean something."""
    is_builtin: bool = False
    """Of the registry, which leaves out what the class fills in."""


def load_model(
    model: str | os.PathLike[str] | Mapping[str, object] | ModelSpec,
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

    ``model`` is taken for the first of these that it is: a ``ModelSpec`` or a config dict; a path
    that exists or is written as one; a built-in name or its hub id; a hub id. Only the last uses
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
    if isinstance(model, ModelSpec):
        changes = (task, family, num_labels, revision)
        if any(change is not None for change in changes):
            msg = "a ModelSpec is complete: task, family, num_labels and revision cannot change it"
            raise UsageError(msg)
        return model
    wanted = _to_task(task)
    if num_labels is not None and num_labels < 1:
        msg = f"num_labels must be at least 1, got {num_labels}"
        raise UsageError(msg)
    found = _find(model, revision=revision, token=token)
    if found.config.get("format") is not None and "model_type" not in found.config:
        traced = _traced(found)
        if traced is not None:
            if any(change is not None for change in (task, family, num_labels)):
                msg = "a traced module is complete: task, family and num_labels cannot change it"
                raise UsageError(msg)
            return traced
    asked = _Asked(
        task=wanted, family=family, num_labels=num_labels, allow_unknown_keys=allow_unknown_keys
    )
    try:
        return _read(found, asked)
    except UnsupportedFamilyError as error:
        if family is not None:
            raise
        guess = _guess_family(found)
        if not allow_guess:
            raise UnsupportedFamilyError(guess.refusal) from error
    spec = _read(found, replace(asked, family=guess.family))
    return replace(spec, assumptions=(guess.confession, *spec.assumptions))


def _traced(found: "_Found") -> ModelSpec | None:
    """A user's own module, where that is what was read."""
    from memplan.sources.tape_file import is_tape, read_tape

    if not is_tape(found.config):
        return None
    return read_tape(found.config, name=found.name, source=found.source)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The arguments of ``load_model`` that say how a config is read."""

    task: Task | None
    family: str | None
    num_labels: int | None
    allow_unknown_keys: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Guess:
    """The known family that a config of an unknown type is most like."""

    source: str
    model_type: str
    family: str
    unread: tuple[str, ...]
    """Keys with a number or a flag that this family does not read."""

    @property
    def refusal(self) -> str:
        """What to say when guessing is not allowed."""
        from memplan.families import supported_families

        known = supported_families()
        return (
            f"{self.source}: model_type {self.model_type!r} is not supported."
            f"{did_you_mean(self.model_type, known)} {len(known)} types are, such as "
            f"{', '.join(COMMON_FAMILIES)}. By its keys this is most like "
            f"{self.family}{self._unread}: take it as that with `family='{self.family}'`, "
            "or `allow_guess=True`"
        )

    @property
    def confession(self) -> str:
        """What to say beside every figure that rests on the guess."""
        return (
            f"A GUESS: model_type {self.model_type!r} is not supported and was read as {self.family}"
            f"{self._unread}"
        )

    @property
    def _unread(self) -> str:
        return f" (not read: {', '.join(self.unread)})" if self.unread else ""


def _guess_family(found: _Found) -> _Guess:
    from memplan.sources.defaults import known_keys

    family = _nearest_family(found.config)
    known = known_keys(family)
    unread = [
        key
        for key, value in found.config.items()
        if key not in known and isinstance(value, int | float) and not key.endswith("token_id")
    ]
    return _Guess(
        source=found.source,
        model_type=str(found.config.get("model_type")),
        family=family,
        unread=tuple(sorted(unread)[:MAX_KEYS_NAMED]),
    )


MAX_KEYS_NAMED = 8
"""Of a config's keys that a guess leaves unread."""


def _to_task(task: Task | str | None) -> Task | None:
    if task is None or isinstance(task, Task):
        return task
    try:
        return Task(task)
    except ValueError:
        names = [each.value for each in Task]
        msg = f"unknown task {task!r}.{did_you_mean(str(task), names)} Tasks: {', '.join(names)}"
        raise UsageError(msg) from None


def _read(found: _Found, asked: _Asked) -> ModelSpec:
    from memplan.model.read_log import ReadLog
    from memplan.sources.defaults import class_defaults

    log = ReadLog()
    try:
        spec = _read_with(found, asked, class_defaults(), log)
    except UnsupportedFamilyError:
        raise
    except ConfigError:
        # A misspelt key says more than what follows from its absence.
        _check_keys(found, asked, log)
        raise
    return spec if found.is_builtin else _annotated(spec, found, asked, log)


def _read_with(
    found: _Found, asked: _Asked, defaults: Mapping[str, Mapping[str, object]], log: "ReadLog"
) -> ModelSpec:
    from memplan.families import read_model
    from memplan.sources.parameter_order import declared_order

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
        declared=declared_order(spec.family),
        quantization=_own_quantization(found.config),
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


def _check_keys(found: _Found, asked: _Asked, log: "ReadLog") -> list[str]:
    from memplan.sources.config_check import check_keys, check_unread_parts

    accept = asked.allow_unknown_keys
    said = check_keys(log, source=found.source, is_spec=found.is_spec, accept_unknown=accept)
    if found.is_spec and not accept:
        check_unread_parts(log, source=found.source)
    return said


def _annotated(spec: ModelSpec, found: _Found, asked: _Asked, log: "ReadLog") -> ModelSpec:
    """Say beside a model what of it is not the config's word, and what of the config is not in it."""
    from memplan.sources.config_check import (
        architecture_note,
        default_notes,
        type_note,
        unmodelled_notes,
    )

    said = _check_keys(found, asked, log)
    said += default_notes(log, lambda read: _matters(read, spec, found, asked))
    said += unmodelled_notes(log, source=found.source)
    if asked.family is None:
        said.append(type_note(found.config, spec.family))
        said.append(architecture_note(found.config, spec.family, spec.task, source=found.source))
    return replace(spec, assumptions=tuple(filter(None, said)))


def _matters(read: "DefaultRead", spec: ModelSpec, found: _Found, asked: _Asked) -> bool:
    """Whether a config that holds another value than the class's default is another model."""
    from memplan.model.read_log import ReadLog
    from memplan.sources.defaults import class_defaults, with_default

    if not isinstance(read.value, int | float):
        return True
    # One other value may happen to make the same model (twice the heads), or none at all.
    makes_another = None
    for other in dict.fromkeys((read.value + 1, 2 * read.value, read.value - 1, 1)):
        defaults = with_default(class_defaults(), read.model_type, read.key, other)
        try:
            makes_another = _read_with(found, asked, defaults, ReadLog()) != spec
        except MemplanError:
            continue
        if makes_another:
            return True
    return makes_another is None


def local_config(model: str) -> tuple[str, Mapping[str, object]]:
    """A model's name and its config, without a download: a built-in's, a file's or a folder's.

    Raises ``UsageError`` for a model of the hub, and as ``load_model`` does.

    >>> local_config("gpt2")[1]["model_type"]
    'gpt2'
    """
    from memplan.sources.hub_url import is_url
    from memplan.sources.registry import find_builtin

    text = model.strip()
    builtin = find_builtin(text)
    if is_url(text) or (builtin is None and not _is_path(text, is_builtin=False)):
        from memplan.sources.registry import nearest_builtins

        guess = " or ".join(repr(name) for name in nearest_builtins(text))
        hint = f". Did you mean {guess}?" if guess else ""
        msg = f"{text}: nothing is downloaded here: give a built-in name, or the path of its config.json{hint}"
        raise UsageError(msg)
    found = _find(text, revision=None, token=None)
    return found.name, found.config


def _find(model: object, *, revision: str | None, token: str | None) -> _Found:
    if isinstance(model, str):
        return _find_text(model.strip(), revision=revision, token=token)
    if revision is not None:
        msg = "revision is for models of the hub: leave it out for a config or a path"
        raise UsageError(msg)
    if isinstance(model, Mapping):
        return _from_mapping(model)
    if isinstance(model, os.PathLike):
        return _from_path(Path(model))
    msg = f"a model is a name, a path, a config dict or a ModelSpec, not a {type(model).__name__}"
    raise UsageError(msg)


def _find_text(text: str, *, revision: str | None, token: str | None) -> _Found:
    from memplan.sources.hub_url import is_url, read_hub_url
    from memplan.sources.registry import find_builtin

    if not text:
        msg = f"the model's name is empty: {_WHAT_WORKS}"
        raise ModelNotFoundError(msg)
    if is_url(text):
        page = read_hub_url(text, revision=revision)
        return _find_text(page.repo_id, revision=page.revision, token=token)
    builtin = find_builtin(text)
    if _is_path(text, is_builtin=builtin is not None):
        return _find(Path(text), revision=revision, token=token)
    if builtin is None:
        return _from_hub(text, revision=revision, token=token)
    if revision is not None:
        repo_id = text if "/" in text else builtin.hub_id
        return _from_hub(repo_id, revision=revision, token=token)
    return _Found(config=builtin.config(), name=builtin.name, source="built-in", is_builtin=True)


def _is_path(text: str, *, is_builtin: bool) -> bool:
    """Say whether this is written like a path, or is one.

    A folder that merely has a built-in's name, such as a run's output, is not meant unless it holds
    a config.
    """
    if text.lower().endswith((".json", *_YAML_SUFFIXES)) or text.startswith((".", "~", os.sep)):
        return True
    path = Path(text)
    try:
        return (path / CONFIG_FILE).is_file() if is_builtin else path.exists()
    except (OSError, ValueError):
        return False


def _from_mapping(config: Mapping[object, object]) -> _Found:
    from memplan.sources.files import check_tree

    texts = {key: value for key, value in config.items() if isinstance(key, str)}
    if len(texts) != len(config):
        msg = "config: every key must be text"
        raise ConfigError(msg)
    check_tree(texts, label="config")
    names = (texts.get("name"), texts.get("_name_or_path"), texts.get("model_type"))
    name = next((name for name in names if isinstance(name, str) and name), "config")
    return _Found(config=texts, name=name, source="config")


def _from_path(path: Path) -> _Found:
    from memplan.sources.files import read_mapping

    try:
        path = path.expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        msg = f"{path}: cannot be opened: {getattr(error, 'strerror', None) or error}"
        raise ModelNotFoundError(msg) from None
    if not exists:
        msg = f"{path}: there is no such file or folder"
        raise ModelNotFoundError(msg)
    if is_folder or path.name == INDEX_FILE:
        path = _config_in(path if is_folder else path.parent)
        if not path.is_file():
            msg = f"{path.parent}: the folder holds no {CONFIG_FILE}; give one that does, or a file"
            raise ModelNotFoundError(msg)
    config, source = read_mapping(path), str(path)
    if path.suffix.lower() in _YAML_SUFFIXES:
        return _from_spec(config, source=source, name=path.stem)
    if path.name != CONFIG_FILE:
        return _Found(config=config, name=path.stem, source=source)
    folder = path.absolute().parent
    if folder.name == TRANSFORMER:
        folder = folder.parent
    return _Found(config=config, name=folder.name, source=source)


def _config_in(folder: Path) -> Path:
    """A folder's config; of a diffusers pipeline, its transformer's."""
    index = folder / INDEX_FILE
    if (folder / CONFIG_FILE).is_file() or not index.is_file():
        return folder / CONFIG_FILE
    from memplan.sources.diffusers_pipeline import transformer_config
    from memplan.sources.files import read_mapping

    return folder / transformer_config(read_mapping(index), source=str(index))


def _from_spec(spec: Mapping[str, object], *, source: str, name: str) -> _Found:
    """Check a YAML spec's keys, and take its name off."""
    given = spec.get("name")
    if given is not None and (not isinstance(given, str) or not given.strip()):
        msg = f"{source}: name: must be text, such as my-llama-13b"
        raise ConfigError(msg)
    return _Found(
        config={key: value for key, value in spec.items() if key != "name"},
        name=given or name,
        source=source,
        is_spec=True,
    )


def _nearest_family(config: Mapping[str, object]) -> str:
    """Return the family that reads most of a config's keys; of equals, the commonest, then the one
    whose own keys the config leaves out least."""
    from memplan.families import supported_families
    from memplan.sources.defaults import known_keys

    def likeness(family: str) -> tuple[int, bool, int]:
        known = known_keys(family)
        return len(known & config.keys()), family in COMMON_FAMILIES, -len(known - config.keys())

    return max(supported_families(), key=likeness)


COMMON_FAMILIES = ("llama", "mistral", "qwen2", "mixtral", "gpt2", "bert", "roberta", "t5", "bart")
"""What an unknown model is likeliest to be built after."""


def _from_hub(repo_id: str, *, revision: str | None, token: str | None) -> _Found:
    import re

    from memplan.sources.registry import nearest_builtins

    guess = " or ".join(repr(name) for name in nearest_builtins(repo_id))
    if not re.fullmatch(_HUB_ID, repo_id) or (guess and "/" not in repo_id and not revision):
        hint = f". Did you mean {guess}?" if guess else f": {_WHAT_WORKS}"
        msg = f"there is no model {repo_id!r}{hint}"
        raise ModelNotFoundError(msg)

    from memplan.sources.hub import fetch_config

    try:
        try:
            config, source = fetch_config(repo_id, revision=revision, token=token)
        except HubNotFoundError as missing:
            config, source = _pipeline_on_hub(repo_id, missing, revision=revision, token=token)
    except (HubNotFoundError, HubOfflineError) as error:
        if not guess:
            raise
        msg = f"{error}. Did you mean the built-in {guess}?"
        raise type(error)(msg) from error
    return _Found(config=config, name=repo_id, source=source)


def _pipeline_on_hub(
    repo_id: str, missing: HubNotFoundError, *, revision: str | None, token: str | None
) -> tuple[dict[str, object], str]:
    """The config of the transformer of a diffusers pipeline; ``missing`` where it is none either."""
    from memplan.sources.diffusers_pipeline import transformer_config
    from memplan.sources.hub import fetch_config

    try:
        index, source = fetch_config(repo_id, revision=revision, token=token, file_name=INDEX_FILE)
    except HubNotFoundError:
        raise missing from None
    file_name = transformer_config(index, source=f"{INDEX_FILE} of {source}")
    return fetch_config(repo_id, revision=revision, token=token, file_name=file_name)
