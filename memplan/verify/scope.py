"""Of all that a setup can say, what ``memplan verify`` runs; the rest is refused by name."""

from collections.abc import Callable
from dataclasses import fields, replace

from memplan.errors import SetupError
from memplan.memory.engine_options import loads_under_zero_init
from memplan.model.spec import ModelSpec
from memplan.training.activation_offload import ActivationOffload
from memplan.training.adapters import Lora
from memplan.training.choices import FsdpStrategy, Offload, Recomputation
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import (
    KERNEL_PRESETS,
    AttentionKernel,
    KernelPreset,
    Kernels,
    Packing,
)
from memplan.training.compilation import Compilation
from memplan.training.freezing import FrozenParts
from memplan.training.jobs import PLAIN
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.precision import Engine, Precision
from memplan.training.setup import TrainingSetup

Check = Callable[[TrainingSetup], bool]

ENGINES = (Engine.DDP, Engine.FSDP, Engine.DEEPSPEED)
SCALED = (Precision.FP16_AMP, Precision.FP16_MIXED)
"""Trained with a loss scaler."""


def _any(_: TrainingSetup) -> bool:
    return True


def _is(name: str, *values: object) -> Check:
    return lambda setup: getattr(setup, name) in values


_OWN = KERNEL_PRESETS[KernelPreset.HF]


def _hugging_face(setup: TrainingSetup) -> bool:
    kernels = setup.kernels
    if not isinstance(kernels, Kernels):
        return kernels is KernelPreset.HF
    return replace(kernels, attention=_OWN.attention) == _OWN


_DEFAULTS = {field.name: field.default for field in fields(TrainingSetup)}


def _usual(name: str) -> Check:
    return _is(name, _DEFAULTS[name])


RUN: dict[str, Check] = {
    "num_gpus": _any,
    "num_nodes": _any,
    "engine": lambda setup: setup.chosen_engine in ENGINES,
    "zero_stage": _any,
    "fsdp_strategy": lambda setup: setup.fsdp_strategy is not FsdpStrategy.HYBRID,
    "micro_batch_size": _any,
    "gradient_accumulation_steps": _any,
    "seq_len": _any,
    "target_seq_len": _any,
    "precision": lambda setup: setup.chosen_precision not in SCALED,
    "fp8": _is("fp8", Fp8Recipe.NONE),
    "optimizer": _any,  # memplan.verify.on_torch.optimizers has the list
    "optimizer_options": _any,
    "optimizer_in_backward": _is("optimizer_in_backward", False),
    "checkpointing": lambda setup: (
        setup.checkpointing in (Recomputation.NONE, Recomputation.FULL)
        or isinstance(setup.checkpointing, CheckpointedLayers)
    ),
    "kernels": _hugging_face,
    "attention": _is("attention", None, *AttentionKernel),
    "norm": _is("norm", None, _OWN.norm),
    "mlp": _is("mlp", None, _OWN.feed_forward),
    "rotary": _is("rotary", None, _OWN.rotary),
    "loss": _is("loss", None, _OWN.loss),
    "scan": _is("scan", None, _OWN.scan),
    "mlp_tiles": _usual("mlp_tiles"),
    "loss_tiles": _usual("loss_tiles"),
    "packing": _is("packing", Packing.NONE),
    "dropout": _any,
    "tensor_parallel": _is("tensor_parallel", 1),
    "sequence_parallel": _is("sequence_parallel", False),
    "loss_parallel": _is("loss_parallel", False),
    "pipeline_parallel": _is("pipeline_parallel", 1),
    "pipeline_schedule": _is("pipeline_schedule", None),
    "virtual_stages": _is("virtual_stages", 1),
    "layers_per_stage": _is("layers_per_stage", None),
    "context_parallel": _is("context_parallel", 1),
    "context_parallel_kind": _is("context_parallel_kind", None),
    "expert_parallel": _is("expert_parallel", 1),
    "expert_imbalance": _is("expert_imbalance", None),
    "offload_optimizer": _is("offload_optimizer", Offload.NONE),
    "offload_param": _is("offload_param", Offload.NONE),
    "offload_activations": _is("offload_activations", ActivationOffload.NONE),
    "offload_activations_ratio": _is("offload_activations_ratio", 1.0),
    "freeze": _is("freeze", FrozenParts()),
    "adapter": lambda setup: (
        setup.adapter is None
        or (isinstance(setup.adapter, Lora) and setup.chosen_engine is Engine.DDP)
    ),
    "job": _is("job", PLAIN),
    "ema": _is("ema", None),
    "evaluation": _is("evaluation", None),
    "lengths": _is("lengths", None),
    "quantize": _is("quantize", None, "none"),
    "outputs_held": _any,
    "gradients_held": _is("gradients_held", False),
    "upcast_outputs": _any,
    "compile": _is("compile", Compilation.NONE),
    "allocator": _any,
    "left_out": _is("left_out", ()),
    "engine_options": _any,  # each engine refuses those that it does not run
    "kernel_scratch": _any,
    "images_per_sample": _any,
    "image_size": _any,
    "image_width": _any,
    "num_frames": _usual("num_frames"),
    "audio_seconds": _any,
}
"""Every field of a setup, and what of it is run."""


def check_scope(setup: TrainingSetup, *, has_gpu: bool) -> None:
    """Raise ``SetupError`` for what is not run here; ``setup`` has its defaults filled in.

    >>> check_scope(TrainingSetup(freeze="embeddings"), has_gpu=True)
    Traceback (most recent call last):
    memplan.errors.SetupError: freeze: verify cannot run this yet: leave it out, and compare what is left
    """
    for name, runs in RUN.items():
        if not runs(setup):
            msg = f"{name}: verify cannot run this yet: leave it out, and compare what is left"
            raise SetupError(msg)
    if has_gpu:
        return
    if setup.chosen_engine is Engine.DEEPSPEED:
        msg = "engine: DeepSpeed's ranks are real processes on GPUs, and here is none: verify ddp or fsdp"
        raise SetupError(msg)
    if setup.chosen_engine is Engine.DDP and setup.num_gpus > 1:
        msg = (
            "engine: DDP's reducer reads real tensors, and here is no GPU: verify one GPU, or fsdp, whose "
            "ranks are followed on fake tensors"
        )
        raise SetupError(msg)
    if setup.chosen_kernels.attention in (AttentionKernel.FLASH, AttentionKernel.FLASH3):
        msg = "attention: the flash-attention package runs on GPUs alone, and here is none: verify sdpa"
        raise SetupError(msg)


def loaded_whole(setup: TrainingSetup) -> TrainingSetup:
    """The same where verify moves the model to the card before DeepSpeed's stage 3 cuts it, without ``zero.Init``.

    Raises ``SetupError`` where the setup insists on that.

    >>> loaded_whole(TrainingSetup(num_gpus=8, engine="deepspeed", zero_stage=3)).engine_options
    (('zero_init', False),)
    """
    if not loads_under_zero_init(setup):
        return setup
    options = dict(setup.engine_options)
    if options.get("zero_init") is not None:
        msg = "engine_options: zero_init: verify loads the model whole before stage 3 cuts it: leave it out, or say false"
        raise SetupError(msg)
    return replace(setup, engine_options={**options, "zero_init": False})


def check_model(model: ModelSpec) -> None:
    """Raise ``SetupError`` for a model that verify does not train."""
    if model.denoises:
        msg = f"{model.name}: verify trains transformers' classes, and this is one of diffusers'"
        raise SetupError(msg)
    if model.traced is not None:
        msg = f"{model.name}: verify trains what a config says, and this was traced: compare a snapshot of your run"
        raise SetupError(msg)
    if model.activations_left_out:
        msg = f"{model.name}: its activations are not predicted ({model.activations_left_out}): nothing to compare"
        raise SetupError(msg)
