"""TRL's YAML (1.16): what ``trl sft --config FILE`` reads, ``SFTConfig`` and ``ModelConfig`` in one."""

from memplan.model.spec import ModelSpec
from memplan.sources.emitters.emitted import Emitted
from memplan.sources.emitters.trainer_values import (
    ATTENTION,
    adapter_of,
    argument_values,
    four_bits,
    has_half_weights,
    is_int8,
    launch_words,
    model_name,
    targets_of,
)
from memplan.training.adapters import DEFAULT_ALPHA
from memplan.training.choices_of_kernels.kernels import Packing
from memplan.training.setup import TrainingSetup


def emit(setup: TrainingSetup, model: ModelSpec) -> Emitted:
    """Write the file of a setup that ``SFTTrainer`` runs."""
    values: dict[str, object] = {
        "model_name_or_path": model_name(model),
        "dtype": "bfloat16" if has_half_weights(setup) else "float32",
        **argument_values(setup),
        **_adapter(setup),
    }
    values.setdefault("bf16", False)
    if setup.seq_len is not None:
        values["max_length"] = setup.seq_len
    if setup.packing is Packing.PADDING_FREE:
        values["padding_free"] = True
    kernel = ATTENTION.get(setup.chosen_kernels.attention)
    if setup.attention is not None and kernel is not None:
        values["attn_implementation"] = kernel
    return Emitted(
        values=values, setup=setup, notes=(launch_words(setup, "trl sft --config FILE"),)
    )


def _adapter(setup: TrainingSetup) -> dict[str, object]:
    adapter, packed = adapter_of(setup), four_bits(setup)
    values: dict[str, object] = {}
    if packed is not None:
        values |= {
            "load_in_4bit": True, "bnb_4bit_quant_type": packed.kind.value,
            "use_bnb_nested_quant": packed.double_quant,
        }  # fmt: skip
    elif is_int8(setup):
        values["load_in_8bit"] = True
    if adapter is None:
        return values
    targets = targets_of(adapter)
    values |= {
        "use_peft": True, "lora_r": adapter.rank, "lora_alpha": adapter.alpha or DEFAULT_ALPHA,
        "lora_dropout": adapter.dropout, "use_rslora": adapter.rslora, "use_dora": adapter.dora,
    }  # fmt: skip
    if targets is not None:
        values["lora_target_modules"] = targets if isinstance(targets, list) else [targets]
    return values
