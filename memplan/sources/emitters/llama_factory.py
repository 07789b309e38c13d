"""LLaMA-Factory's YAML (0.9.5): what ``llamafactory-cli train FILE`` reads."""

from memplan.model.spec import ModelSpec
from memplan.sources.emitters.emitted import Emitted
from memplan.sources.emitters.trainer_values import (
    adapter_of,
    argument_values,
    four_bits,
    is_int8,
    launch_words,
    model_name,
    targets_of,
    without,
)
from memplan.training.adapters import DEFAULT_ALPHA
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Packing
from memplan.training.precision import Precision
from memplan.training.setup import TrainingSetup

_ATTENTION = {
    AttentionKernel.EAGER: "disabled", AttentionKernel.SDPA: "sdpa", AttentionKernel.FLASH: "fa2",
}  # fmt: skip


def emit(setup: TrainingSetup, model: ModelSpec) -> Emitted:
    """Write the file of a setup that LLaMA-Factory's supervised trainer runs."""
    arguments = argument_values(setup)
    liger = bool(arguments.pop("use_liger_kernel", False))
    arguments.pop("liger_kernel_config", None)
    values: dict[str, object] = {
        "model_name_or_path": model_name(model),
        "stage": "sft",
        "do_train": True,
        **_adapter(setup),
        "disable_gradient_checkpointing": not arguments["gradient_checkpointing"],
        **without(arguments, "gradient_checkpointing"),
    }
    if setup.chosen_precision is Precision.BF16:
        values["pure_bf16"] = True
    if liger:
        values["enable_liger_kernel"] = True
    if setup.seq_len is not None:
        values["cutoff_len"] = setup.seq_len
    if setup.packing is Packing.DOCUMENTS:
        values["neat_packing"] = True
    kernel = _ATTENTION.get(setup.chosen_kernels.attention)
    if setup.attention is not None and kernel is not None:
        values["flash_attn"] = kernel
    return Emitted(
        values=values, setup=setup, notes=(launch_words(setup, "llamafactory-cli train FILE"),)
    )


def _adapter(setup: TrainingSetup) -> dict[str, object]:
    adapter, packed = adapter_of(setup), four_bits(setup)
    values: dict[str, object] = {"finetuning_type": "full" if adapter is None else "lora"}
    if packed is not None:
        values |= {
            "quantization_bit": 4, "quantization_type": packed.kind.value,
            "double_quantization": packed.double_quant,
        }  # fmt: skip
    elif is_int8(setup):
        values["quantization_bit"] = 8
    if adapter is None:
        return values
    targets = targets_of(adapter)
    values |= {
        "lora_rank": adapter.rank, "lora_alpha": adapter.alpha or DEFAULT_ALPHA,
        "lora_dropout": adapter.dropout, "use_rslora": adapter.rslora, "use_dora": adapter.dora,
        "lora_target": ",".join(targets) if isinstance(targets, list) else "all",
    }  # fmt: skip
    return values
