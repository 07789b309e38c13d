"""peft's ``adapter_config.json`` (0.21): every key is used, said or refused."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from memplan.errors import ConfigError, SetupError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.text import shown
from memplan.training.adapters import Adapter, Ia3, Lora, PromptTuning

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
    if os.path.isdir(file):  # noqa: PTH112 - which says no of what can be no path
        file = file / FILE_NAME
    return adapter_from_mapping(read_mapping(str(file)), source=str(file))


def adapter_from_mapping(values: Mapping[str, object], *, source: str) -> AdapterConfig:
    """Make an adapter of what a file holds; ``source`` names it in messages.

    >>> adapter_from_mapping({"peft_type": "LORA", "r": 4}, source="example").adapter.rank
    4
    """
    name = values.get("peft_type")
    kind = _KINDS.get(str(name))
    if kind is None:
        kinds = ", ".join(_KINDS)
        problem = "is missing" if name is None else f"{shown(name)} is not modelled"
        msg = f"{source}: peft_type: {problem}; memplan knows {kinds}"
        raise ConfigError(msg)
    known = (*kind.fields, *kind.idle, *_IDLE, *kind.refused)
    fields: dict[str, object] = {}
    for key, value in values.items():
        if key not in known:
            msg = f"{source}: {key}: no such key of peft's {name}.{did_you_mean(key, known)}"
            raise ConfigError(msg)
        if key in kind.refused and value not in (None, False, [], {}, kind.refused[key]):
            msg = f"{source}: {key}: {shown(value)} is not modelled"
            raise ConfigError(msg)
        field = kind.fields.get(key)
        if field and value is not None:
            fields[field] = value
    try:
        return AdapterConfig(adapter=kind.make(**fields))
    except SetupError as error:
        msg = f"{source}: {error}"
        raise ConfigError(msg) from None


@dataclass(frozen=True, slots=True)
class _Kind:
    """A ``peft_type``: the keys of its configuration beside those of all."""

    make: Callable[..., Adapter]
    fields: Mapping[str, str]
    """peft's keys, and the fields they are."""
    idle: frozenset[str]
    """Keys that change no bytes of a training step."""
    refused: Mapping[str, object]
    """Keys of which something other than nothing, or than this, is not modelled."""


_IDLE = frozenset({
    "peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision",
    "inference_mode", "peft_version",
})  # fmt: skip
"""Keys of every configuration that change no bytes of a training step."""
_LORA_IDLE = frozenset({
    "fan_in_fan_out", "init_lora_weights", "alpha_pattern", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "qalora_group_size", "megatron_core", "runtime_config",
})  # fmt: skip
_LORA_REFUSED = dict.fromkeys((
    "layers_pattern", "megatron_config", "trainable_token_indices", "velora_config",
    "alora_invocation_tokens", "use_qalora", "monteclora_config", "layer_replication",
    "use_bdlora", "arrow_config", "kasa_config", "ensure_weight_tying",
))  # fmt: skip
_KINDS = {
    "LORA": _Kind(
        Lora,
        {
            "r": "rank", "lora_alpha": "alpha", "target_modules": "targets",
            "target_parameters": "parameters",
            "exclude_modules": "exclude", "layers_to_transform": "layers",
            "rank_pattern": "rank_pattern", "lora_dropout": "dropout", "bias": "bias",
            "lora_bias": "lora_bias", "use_rslora": "rslora", "use_dora": "dora",
            "modules_to_save": "modules_to_save",
        },
        _LORA_IDLE,
        _LORA_REFUSED,
    ),
    "IA3": _Kind(
        Ia3,
        {
            "target_modules": "targets", "feedforward_modules": "feedforward",
            "exclude_modules": "exclude", "modules_to_save": "modules_to_save",
        },
        frozenset({"fan_in_fan_out", "init_ia3_weights"}),
        {},
    ),
    "PROMPT_TUNING": _Kind(
        PromptTuning,
        {"num_virtual_tokens": "tokens"},
        frozenset({
            "token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers",
            "prompt_tuning_init", "prompt_tuning_init_text",
            "tokenizer_name_or_path", "tokenizer_kwargs",
        }),
        {"modules_to_save": None},
    ),
    "P_TUNING": _Kind(
        PromptTuning,
        {"num_virtual_tokens": "tokens", "encoder_hidden_size": "hidden_size"},
        frozenset({
            "token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers",
            "encoder_num_layers", "encoder_dropout",
        }),
        {"encoder_reparameterization_type": "MLP", "modules_to_save": None},
    ),
}  # fmt: skip
"""What is modelled, by ``peft_type``."""
