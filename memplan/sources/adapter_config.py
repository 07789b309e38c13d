"""peft's ``adapter_config.json`` (0.21): every key is used, said or refused."""

from collections.abc import Mapping
from pathlib import Path

from memplan.errors import ConfigError, SetupError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.training.adapters import Adapter, Lora

FILE_NAME = "adapter_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """An adapter as a file describes it."""

    adapter: Adapter
    notes: tuple[str, ...] = ()
    """What of the file changes no figure, in words."""


def read_adapter_config(path: str | Path) -> AdapterConfig:
    """Read a file, or the one in a folder.

    Raises ``ConfigError`` when it cannot be read, or holds what memplan does not know or model.
    """
    from memplan.sources.files import read_mapping

    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    return adapter_from_mapping(read_mapping(str(file)), source=str(file))


def adapter_from_mapping(values: Mapping[str, object], *, source: str) -> AdapterConfig:
    """Make an adapter of what a file holds; ``source`` names it in messages.

    >>> adapter_from_mapping({"peft_type": "LORA", "r": 4}, source="example").adapter.rank
    4
    """
    kind = values.get("peft_type")
    if kind != "LORA":
        problem = "is missing" if kind is None else f"{kind!r} is not modelled: LORA is"
        msg = f"{source}: peft_type: {problem}"
        raise ConfigError(msg)
    known = (*_FIELDS, *_IDLE, *_REFUSED)
    fields: dict[str, object] = {}
    for key, value in values.items():
        if key not in known:
            msg = f"{source}: {key}: no such key of peft's LoraConfig.{did_you_mean(key, known)}"
            raise ConfigError(msg)
        if key in _REFUSED and value not in (None, False, [], {}):
            msg = f"{source}: {key}: is not modelled; memplan knows LoRA, rsLoRA and DoRA"
            raise ConfigError(msg)
        field = _FIELDS.get(key)
        if field and value is not None:
            fields[field] = value
    try:
        return AdapterConfig(adapter=Lora(**fields))  # type: ignore[arg-type]
    except SetupError as error:
        msg = f"{source}: {error}"
        raise ConfigError(msg) from None


_FIELDS = {
    "r": "rank", "lora_alpha": "alpha", "target_modules": "targets",
    "exclude_modules": "exclude", "layers_to_transform": "layers", "rank_pattern": "rank_pattern",
    "lora_dropout": "dropout", "bias": "bias", "lora_bias": "lora_bias", "use_rslora": "rslora",
    "use_dora": "dora", "modules_to_save": "modules_to_save",
}  # fmt: skip
"""peft's keys, and the fields of ``Lora`` they are."""
_IDLE = frozenset({
    "peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision",
    "inference_mode", "fan_in_fan_out", "init_lora_weights", "alpha_pattern", "peft_version",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "layers_pattern", "megatron_core", "runtime_config",
})  # fmt: skip
"""Keys that change no bytes of a training step."""
_REFUSED = frozenset({
    "megatron_config", "trainable_token_indices", "velora_config", "alora_invocation_tokens",
    "use_qalora", "monteclora_config", "layer_replication", "target_parameters", "use_bdlora",
    "arrow_config", "kasa_config", "ensure_weight_tying",
})  # fmt: skip
"""Keys of which something other than their default is not modelled."""
