"""A training setup written in YAML: the fields of ``TrainingSetup``, under their own names.

``configs/setups`` has examples. Every key is optional; ``name`` and ``notes`` are for the reader.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path

from memplan.errors import ConfigError, SetupError, did_you_mean
from memplan.training.setup import SETUP_FIELDS, TrainingSetup

_REMARKS = ("name", "notes")
"""Keys that say something to the reader alone."""


def read_setup(path: str | Path) -> TrainingSetup:
    """Read a setup from a YAML (or JSON) file.

    Raises ``ConfigError`` when the file cannot be read, or a key is unknown or wrong.
    """
    from memplan.sources.files import read_mapping

    return setup_from_mapping(read_mapping(path), source=str(path))


def setup_from_mapping(
    values: Mapping[str, object], *, source: str, section: str = ""
) -> TrainingSetup:
    """Make a setup from its fields; ``source`` and ``section`` say where they were read.

    >>> setup_from_mapping({"num_gpus": 8, "zero_stage": 3}, source="example").zero_stage.name
    'PARAMETERS'
    """
    given = {}
    for key, value in values.items():
        if key in _REMARKS:
            continue
        check_field(key, source=source, section=section)
        given[key] = _checked(key, value, source=source, section=section)
    try:
        return TrainingSetup(**given)  # type: ignore[arg-type]
    except SetupError as error:
        msg = f"{source}: {section}{error}"
        raise ConfigError(msg) from None


def check_field(key: str, *, source: str, section: str = "") -> None:
    """Refuse a key that is no field of ``TrainingSetup``, with the nearest name."""
    if key in SETUP_FIELDS:
        return
    hint = did_you_mean(key, SETUP_FIELDS) or f" There are: {', '.join(SETUP_FIELDS)}"
    msg = f"{source}: {section}{key}: no such setting.{hint}"
    raise ConfigError(msg)


def _checked(key: str, value: object, *, source: str, section: str) -> object:
    """Refuse a value of the wrong kind, which ``TrainingSetup`` takes the word of its types for."""
    default = _DEFAULTS[key]
    problem = ""
    if value is None and default is not None:
        problem = "is empty: give a value or leave the key out"
    elif isinstance(default, bool) and not isinstance(value, bool):
        problem = f"write true or false, not {value!r}"
    elif key == "dropout" and (isinstance(value, bool) or not isinstance(value, int | float)):
        problem = "" if value is None else f"write a probability such as 0.1, not {value!r}"
    elif key in _TEXTS and not isinstance(value, str | None):
        problem = f"write text, not {value!r}"
    elif key == "engine_options" and not isinstance(value, Mapping):
        problem = "write a mapping of the engine's own settings"
    elif key == "engine_options" and isinstance(value, Mapping):
        problem = _option_problem(value)
    elif isinstance(value, Mapping | list) and key not in ("engine_options", "adapter", "quantize"):
        problem = f"write one value, not {'a list' if isinstance(value, list) else 'a mapping'}"
    if problem:
        msg = f"{source}: {section}{key}: {problem}"
        raise ConfigError(msg)
    return value


def _option_problem(options: Mapping[object, object]) -> str:
    """What is wrong with the first of an engine's settings that cannot be one."""
    for name, value in options.items():
        if not isinstance(name, str):
            return f"the key {name!r} is not text: put it in quotes"
        if isinstance(value, Mapping | list):
            kind = "a list" if isinstance(value, list) else "a mapping"
            return f"{name}: write one value, not {kind}"
    return ""


_TEXTS = frozenset({"freeze", "kernels", "pipeline_schedule"})
_DEFAULTS = {
    each.name: each.default if each.default is not MISSING else None
    for each in fields(TrainingSetup)
}
