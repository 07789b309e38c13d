"""axolotl's YAML (0.19): what ``axolotl train FILE`` reads."""

from memplan.model.spec import ModelSpec
from memplan.sources.emitters.emitted import Emitted, refuse
from memplan.sources.emitters.trainer_values import (
    ATTENTION,
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
from memplan.training.choices_of_kernels.kernels import Packing
from memplan.training.precision import Precision
from memplan.training.setup import TrainingSetup

_OWN = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "optim",
    "bf16", "fp16", "use_liger_kernel", "liger_kernel_config", "eval_strategy",
    "per_device_eval_batch_size", "prediction_loss_only", "eval_accumulation_steps",
)  # fmt: skip
"""Arguments that axolotl has keys of its own for, or none."""


def emit(setup: TrainingSetup, model: ModelSpec) -> Emitted:
    """Write the file of a setup that axolotl's trainer runs."""
    arguments = argument_values(setup)
    precision = setup.chosen_precision
    values: dict[str, object] = {
        "base_model": model_name(model),
        "micro_batch_size": setup.micro_batch_size,
        "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        "gradient_checkpointing": arguments["gradient_checkpointing"],
        "optimizer": arguments["optim"],
        "bf16": "full" if precision is Precision.BF16 else bool(arguments.get("bf16")) or (
            precision is Precision.BF16_AUTOCAST
        ),
        "fp16": bool(arguments.get("fp16")),
        **_adapter(setup),
        **without(arguments, *_OWN),
    }  # fmt: skip
    _say_fsdp(values)
    if setup.seq_len is not None:
        values["sequence_len"] = setup.seq_len
    if setup.packing is Packing.DOCUMENTS:
        values["sample_packing"] = True
    elif setup.packing is Packing.PADDING_FREE:
        values["batch_flattening"] = True
    kernel = ATTENTION.get(setup.chosen_kernels.attention)
    if setup.attention is not None and kernel is not None:
        values["attn_implementation"] = kernel
    if setup.packing is not Packing.NONE and kernel not in _VARIABLE:
        msg = (
            "axolotl puts sequences side by side under attention of variable length alone: say "
            "`attention='flash'`"
        )
        raise refuse(msg)
    return Emitted(values=values, setup=setup, notes=(launch_words(setup, "axolotl train FILE"),))


_VARIABLE = ("flash_attention_2", "flash_attention_3")
"""Attention that takes sequences side by side (``utils/schemas/validation.py``)."""


def _say_fsdp(values: dict[str, object]) -> None:
    """Say the Trainer's ``fsdp`` and its version in axolotl's words: the section alone switches it on."""
    values.pop("fsdp", None)
    config = values.get("fsdp_config")
    if isinstance(config, dict) and "version" in config:
        values["fsdp_config"] = {name: config[name] for name in config if name != "version"}
        values["fsdp_version"] = config["version"]


def _adapter(setup: TrainingSetup) -> dict[str, object]:
    adapter, packed = adapter_of(setup), four_bits(setup)
    values: dict[str, object] = {}
    if packed is not None:
        values |= {
            "load_in_4bit": True,
            "bnb_config_kwargs": {
                "bnb_4bit_quant_type": packed.kind.value,
                "bnb_4bit_use_double_quant": packed.double_quant,
            },
        }
    elif is_int8(setup):
        values["load_in_8bit"] = True
    if adapter is None:
        return values
    targets = targets_of(adapter)
    values |= {
        "adapter": "lora" if packed is None else "qlora", "lora_r": adapter.rank,
        "lora_alpha": adapter.alpha or DEFAULT_ALPHA, "lora_dropout": adapter.dropout,
    }  # fmt: skip
    if targets == "all-linear":
        values["lora_target_linear"] = True
    elif targets is not None:
        values["lora_target_modules"] = targets
    return values
