"""Configs inside configs: a text model, a tower, each with the defaults of its own class."""

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType

from memplan.errors import ConfigError
from memplan.fast_dataclass import dataclass
from memplan.model.config import ConfigReader
from memplan.model.read_log import DefaultRead, Retyped

EMPTY: Mapping[str, object] = MappingProxyType({})

FORMER_NAMES = {
    "aria_vision_model": "idefics3_vision",
    "exaone4_5_text": "exaone4",
    "kimi_k2": "deepseek_v3",
}
"""Types in published files that their outer classes read as another (transformers 5.23)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSpec:
    """A nested config: its key, and what the outer class makes where it is absent."""

    key: str
    """``text_config``, ``vision_config``, ``audio_config``, ``vq_config``..."""
    model_type: str = ""
    """Whose class it is where neither the file nor the outer class says so."""
    fills: Mapping[str, object] = field(default_factory=lambda: EMPTY)
    """What the outer class gives it where the whole part is absent."""
    always_fills: bool = False
    """It gives these for every key that the part leaves out (GLM-ASR)."""
    flat: bool = False
    """Where the part is absent, its keys stand in the outer config (Qwen2-VL)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A nested config, ready to be read."""

    model_type: str
    reader: ConfigReader


def read_part(reader: ConfigReader, spec: PartSpec) -> Part:
    """Make a reader for a nested config.

    The outer class of transformers either has one class for the part, whatever the part's own
    ``model_type`` says, or lets that decide. Raises ``ConfigError`` for a part that is no object.
    """
    found = reader.mapping(spec.key)
    model_type = _type_of_part(reader, spec, found)
    defaults, renamed = class_row(reader, model_type)
    config = found
    if config is None:
        config = reader.config if spec.flat else spec.fills
    elif spec.always_fills:
        config = {**spec.fills, **config}
    is_flat = found is None and spec.flat
    if found is None and not is_flat:
        reader.log.add_default(
            DefaultRead(
                path=reader.path,
                key=spec.key,
                value=None,
                model_type=model_type,
                absent_part=spec.key,
            )
        )
    nested = reader.nested(
        config,
        reader.path if found is None else f"{reader.path}{spec.key}.",
        model_type=model_type,
        defaults=defaults,
        renamed=renamed,
        absent_part=spec.key if found is None and not is_flat else reader.absent_part,
    )
    return Part(model_type=model_type, reader=nested)


def _type_of_part(
    reader: ConfigReader,
    spec: PartSpec,
    found: Mapping[str, object] | None,
) -> str:
    """The ``model_type`` by which a nested config is read, whatever it says itself."""
    own = found.get("model_type") if found is not None else None
    if own is not None and not isinstance(own, str):
        error = reader.fail(f"{spec.key}.model_type", f"expected a name, got {own!r:.60}")
        raise error
    own = FORMER_NAMES.get(str(own), own)
    model_type = _fixed_type(reader, spec.key) or own or spec.model_type
    if own and own not in {model_type, reader.model_type}:
        path = f"{reader.path}{spec.key}."
        reader.log.retyped.append(Retyped(path=path, given=own, model_type=model_type))
    if not model_type:
        error = reader.fail(f"{spec.key}.model_type", "is missing, so its kind is unknown")
        raise error
    return model_type


def class_row(
    reader: ConfigReader, model_type: str
) -> tuple[Mapping[str, object], Mapping[str, str]]:
    """A class's defaults, and what it calls keys by their common names."""
    row = reader.all_defaults.get(model_type, EMPTY)
    defaults, renamed = row.get("defaults"), row.get("renamed")
    names = renamed if isinstance(renamed, Mapping) else EMPTY
    return (
        defaults if isinstance(defaults, Mapping) else EMPTY,
        {key: str(value) for key, value in names.items()},
    )


def _fixed_type(reader: ConfigReader, key: str) -> str:
    """The class that the outer class always makes for a part; empty where the part decides."""
    parts = reader.all_defaults.get(reader.model_type, EMPTY).get("parts")
    found = parts.get(key) if isinstance(parts, Mapping) else None
    return found if isinstance(found, str) else ""


def towers(reader: ConfigReader, family: str) -> tuple[ConfigReader, ConfigReader]:
    """Readers of the text tower's config and of the vision tower's.

    Where a config still has ``text_config_dict`` or ``vision_config_dict``, that one is taken
    (``CLIPConfig.__post_init__`` of transformers 5.23).
    """
    found = []
    for part in ("text", "vision"):
        key = f"{part}_config_dict" if reader.has(f"{part}_config_dict") else f"{part}_config"
        spec = PartSpec(key=key, model_type=f"{family}_{part}_model")
        found.append(read_part(reader, spec).reader)
    return found[0], found[1]


def same_class(reader: ConfigReader, config: Mapping[str, object]) -> ConfigReader:
    """Another config of the same class, from the same place."""
    return reader.nested(
        config,
        reader.path,
        model_type=reader.model_type,
        defaults=reader.defaults,
        renamed=reader.renamed,
        absent_part=reader.absent_part,
    )


def unknown_part(part: Part, known: Mapping[str, object]) -> ConfigError:
    """Make the error for a part of a kind that no module reads."""
    return part.reader.fail(
        "model_type", f"{part.model_type!r} is not supported here; known are {', '.join(known)}"
    )
