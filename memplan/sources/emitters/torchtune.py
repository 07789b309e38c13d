"""torchtune's YAML (0.6.1): what ``tune run RECIPE --config FILE`` reads."""

import re

from memplan.model.spec import ModelSpec
from memplan.sources.emitters.emitted import Emitted, refuse
from memplan.sources.emitters.trainer_values import adapter_of, four_bits
from memplan.sources.stacks.common.models import torchtune_builder
from memplan.training.adapters import DEFAULT_ALPHA
from memplan.training.choices import Offload, Recomputation, checkpointing_text
from memplan.training.choices_of_kernels.kernels import LossKernel, Packing
from memplan.training.compilation import Compilation
from memplan.training.optimizers import Optimizer
from memplan.training.precision import Engine, Precision
from memplan.training.setup import TrainingSetup

_DTYPES = {Precision.BF16: "bf16", Precision.FP32: "fp32"}
_OPTIMIZERS: dict[Optimizer, dict[str, object]] = {
    Optimizer.ADAMW_FUSED: {"_component_": "torch.optim.AdamW", "fused": True},
    Optimizer.ADAMW_FOREACH: {"_component_": "torch.optim.AdamW"},
    Optimizer.SGD: {"_component_": "torch.optim.SGD"},
    Optimizer.BNB_PAGED_ADAMW: {"_component_": "bitsandbytes.optim.PagedAdamW"},
    Optimizer.BNB_PAGED_ADAMW_8BIT: {"_component_": "bitsandbytes.optim.PagedAdamW8bit"},
    Optimizer.BNB_ADAMW_8BIT: {"_component_": "bitsandbytes.optim.AdamW8bit"},
}
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")


def emit(setup: TrainingSetup, model: ModelSpec) -> Emitted:
    """Write the file of a setup that a recipe of torchtune's runs.

    Raises ``SetupError`` for models without a builder, and for what no recipe does.
    """
    recipe = _recipe(setup)
    dtype = _DTYPES.get(setup.chosen_precision)
    optimizer = _OPTIMIZERS.get(setup.optimizer)
    if dtype is None or optimizer is None:
        what = setup.chosen_precision.value if dtype is None else setup.optimizer.value
        msg = (
            f"torchtune's recipes have no {what}; they have bf16 and fp32 throughout, AdamW and SGD"
        )
        raise refuse(msg)
    values: dict[str, object] = {
        "model": _model(setup, model),
        "tokenizer": {"max_seq_len": setup.seq_len},
        "batch_size": setup.micro_batch_size,
        "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        "dtype": dtype,
        "enable_activation_checkpointing": _checkpointing(setup),
        "compile": setup.compile is Compilation.LAYER,
        "optimizer": optimizer,
        "optimizer_in_bwd": setup.optimizer_in_backward,
    }
    if setup.packing is Packing.DOCUMENTS:
        values["dataset"] = {"packed": True}
    if setup.chosen_kernels.loss is LossKernel.TORCHTUNE:
        values["loss"] = {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"}
    else:
        values["loss"] = {"_component_": "torch.nn.CrossEntropyLoss"}
    if setup.chosen_engine is Engine.FSDP:
        values["fsdp_cpu_offload"] = setup.offload_param is Offload.CPU
    line = f"launch it with: tune run --nproc_per_node {setup.gpus_per_node} {recipe} --config FILE"
    return Emitted(values=values, setup=setup, notes=(line,))


def _recipe(setup: TrainingSetup) -> str:
    """The recipe: on several GPUs the distributed ones, which shard with FSDP2."""
    engine = setup.chosen_engine
    if engine not in (Engine.FSDP, Engine.DDP) or (engine is Engine.DDP and setup.num_gpus > 1):
        msg = f"torchtune's recipes run on one GPU or with FSDP2, not {engine.value}"
        raise refuse(msg)
    place = "distributed" if engine is Engine.FSDP else "single_device"
    return f"{'full' if setup.adapter is None else 'lora'}_finetune_{place}"


def _model(setup: TrainingSetup, model: ModelSpec) -> dict[str, object]:
    adapter = adapter_of(setup)
    start = "" if adapter is None else "qlora_" if four_bits(setup) is not None else "lora_"
    builder = torchtune_builder(model.name)
    if builder is None:
        msg = f"torchtune has no builder of {model.name}"
        raise refuse(msg)
    values: dict[str, object] = {
        "_component_": f"torchtune.models.{_family(builder)}.{start}{builder}"
    }
    if adapter is None:
        return values
    named = adapter.targets if isinstance(adapter.targets, tuple) else (*_ATTENTION, *_MLP)
    return {
        **values,
        "lora_attn_modules": [_ATTENTION[name] for name in named if name in _ATTENTION],
        "apply_lora_to_mlp": any(name in _MLP for name in named),
        "apply_lora_to_output": "lm_head" in named,
        "lora_rank": adapter.rank,
        "lora_alpha": adapter.alpha or DEFAULT_ALPHA,
        "lora_dropout": adapter.dropout,
        "use_dora": adapter.dora,
    }


def _family(builder: str) -> str:
    """The package that a builder is of: its name without the size.

    >>> _family("llama3_2_1b"), _family("qwen2_5_0_5b"), _family("qwen2_0_5b"), _family("phi3_mini")
    ('llama3_2', 'qwen2_5', 'qwen2', 'phi3')
    """
    match = re.match(_PACKAGES, builder)
    assert match is not None, builder
    return match[0]


_PACKAGES = re.compile(
    r"code_llama2|llama3_2_vision|llama3_[123](?=_\d)|llama[234]|mistral|gemma2?|phi[34]|qwen2_5(?=_\d)|qwen[23]"
)
"""Packages of ``torchtune.models``."""


def _checkpointing(setup: TrainingSetup) -> bool:
    value = setup.checkpointing
    if value in (Recomputation.NONE, Recomputation.FULL):
        return value is Recomputation.FULL
    msg = f"torchtune checkpoints all layers or none, not {checkpointing_text(value)}"
    raise refuse(msg)
