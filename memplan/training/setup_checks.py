"""Settings that cannot be, or contradict each other."""

from operator import attrgetter

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.text import shown
from memplan.training.activation_offload import OFFLOAD_RULES, ActivationOffload
from memplan.training.choices import Offload, Recomputation, ZeroStage
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import SelectivePolicy
from memplan.training.compilation import Compilation
from memplan.training.precision import PRECISIONS, Engine, engines_with
from memplan.training.setup_derived import DerivedSetup
from memplan.training.splitting.parallelism import PipelineRuntime, PipelineSchedule

MAX_GPUS = 1_000_000
MAX_TOKENS = 2**31
MAX_PARTS = 2**17
"""Pictures of a sample, pixels along one, seconds of a clip."""

_LIMITS = {
    "num_gpus": MAX_GPUS, "num_nodes": MAX_GPUS, "micro_batch_size": MAX_TOKENS,
    "gradient_accumulation_steps": MAX_TOKENS, "seq_len": MAX_TOKENS,
    "images_per_sample": MAX_PARTS, "image_size": MAX_PARTS, "image_width": MAX_PARTS,
    "num_frames": MAX_PARTS, "audio_seconds": MAX_PARTS,
    "target_seq_len": MAX_TOKENS, "tensor_parallel": MAX_GPUS, "pipeline_parallel": MAX_GPUS,
    "virtual_stages": MAX_GPUS, "context_parallel": MAX_GPUS, "expert_parallel": MAX_GPUS,
    "mlp_tiles": MAX_TOKENS, "loss_tiles": MAX_TOKENS,
}  # fmt: skip
"""Numbers, and the largest that each may be."""
_OPTIONAL_SIZES = {
    "num_nodes", "seq_len", "target_seq_len", "image_size", "image_width", "num_frames",
    "audio_seconds",
}  # fmt: skip
"""Sizes for which None stands for a default."""
_FITTING = frozenset({"mlp_tiles", "loss_tiles"})
"""Numbers for which 0 stands for as many as fit."""
_FROM_ZERO = _FITTING | {"images_per_sample"}
_BOUNDS = tuple(
    (name, 0 if name in _FROM_ZERO else 1, limit, name in _OPTIONAL_SIZES)
    for name, limit in _LIMITS.items()
)
"""Each with the least and the most that it may be, and whether it may be null."""
_FLAGS = (
    "sequence_parallel", "loss_parallel", "outputs_held", "gradients_held", "upcast_outputs", "kernel_scratch",
    "optimizer_in_backward",
)  # fmt: skip
_NUMBERS, _SWITCHES = attrgetter(*_LIMITS), attrgetter(*_FLAGS)


def check_sizes(setup: DerivedSetup) -> None:
    """Refuse numbers of the wrong kind, or out of bounds, and switches that are neither true nor false."""
    for (name, least, limit, is_optional), value in zip(_BOUNDS, _NUMBERS(setup), strict=True):
        if value is None and is_optional:
            continue
        if value.__class__ is not int and (isinstance(value, bool) or not isinstance(value, int)):
            msg = f"{name}: expected a whole number, got {shown(value)}"
            raise SetupError(msg)
        if not least <= value <= limit:
            msg = f"{name}: must be from {least} to {limit}, got {shown(value)}"
            raise SetupError(msg)
    for name, value in zip(_FLAGS, _SWITCHES(setup), strict=True):
        if value.__class__ is not bool:
            msg = f"{name}: expected true or false, got {shown(value)}"
            raise SetupError(msg)
    dropout = setup.dropout
    is_number = isinstance(dropout, int | float) and not isinstance(dropout, bool)
    if dropout is not None and not (is_number and 0 <= dropout < 1):
        msg = f"dropout: must be from 0 to below 1, got {shown(dropout)}"
        raise SetupError(msg)
    if setup.num_gpus % setup.nodes:
        msg = (
            f"num_nodes: {setup.num_gpus} GPUs cannot be spread evenly over {setup.nodes} nodes; "
            "give a number of nodes that divides them"
        )
        raise SetupError(msg)


def check_engine(setup: DerivedSetup) -> None:
    """Refuse what the engine cannot do, and settings that exclude each other."""
    engine, precision = setup.chosen_engine, setup.chosen_precision
    if engine not in engines_with(precision):
        known = [each.value for each, row in PRECISIONS.items() if engine in row.engines]
        msg = (
            f"precision: {precision.value} does not exist with the engine {engine.value}; "
            f"it has {', '.join(known)}"
        )
        raise SetupError(msg)
    if setup.zero_stage is not None and engine is not Engine.DEEPSPEED:
        msg = (
            f"zero_stage: only deepspeed has ZeRO stages, and the engine is {engine.value}: leave it "
            "out, or name the engine deepspeed"
        )
        raise SetupError(msg)
    if setup.fsdp_strategy is not None and engine not in (Engine.FSDP, Engine.FSDP1):
        msg = f"fsdp_strategy: only fsdp and fsdp1 have it, and the engine is {engine.value}"
        raise SetupError(msg)
    _check_held_gradients(setup, engine)
    _check_fp8(setup, engine)
    _check_offload(setup, engine)
    _check_parallel(setup)


def _check_held_gradients(setup: DerivedSetup, engine: Engine) -> None:
    """Only where autograd's own gradients are the optimizer's, and one loop has them all."""
    if not setup.gradients_held:
        return
    if engine not in (Engine.DDP, Engine.FSDP):
        msg = f"gradients_held: {engine.value} keeps gradients in its own way; ddp and fsdp leave them to the loop"
        raise SetupError(msg)
    if setup.pipeline_parallel > 1:
        msg = (
            "gradients_held: a pipeline's schedule runs the passes, and this is not modelled there"
        )
        raise SetupError(msg)


def _check_fp8(setup: DerivedSetup, engine: Engine) -> None:
    if setup.fp8 is not Fp8Recipe.NONE and setup.adapter is not None:
        msg = "fp8: adapters beside linear layers in fp8 are not modelled: leave one of the two out"
        raise SetupError(msg)
    if setup.fp8 is Fp8Recipe.NONE:
        return
    formats = PRECISIONS[setup.chosen_precision]
    half = formats.autocast or formats.compute
    if half is not DType.BF16:
        msg = (
            f"fp8: {setup.fp8.value} narrows products that are in bf16, and the precision "
            f"{setup.chosen_precision.value} has none: take bf16 or one of its forms"
        )
        raise SetupError(msg)
    if engine is Engine.DEEPSPEED and setup.zero_stage is ZeroStage.PARAMETERS:
        msg = (
            "fp8: DeepSpeed's stage 3 replaces linear layers itself, and how that goes with "
            f"{setup.fp8.value} is not modelled; stages 0 to 2, ddp and fsdp are"
        )
        raise SetupError(msg)


def _check_offload(setup: DerivedSetup, engine: Engine) -> None:
    _check_ratio(setup)
    if setup.offload_activations.sends:
        _check_activation_offload(setup)
    parts = {"offload_optimizer": setup.offload_optimizer, "offload_param": setup.offload_param}
    for name, place in parts.items():
        if place is not Offload.NONE and engine in (Engine.DDP, Engine.MEGATRON):
            msg = f"{name}: {engine.value} cannot offload; deepspeed, fsdp and fsdp1 can"
            raise SetupError(msg)
    if setup.offload_param is not Offload.NONE and engine is Engine.DEEPSPEED:
        stage = setup.zero_stage if setup.zero_stage is not None else ZeroStage.GRADIENTS
        if stage is not ZeroStage.PARAMETERS:
            msg = f"offload_param: DeepSpeed offloads parameters in stage 3 only, not {stage.value}"
            raise SetupError(msg)
    if setup.offload_optimizer is not Offload.NONE and setup.zero_stage is ZeroStage.NONE:
        msg = "offload_optimizer: DeepSpeed offloads from stage 1 on, not 0"
        raise SetupError(msg)


def _check_ratio(setup: DerivedSetup) -> None:
    ratio: object = setup.offload_activations_ratio
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        msg = f"offload_activations_ratio: must be from 0 to 1, got {shown(ratio)}"
        raise SetupError(msg)
    if ratio != 1 and setup.offload_activations is not ActivationOffload.CHUNKS:
        how = setup.offload_activations.value
        msg = f"offload_activations_ratio: chunks take a share, not {how}; say chunks"
        raise SetupError(msg)


def _check_activation_offload(setup: DerivedSetup) -> None:
    how = setup.offload_activations.value
    msg = ""
    chunks = setup.offload_activations is ActivationOffload.CHUNKS
    in_flight = OFFLOAD_RULES[setup.offload_activations].in_flight if not chunks else 0
    if chunks and setup.pipeline_parallel == 1:
        msg = "passes that others follow are those of a pipeline: give pipeline_parallel"
    elif in_flight and setup.pipeline_parallel > 1:
        msg = "in a pipeline it is not modelled: chunks, save-on-cpu and checkpoints are"
    elif setup.chosen_engine is Engine.MEGATRON and not chunks:
        msg = "under Megatron it is not modelled: chunks are"
    elif setup.compile is not Compilation.NONE:
        msg = "what a compiled graph keeps is not followed to CPU RAM: leave torch.compile out"
    elif setup.fp8 is not Fp8Recipe.NONE:
        msg = f"what {setup.fp8.value} keeps is not followed to CPU RAM: leave fp8 out"
    elif (
        setup.checkpointing is Recomputation.SELECTIVE
        and setup.chosen_kernels.selective is not SelectivePolicy.EVERY_OTHER_MATMUL
    ):
        msg = "beside recomputed attention it is not modelled: take checkpointing none or full"
    elif setup.offload_activations is ActivationOffload.CHECKPOINTS and setup.checkpointing in (
        Recomputation.NONE,
        0.0,
    ):
        msg = "no layer is checkpointed: say checkpointing full, or streamed"
    if msg:
        msg = f"offload_activations: {how}: {msg}"
        raise SetupError(msg)


def _check_parallel(setup: DerivedSetup) -> None:
    product = setup.tensor_parallel * setup.pipeline_parallel * setup.context_parallel
    if setup.num_gpus % product:
        msg = (
            f"num_gpus: {setup.num_gpus} is not divisible by tensor_parallel x pipeline_parallel x "
            f"context_parallel = {setup.tensor_parallel} x {setup.pipeline_parallel} x "
            f"{setup.context_parallel} = {product}"
        )
        raise SetupError(msg)
    if setup.is_pipelined:
        _check_pipeline(setup)


def _check_pipeline(setup: DerivedSetup) -> None:
    """Refuse what says how stages are run where there are none, and counts that no schedule takes."""
    pipeline = setup.pipeline
    if pipeline is None:
        for name in ("pipeline_schedule", "virtual_stages", "layers_per_stage"):
            if getattr(setup, name) not in (None, 1):
                msg = f"{name}: is of the stages that pipeline_parallel makes, and that is 1: give it too"
                raise SetupError(msg)
        return
    from memplan.training.splitting.schedules import check_schedule, takes_few  # only for pipelines

    if pipeline.runtime is PipelineRuntime.DEEPSPEED:
        _check_deepspeed_pipeline(setup)
        return
    if takes_few(pipeline) and pipeline.num_virtual == 1:
        return
    check_schedule(
        pipeline.schedule,
        num_ranks=pipeline.degree,
        num_virtual=pipeline.num_virtual,
        num_micro_batches=pipeline.num_micro_batches,
    )


def _check_deepspeed_pipeline(setup: DerivedSetup) -> None:
    """Refuse what DeepSpeed's ``PipelineEngine`` does (runtime/pipe/engine.py)."""
    pipeline = setup.pipeline
    assert pipeline is not None
    if pipeline.schedule is not PipelineSchedule.ONE_F_ONE_B or pipeline.num_virtual != 1:
        msg = (
            f"pipeline_schedule: DeepSpeed's PipelineEngine has 1f1b alone (TrainSchedule), not "
            f"{pipeline.words}: leave schedule and virtual_stages out, or name another engine"
        )
        raise SetupError(msg)
    for name in ("offload_optimizer", "offload_param"):
        if getattr(setup, name) is not Offload.NONE:
            msg = f"{name}: is not modelled beside pipeline_parallel; leave one of the two out"
            raise SetupError(msg)
    if setup.zero_stage in (ZeroStage.GRADIENTS, ZeroStage.PARAMETERS):
        msg = (
            f"zero_stage: ZeRO-{setup.zero_stage.value} does not go with DeepSpeed's pipelines, which take "
            "0 and 1"
        )
        raise SetupError(msg)
