"""``transformers.TrainingArguments`` (5.23) as a mapping that ``HfArgumentParser`` reads.

DeepSpeed's configuration stands in it as a mapping, so one file is all there is to pass on. Number
of GPUs and sequence length are no training arguments.
"""

from dataclasses import replace

from memplan.sources.emitters import deepspeed
from memplan.sources.emitters.emitted import Emitted, refuse
from memplan.training.choices import Recomputation, checkpointing_text
from memplan.training.choices_of_kernels.kernels import (
    WHOLE,
    AttentionKernel,
    FeedForwardKernel,
    KernelPreset,
    Kernels,
    LossKernel,
    NormKernel,
    Packing,
    RotaryKernel,
)
from memplan.training.compilation import Compilation
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.spellings import TRANSFORMERS
from memplan.training.precision import Engine, Precision
from memplan.training.setup import TrainingSetup

PRECISION_FLAGS: dict[Precision, dict[str, bool]] = {
    Precision.FP32: {},
    Precision.BF16_AMP: {"bf16": True},
    Precision.BF16_MIXED: {"bf16": True},
    Precision.BF16_MASTER: {"bf16": True},
    Precision.FP16_AMP: {"fp16": True},
    Precision.FP16_MIXED: {"fp16": True},
    Precision.FP16_MASTER: {"fp16": True},
}
"""What each precision is called; the engine decides which of those with one flag is meant."""


_BATCHES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def emit(setup: TrainingSetup) -> Emitted:
    """Write the arguments of a setup that the Trainer can run."""
    values: dict[str, object] = {
        "per_device_train_batch_size": setup.micro_batch_size,
        "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        "gradient_checkpointing": _checkpointing(setup),
        **_optimizer(setup),
        **_precision(setup),
    }
    values |= _kernels(setup)
    values |= _evaluation(setup)
    if setup.compile is Compilation.MODEL:
        values["torch_compile"] = True
    notes = [f"launch it on {setup.num_gpus} GPUs, nodes: {setup.nodes}"]
    if setup.seq_len is not None:
        notes.append(f"cut sequences to {setup.seq_len} tokens")
    engine = setup.chosen_engine
    _check_said(setup)
    if engine is Engine.DEEPSPEED:
        # The Trainer fills these in from its own arguments and the number of GPUs.
        values["deepspeed"] = {**deepspeed.config(setup), **dict.fromkeys(_BATCHES, "auto")}
    elif engine in (Engine.FSDP, Engine.FSDP1):
        from memplan.sources.emitters import accelerate

        made = accelerate.fsdp_arguments(setup)
        values |= made.values
        return Emitted(values=values, setup=made.setup, notes=(*notes, *made.notes))
    elif engine is not Engine.DDP:
        msg = f"the Trainer has no engine {engine.value}"
        raise refuse(msg)
    else:
        setup = replace(setup, upcast_outputs=setup.chosen_precision is not Precision.FP32)
    return Emitted(values=values, setup=setup, notes=tuple(notes))


def _check_said(setup: TrainingSetup) -> None:
    """Refuse what no argument says."""
    if setup.compile is Compilation.LAYER:
        msg = "the Trainer compiles the whole model; choose `compile='model'`"
        raise refuse(msg)
    if setup.tensor_parallel > 1:
        msg = (
            "the Trainer's arguments do not split layers, the model is loaded split; write accelerate for "
            "the engine fsdp, or deepspeed for AutoTP"
        )
        raise refuse(msg)


def _evaluation(setup: TrainingSetup) -> dict[str, object]:
    """Batches between steps, and when what is kept of them goes to the CPU."""
    how = setup.evaluation
    if how is None:
        return {}
    if how.num_kept and how.num_kept != how.accumulation_steps:
        msg = (
            "the Trainer's arguments do not say how many batches an evaluation has: give "
            f"accumulation_steps={how.num_kept} too, after which their logits go to the CPU"
        )
        raise refuse(msg)
    if how.seq_len is not None:
        msg = "the Trainer's arguments have no length of evaluation: leave seq_len out"
        raise refuse(msg)
    values: dict[str, object] = {
        "eval_strategy": "epoch", "per_device_eval_batch_size": how.batch_size,
        "prediction_loss_only": not how.num_kept,
    }  # fmt: skip
    if how.accumulation_steps is not None:
        values["eval_accumulation_steps"] = how.accumulation_steps
    return values


def _kernels(setup: TrainingSetup) -> dict[str, object]:
    """Liger's kernels, and which of them not."""
    if setup.packing is not Packing.NONE:
        msg = "the Trainer's arguments do not pack; TRL's SFTConfig does"
        raise refuse(msg)
    if setup.mlp_tiles != WHOLE:
        msg = "the Trainer's arguments cut no networks into tiles: leave mlp_tiles out"
        raise refuse(msg)
    chosen = (setup.norm, setup.mlp, setup.rotary, setup.loss)
    if setup.kernels is KernelPreset.HF and chosen == (None,) * len(chosen):
        return {}
    kernels = replace(setup.chosen_kernels, attention=AttentionKernel.SDPA)
    config = {
        "rope": kernels.rotary is RotaryKernel.LIGER,
        "rms_norm": kernels.norm in (NormKernel.LIGER, NormKernel.LIGER_APART),
        "swiglu": kernels.feed_forward is FeedForwardKernel.FUSED,
        "cross_entropy": kernels.loss is LossKernel.LIGER,
        "fused_linear_cross_entropy": kernels.loss is LossKernel.FUSED_LINEAR,
    }
    eager = Kernels(
        norm=NormKernel.EAGER if not config["rms_norm"] else kernels.norm,
        feed_forward=kernels.feed_forward,
        rotary=RotaryKernel.EAGER if not config["rope"] else kernels.rotary,
        loss=kernels.loss if any(list(config.values())[3:]) else LossKernel.EAGER,
    )
    if eager != kernels:
        msg = "the Trainer runs transformers' own kernels or Liger's; choose `kernels='hf'` or `kernels='liger'`"
        raise refuse(msg)
    if setup.kernels is KernelPreset.LIGER and chosen == (None,) * len(chosen):
        return {"use_liger_kernel": True}
    return {"use_liger_kernel": True, "liger_kernel_config": config}


def _checkpointing(setup: TrainingSetup) -> bool:
    value = setup.checkpointing
    if value in (Recomputation.NONE, Recomputation.FULL):
        return value is Recomputation.FULL
    shown = checkpointing_text(value)
    msg = f"the Trainer checkpoints all layers or none, not {shown}"
    raise refuse(msg)


def _optimizer(setup: TrainingSetup) -> dict[str, object]:
    """``optim`` and what goes with it."""
    name = _optimizer_name(setup)
    options = dict(setup.optimizer_options)
    if setup.optimizer is Optimizer.SGD_MOMENTUM:
        options.setdefault("momentum", 0.9)
    values: dict[str, object] = {"optim": name}
    targets = options.pop("target_modules", None)
    if targets is not None:
        values["optim_target_modules"] = str(targets).split(",")
    if options:
        values["optim_args"] = ",".join(f"{key}={value}" for key, value in options.items())
    return values


def _optimizer_name(setup: TrainingSetup) -> str:
    optimizer = setup.optimizer
    if optimizer is Optimizer.SGD_MOMENTUM:
        optimizer = Optimizer.SGD
    for name, spelling in TRANSFORMERS.items():
        if (spelling.optimizer, spelling.in_backward) == (optimizer, setup.optimizer_in_backward):
            return name
    how = " in backward" if setup.optimizer_in_backward else ""
    msg = f"the Trainer cannot be told {setup.optimizer.value}{how}; the nearest that it has is adamw_torch"
    raise refuse(msg)


def _precision(setup: TrainingSetup) -> dict[str, bool]:
    flags = PRECISION_FLAGS.get(setup.chosen_precision)
    if flags is None:
        msg = (
            f"precision {setup.chosen_precision.value}: training arguments do not say in which "
            "format the weights are loaded"
        )
        raise refuse(msg)
    return flags
