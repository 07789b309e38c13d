"""What several stacks on transformers' Trainer say alike: its own arguments, and adapters' settings."""

from collections.abc import Mapping
from dataclasses import replace

from memplan.model.spec import ModelSpec
from memplan.sources.emitters import training_arguments
from memplan.sources.emitters.emitted import refuse
from memplan.training.adapters import Lora
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Packing
from memplan.training.precision import Precision
from memplan.training.quantization import Quantization, QuantizationKind
from memplan.training.setup import TrainingSetup

ATTENTION = {
    AttentionKernel.EAGER: "eager", AttentionKernel.SDPA: "sdpa",
    AttentionKernel.FLASH: "flash_attention_2", AttentionKernel.FLASH3: "flash_attention_3",
}  # fmt: skip
_HALF_WEIGHTS = {
    Precision.BF16_AUTOCAST: Precision.BF16_AMP, Precision.BF16: Precision.FP32,
}  # fmt: skip
"""Precisions of weights that are loaded in bf16, and those whose flags say the rest."""


def argument_values(setup: TrainingSetup) -> dict[str, object]:
    """transformers' arguments of a setup, without what a stack has keys of its own for.

    Raises ``SetupError`` for what the Trainer cannot be told.
    """
    plain = replace(setup, packing=Packing.NONE, adapter=None, quantize=None)
    known = _HALF_WEIGHTS.get(setup.chosen_precision, setup.chosen_precision)
    made = training_arguments.emit(replace(plain, precision=known))
    return dict(made.values)


def has_half_weights(setup: TrainingSetup) -> bool:
    """Whether the weights are loaded in bf16."""
    return setup.chosen_precision in _HALF_WEIGHTS


def model_name(model: ModelSpec) -> str:
    """What the hub calls a built-in model; other models as they are called here."""
    from memplan.sources.about_models.registry import find_builtin

    builtin = find_builtin(model.name)
    return model.name if builtin is None else builtin.hub_id


def adapter_of(setup: TrainingSetup) -> Lora | None:
    """The LoRA that is trained; None: the model itself.

    Raises ``SetupError`` for other adapters.
    """
    adapter = setup.adapter
    if adapter is None or isinstance(adapter, Lora):
        return adapter
    msg = f"this stack's file has LoRA alone, not {adapter}"
    raise refuse(msg)


def targets_of(adapter: Lora) -> list[str] | str | None:
    """Its targets as a list of names, or the word or pattern that stands for them."""
    return list(adapter.targets) if isinstance(adapter.targets, tuple) else adapter.targets


def four_bits(setup: TrainingSetup) -> Quantization | None:
    """How the base is packed into four bits; None: it is not."""
    how = setup.chosen_quantization
    kinds = (QuantizationKind.NF4, QuantizationKind.FP4)
    return how if how is not None and how.kind in kinds else None


def is_int8(setup: TrainingSetup) -> bool:
    """Whether the base is in eight bits."""
    how = setup.chosen_quantization
    return how is not None and how.kind is QuantizationKind.INT8


def launch_words(setup: TrainingSetup, command: str) -> str:
    """The line that starts it on its GPUs.

    >>> launch_words(TrainingSetup(num_gpus=8), "trl sft --config FILE")
    'launch it with: accelerate launch --num_processes 8 trl sft --config FILE'
    """
    nodes = f" --num_machines {setup.nodes}" if setup.nodes > 1 else ""
    start = f"accelerate launch --num_processes {setup.num_gpus}{nodes} "
    return f"launch it with: {start if setup.num_gpus > 1 else ''}{command}"


def without(values: Mapping[str, object], *names: str) -> dict[str, object]:
    """The values but for some."""
    return {name: value for name, value in values.items() if name not in names}
