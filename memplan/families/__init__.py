"""The families of models: from a config to a ``ModelSpec``.

A type's own class reads its config (``memplan.classes``): here is settled which type it is, for which task,
and what its transformers class refuses. Defaults and key names of that class come from
``memplan/data/config_defaults.json``.
"""

from collections.abc import Mapping
from functools import cache

from memplan.errors import ConfigError, UnsupportedFamilyError, did_you_mean
from memplan.families.class_checks import (
    DECLARING_FP32,
    WITHOUT_AUTOCAST,
    WITHOUT_FLASH,
    WITHOUT_SDPA,
    check_heads,
)
from memplan.families.request import DIFFUSERS_CLASS, ReadRequest, deduce_model_type, resolve_task
from memplan.fast_dataclass import replace
from memplan.model.config import MAX_LAYERS, ConfigReader
from memplan.model.read_log import ReadLog
from memplan.model.spec import ModelSpec, Task
from memplan.upward import provided


def supported_families() -> tuple[str, ...]:
    """Every ``model_type`` that can be read, in alphabetical order."""
    return tuple(sorted(_known()))


@cache
def _known() -> frozenset[str]:
    found: frozenset[str] = provided("class_types", None)
    return found


def read_model(
    config: Mapping[str, object],
    *,
    source: str,
    name: str,
    defaults: Mapping[str, Mapping[str, object]],
    task: Task | None = None,
    family: str | None = None,
    num_labels: int | None = None,
    log: ReadLog | None = None,
) -> ModelSpec:
    """Turn a config into a ``ModelSpec``.

    ``defaults`` holds, for each model type, what its transformers class fills in (``defaults``) and
    calls differently (``renamed``). ``family`` overrules the config's own ``model_type``.

    Raises ``ConfigError`` for a config that cannot be right, ``UnsupportedFamilyError`` for a kind
    of model that has no class.
    """
    model_type = family or deduce_model_type(config, source=source, known=_known())
    _check_known(model_type, config, source=source, is_named=family is not None)
    reader = _reader(config, model_type, defaults, source=source, log=log)
    request = ReadRequest(
        name=name,
        model_type=model_type,
        task=resolve_task(reader, model_type, task),
        num_labels=num_labels,
        all_defaults=defaults,
    )
    check_heads(reader, model_type)
    try:
        model: ModelSpec = provided("class_facts", reader, request)
    except RecursionError as error:
        msg = f"{source}: the config is nested too deeply"
        raise ConfigError(msg) from error
    _check_read(model, num_labels, source=source)
    return replace(
        model,
        layerdrop=_layerdrop(reader),
        without_sdpa=model_type in WITHOUT_SDPA,
        without_flash=model_type in WITHOUT_FLASH,
        declares_fp32=model_type in DECLARING_FP32,
        without_autocast=model_type in WITHOUT_AUTOCAST,
    )


def _reader(
    config: Mapping[str, object],
    model_type: str,
    defaults: Mapping[str, Mapping[str, object]],
    *,
    source: str,
    log: ReadLog | None,
) -> ConfigReader:
    """A config, read as its type's transformers class would."""
    row = defaults.get(model_type, {})
    return ConfigReader(
        config,
        source=source,
        model_type=model_type,
        defaults=_mapping(row.get("defaults")),
        renamed={key: str(value) for key, value in _mapping(row.get("renamed")).items()},
        log=log,
        all_defaults=defaults,
    )


def _check_known(
    model_type: str, config: Mapping[str, object], *, source: str, is_named: bool
) -> None:
    """Refuse a type that has no class; ``is_named``: the user says so, and not the config."""
    if model_type in _known():
        return
    if not is_named and DIFFUSERS_CLASS in config:
        msg = (
            f"{source}: {DIFFUSERS_CLASS} {model_type!r} is none of diffusers' classes that are modelled: "
            f"{', '.join(each for each in supported_families() if each[0].isupper())}; trace the module with "
            "memplan.trace, or give the config of its transformer"
        )
        raise ConfigError(msg)
    msg = (
        f"{source}: model_type {model_type!r} is not supported."
        f"{did_you_mean(model_type, supported_families())} Name the nearest one with `family`: "
        f"{', '.join(supported_families())}"
    )
    raise UnsupportedFamilyError(msg)


def _check_read(model: ModelSpec, num_labels: int | None, *, source: str) -> None:
    """Refuse what was read where it cannot be laid out."""
    if num_labels is not None and model.task in _WITHOUT_LABELS:
        msg = (
            f"{source}: num_labels {num_labels}: the task {model.task.value} has no labels; name "
            "one that has, such as `task='sequence-classification'`"
        )
        raise ConfigError(msg)
    if model.num_layers > MAX_LAYERS:
        msg = f"{source}: has {model.num_layers} layers in all, and memplan lays out {MAX_LAYERS}"
        raise ConfigError(msg)


def _layerdrop(reader: ConfigReader) -> tuple[tuple[str, float], ...]:
    """The chances with which a step leaves out layers of the config's stacks."""
    found = ((part, reader.number(key)) for part, key in _LAYERDROP)
    return tuple((part, chance) for part, chance in found if chance)


_LAYERDROP = (
    ("speech_encoder", "speech_encoder_layerdrop"),
    ("decoder", "decoder_layerdrop"),
    ("encoder", "encoder_layerdrop"),
    ("encoder", "layerdrop"),
)
"""What the name of a stack has in it, and the key of the chance that its layers are left out."""
_WITHOUT_LABELS = (Task.CAUSAL_LM, Task.SEQ2SEQ_LM, Task.MASKED_LM)
"""Tasks whose classes have no number of labels."""


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
