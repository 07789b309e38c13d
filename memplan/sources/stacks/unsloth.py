"""Unsloth's YAML (``unsloth train --config``): a model and four sections (``unsloth_cli/config.py``).

Weights are loaded in bf16, 4 bits a weight under adapters unless it says otherwise (``unsloth_cli/commands/train.py``).
"""

from collections.abc import Mapping

from memplan.sources.stacks.common.found import DeviceMap, Found
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.wording import lora

NAME = "Unsloth"

_TRAINING = frozenset({
    "training_type", "max_seq_length", "batch_size", "gradient_accumulation_steps", "load_in_4bit",
    "gradient_checkpointing",
})  # fmt: skip
_CHECKPOINTING = {
    "unsloth": "full",
    "true": "full",
    "True": "full",
    "none": "none",
    "False": "none",
}
_KINDS = {"lora": True, "full": False}


def looks_like(values: Mapping[str, object]) -> bool:
    """Whether keys of its own stand in one of its sections."""
    training, adapter = values.get("training"), values.get("lora")
    named = isinstance(training, Mapping) and bool(training.keys() & _TRAINING)
    adapted = isinstance(adapter, Mapping) and "lora_r" in adapter
    return isinstance(values.get("model", ""), str) and (named or adapted)


def preset_for(_values: Mapping[str, object], _source: str) -> str:
    """It has one set of defaults."""
    return "unsloth-cli"


def read(keys: Keys, found: Found, given: Mapping[str, object]) -> None:
    """Put what the keys say into ``found``."""
    found.model = keys.model("model")
    # models/llama.py, ``FastLlamaModel.from_pretrained``: device_map "sequential"
    found.device_map = DeviceMap.REPLICAS
    found.fields["micro_batch_size"] = keys.count("training.batch_size") or 1
    steps = keys.count("training.gradient_accumulation_steps")
    found.fields["gradient_accumulation_steps"] = steps or 1
    length = keys.count("training.max_seq_length")
    found.fields["seq_len"] = length
    if keys.flag("training.packing"):
        found.fields["packing"] = "documents"
    if "seq_len" not in given:
        found.notes.append(f"max_seq_length {length} is taken for the length of every sequence")
    found.fields["checkpointing"] = keys.choice("training.gradient_checkpointing", _CHECKPOINTING)
    packed = keys.flag("training.load_in_4bit")
    adapter = _adapter(keys)
    if not keys.choice("training.training_type", _KINDS):
        return
    found.fields["adapter"] = adapter
    if packed:
        found.fields["quantize"] = "nf4"
        found.quantization["double_quant"] = True


def _adapter(keys: Keys) -> dict[str, object]:
    return lora(
        rank=keys.count("lora.lora_r") or 64, alpha=keys.number("lora.lora_alpha"),
        dropout=keys.number("lora.lora_dropout"), targets=keys.names("lora.target_modules"),
        rslora=keys.flag("lora.use_rslora"), dora=keys.flag("lora.use_dora"),
    )  # fmt: skip
