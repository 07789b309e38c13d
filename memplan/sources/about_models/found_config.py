"""Where a model's config is: a built-in's, a file's or a folder's, a hub repository's, or one at hand."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memplan.errors import (
    ConfigError,
    HubGatedError,
    HubNotFoundError,
    HubOfflineError,
    ModelNotFoundError,
    UsageError,
)
from memplan.fast_dataclass import dataclass
from memplan.model.named import ConfigObject

CONFIG_FILE = "config.json"
INDEX_FILE = "model_index.json"
"""What a diffusers pipeline's folder holds in its place."""
TRANSFORMER = "transformer"
"""The folder in it of what is trained."""

_YAML_SUFFIXES = (".yaml", ".yml")
_HUB_ID = r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?"
_WHAT_WORKS = "give a built-in name (`memplan models` lists them), a path or a hub id (owner/name)"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundConfig:
    """A config and where it was found."""

    config: Mapping[str, object]
    name: str
    source: str
    is_spec: bool = False
    """Written by hand for memplan, so that every key must mean something."""
    is_builtin: bool = False
    """Of the registry, which leaves out what the class fills in."""
    remark: str = ""
    """What the answer should say of how it was found."""


def find_config(model: object, *, revision: str | None, token: str | None) -> FoundConfig:
    """Return the config of whatever a user calls a model, as ``memplan.sources.models`` says.

    Raises ``ModelNotFoundError``, ``ConfigError``, ``UsageError`` or a ``HubError``.
    """
    if isinstance(model, str):
        return _find_text(model.strip(), revision=revision, token=token)
    if revision is not None:
        msg = "revision is for models of the hub: leave it out for a config or a path"
        raise UsageError(msg)
    if isinstance(model, Mapping):
        return _from_mapping(model)
    if isinstance(model, ConfigObject) and not isinstance(model, type | os.PathLike):
        from memplan.sources.about_models.plain import (
            plain,  # json is for those who have such an object
        )

        return _from_mapping(plain(model.to_dict()))
    if isinstance(model, os.PathLike):
        return _from_path(Path(model))
    msg = f"a model is a name, a path, a config (a dict or transformers') or a ModelSpec; this is of type {type(model).__name__}"
    raise UsageError(msg)


def _find_text(text: str, *, revision: str | None, token: str | None) -> FoundConfig:
    from memplan.sources.about_models.copied_models import packed_remark
    from memplan.sources.about_models.hub_url import is_url, read_hub_url
    from memplan.sources.about_models.registry import find_builtin

    if not text:
        msg = f"the model's name is empty: {_WHAT_WORKS}"
        raise ModelNotFoundError(msg)
    if is_url(text):
        page = read_hub_url(text, revision=revision)
        return _find_text(page.repo_id, revision=page.revision, token=token)
    builtin = find_builtin(text)
    if _is_path(text, is_builtin=builtin is not None):
        return find_config(Path(text), revision=revision, token=token)
    if builtin is None:
        return _copy_or_hub(text, revision=revision, token=token)
    if revision is not None:
        repo_id = text if "/" in text else builtin.hub_id
        return _from_hub(repo_id, revision=revision, token=token)
    return FoundConfig(
        config=builtin.config(), name=builtin.name, source="built-in", is_builtin=True,
        remark=packed_remark(text),
    )  # fmt: skip


def _copy_or_hub(text: str, *, revision: str | None, token: str | None) -> FoundConfig:
    """A copy of a built-in model, as owners who copy name it; else what the hub says, where it says anything."""
    from memplan.sources.about_models.copied_models import copy_of

    own = _plugged(text) if revision is None else None
    if own is not None:
        return own
    copy = copy_of(text) if revision is None else None
    if copy is None:
        return _from_hub(text, revision=revision, token=token)
    found = FoundConfig(
        config=copy.config(), name=copy.model.name, source="built-in", is_builtin=True,
        remark=copy.remark,
    )  # fmt: skip
    if copy.is_owned_by_copier or "/" not in text:
        return found
    try:
        return _from_hub(text, revision=revision, token=token)
    except (ModelNotFoundError, HubNotFoundError, HubOfflineError, HubGatedError):
        return found


def _plugged(text: str) -> FoundConfig | None:
    """A plug-in's model of this name."""
    from memplan.sources.plugins import plugged

    config = plugged("models", text)
    return (
        None if config is None else FoundConfig(config=config, name=text, source=f"plug-in {text}")
    )


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


def _from_mapping(config: Mapping[Any, object]) -> FoundConfig:
    from memplan.sources.files import check_tree

    texts = {key: value for key, value in config.items() if isinstance(key, str)}
    if len(texts) != len(config):
        msg = "config: every key must be text"
        raise ConfigError(msg)
    check_tree(texts, label="config")
    names = (texts.get("name"), texts.get("_name_or_path"), texts.get("model_type"))
    name = next((name for name in names if isinstance(name, str) and name), "config")
    return FoundConfig(config=texts, name=name, source="config")


def _from_path(path: Path) -> FoundConfig:
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
        return FoundConfig(config=config, name=path.stem, source=source)
    folder = path.absolute().parent
    if folder.name == TRANSFORMER:
        folder = folder.parent
    return FoundConfig(config=config, name=folder.name, source=source)


def _config_in(folder: Path) -> Path:
    """A folder's config; of a diffusers pipeline, its transformer's."""
    index = folder / INDEX_FILE
    if (folder / CONFIG_FILE).is_file() or not index.is_file():
        return folder / CONFIG_FILE
    from memplan.sources.about_models.diffusers_pipeline import transformer_config
    from memplan.sources.files import read_mapping

    return folder / transformer_config(read_mapping(index), source=str(index))


def _from_spec(spec: Mapping[str, object], *, source: str, name: str) -> FoundConfig:
    """Check a YAML spec's keys, and take its name off."""
    given = spec.get("name")
    if given is not None and (not isinstance(given, str) or not given.strip()):
        msg = f"{source}: name: must be text, such as my-llama-13b"
        raise ConfigError(msg)
    return FoundConfig(
        config={key: value for key, value in spec.items() if key != "name"},
        name=given or name,
        source=source,
        is_spec=True,
    )


def _from_hub(repo_id: str, *, revision: str | None, token: str | None) -> FoundConfig:
    import re

    from memplan.sources.about_models.registry import nearest_builtins

    guess = " or ".join(repr(name) for name in nearest_builtins(repo_id))
    if not re.fullmatch(_HUB_ID, repo_id) or (guess and "/" not in repo_id and not revision):
        hint = f". Did you mean {guess}?" if guess else f": {_WHAT_WORKS}"
        msg = f"there is no model {repo_id!r}{hint}"
        raise ModelNotFoundError(msg)

    from memplan.sources.about_models.hub import fetch_config

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
    return FoundConfig(config=config, name=repo_id, source=source)


def _pipeline_on_hub(
    repo_id: str, missing: HubNotFoundError, *, revision: str | None, token: str | None
) -> tuple[dict[str, object], str]:
    """The config of the transformer of a diffusers pipeline; ``missing`` where it is none either."""
    from memplan.sources.about_models.diffusers_pipeline import transformer_config
    from memplan.sources.about_models.hub import fetch_config

    try:
        index, source = fetch_config(repo_id, revision=revision, token=token, file_name=INDEX_FILE)
    except HubNotFoundError:
        raise missing from None
    file_name = transformer_config(index, source=f"{INDEX_FILE} of {source}")
    return fetch_config(repo_id, revision=revision, token=token, file_name=file_name)


def local_config(model: str) -> tuple[str, Mapping[str, object]]:
    """A model's name and its config, without a download: a built-in's, a file's or a folder's.

    Raises ``UsageError`` for a model of the hub, and as ``load_model`` does.

    >>> local_config("gpt2")[1]["model_type"]
    'gpt2'
    """
    from memplan.sources.about_models.hub_url import is_url
    from memplan.sources.about_models.registry import find_builtin

    text = model.strip()
    builtin = find_builtin(text)
    if is_url(text) or (builtin is None and not _is_path(text, is_builtin=False)):
        from memplan.sources.about_models.registry import nearest_builtins

        guess = " or ".join(repr(name) for name in nearest_builtins(text))
        hint = f". Did you mean {guess}?" if guess else ""
        msg = f"{text}: nothing is downloaded here: give a built-in name, or the path of its config.json{hint}"
        raise UsageError(msg)
    found = find_config(text, revision=None, token=None)
    return found.name, found.config
