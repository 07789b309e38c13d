"""A pipeline's stages, recorded and walked; and which setups may have any."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from memplan.errors import SetupError
from memplan.estimator.recording import Walked, record, walked_on_card
from memplan.graph.core.options import TapeOptions
from memplan.graph.remembered import OF_TAPES
from memplan.graph.stages import check_stages, stage_model, stage_options
from memplan.memory.engine_options import says_pipeline
from memplan.memory.rank import Stage
from memplan.model.parameters import ModelPart
from memplan.model.spec import ModelSpec
from memplan.training.choices import Offload, Recomputation
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import Packing
from memplan.training.compilation import Compilation
from memplan.training.jobs import PLAIN
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.parallelism import (
    PipelineParallel,
    PipelineRuntime,
    PipelineSchedule,
    StagePlace,
)
from memplan.training.splitting.partition import DEFAULT_METHOD, stage_bounds
from memplan.training.splitting.schedules import rank_stages
from memplan.training.splitting.stages import divide_layers

MEGATRON_SCHEDULES = (
    PipelineSchedule.ONE_F_ONE_B,
    PipelineSchedule.INTERLEAVED_ONE_F_ONE_B,
)
"""Those of ``megatron/core/pipeline_parallel/schedules.py``."""


def check_pipeline(setup: TrainingSetup) -> None:
    """Refuse a pipeline beside which something else is not modelled.

    Raises ``SetupError``.
    """
    assert setup.pipeline is not None
    for problem in _problems(setup, setup.pipeline.schedule):
        raise SetupError(problem)
    for name in dict(setup.engine_options):
        says_pipeline(name, setup)  # Here too: an account of equal options may be remembered.
    for name, odd in _beside(setup):
        if odd:
            msg = f"{name}: is not modelled beside pipeline_parallel; leave one of the two out"
            raise SetupError(msg)


def _problems(setup: TrainingSetup, schedule: PipelineSchedule) -> Iterator[str]:
    """Why a pipeline of this engine, or with this schedule, is refused."""
    engine = setup.chosen_engine
    if engine is Engine.FSDP1:
        yield (
            f"pipeline_parallel: is modelled for the engines ddp, fsdp, deepspeed and megatron, and not "
            f"for {engine.value}: name one of them"
        )
    if engine is Engine.DEEPSPEED:
        for name in ("tensor_parallel", "context_parallel", "expert_parallel"):
            if getattr(setup, name) > 1:
                yield (
                    f"{name}: DeepSpeed's pipelines leave it to the model's own code (Megatron-DeepSpeed), and "
                    "it is not modelled beside them; the engine megatron has both"
                )
    if engine is Engine.MEGATRON and schedule not in MEGATRON_SCHEDULES:
        yield (
            f"pipeline_schedule: Megatron-core has no {schedule.value}; its schedules are "
            f"{', '.join(each.value for each in MEGATRON_SCHEDULES)}"
        )
    if engine is Engine.DDP and setup.data_parallel > 1 and schedule.splits_backward:
        yield (
            f"pipeline_schedule: {schedule.value} computes weights' gradients past DDP's hooks, "
            "which never reduces them: name the engine fsdp, or another schedule"
        )
    how = setup.evaluation
    if how is not None and (how.batches_kept or how.accumulation_steps):
        yield (
            "evaluation: batches_kept and accumulation_steps are transformers' Trainer's, which runs no pipeline "
            "(torchtitan, Megatron-LM and DeepSpeed keep the loss alone): leave them out"
        )
    if schedule.splits_backward and setup.checkpointing is Recomputation.SELECTIVE:
        yield (
            f"checkpointing: selective is not modelled where {schedule.value} computes weights' "
            "gradients in passes of their own: take none or full"
        )


def _beside(setup: TrainingSetup) -> tuple[tuple[str, bool], ...]:
    """Fields, and whether they say what does not go with a pipeline."""
    return (
        ("adapter", not _has_plain_adapter(setup)),
        ("job", setup.job != PLAIN),
        ("ema", setup.ema is not None),
        ("lengths", setup.lengths is not None),
        ("quantize", setup.chosen_quantization is not None),
        ("fp8", setup.fp8 is not Fp8Recipe.NONE and setup.chosen_engine is not Engine.MEGATRON),
        ("compile", setup.compile is not Compilation.NONE),
        ("packing", setup.packing is not Packing.NONE and not _runs_torchs_stages(setup)),
        ("freeze", not _freezes_whole_parts(setup)),
        ("optimizer_in_backward", setup.optimizer_in_backward),
        ("offload_optimizer", setup.offload_optimizer is not Offload.NONE),
        ("offload_param", setup.offload_param is not Offload.NONE),
    )


def _runs_torchs_stages(setup: TrainingSetup) -> bool:
    """Whether each stage is handed what the model is besides its input: torch's schedules call it with what ``step`` was
    called with (torch 2.13, distributed/pipelining/stage.py, ``forward_one_chunk``), lengths and positions of packed rows too."""
    return setup.chosen_engine in (Engine.DDP, Engine.FSDP)


def _has_plain_adapter(setup: TrainingSetup) -> bool:
    """Whether an adapter, if there is one, stands on the layers of torch's stages and nothing is saved whole beside it.

    Each stage wants the gradient of what it receives, adapted or not, so that a stage's tape says all of it. Compared
    with torch 2.13's stages under peft's LoRA (on the CUDA build without a card): as near as without an adapter.
    """
    from memplan.training.adapters import Lora  # only where stages are adapted

    adapter = setup.adapter
    if adapter is None:
        return True
    plain = isinstance(adapter, Lora) and not adapter.modules_to_save and not adapter.parameters
    return plain and _runs_torchs_stages(setup)


def _freezes_whole_parts(setup: TrainingSetup) -> bool:
    """Whether what is frozen, if anything is, are parts that a stage of torch's has or has not, rather than layers by number.

    Each stage wants the gradient of what it receives, whatever of its own is trained.
    """
    freeze = setup.freeze
    by_part = not freeze.layer_ranges and not freeze.but
    return not freeze.any or (by_part and _runs_torchs_stages(setup))


_RUNTIME_WORDS = {
    PipelineRuntime.TORCH: "torch.distributed.pipelining, with receive buffers for all micro-batches",
    PipelineRuntime.MEGATRON: "Megatron-core's schedules",
    PipelineRuntime.DEEPSPEED: "DeepSpeed's PipelineEngine",
}


def pipeline_words(model: ModelSpec, pipeline: PipelineParallel) -> tuple[str, ...]:
    """What was assumed of a pipeline, in words."""
    counts = layer_counts(model, pipeline)
    if len(set(counts)) == 1:
        layers = f"{counts[0]} layers a stage"
    else:
        layers = f"layers by stage {' + '.join(map(str, counts))}"
    found = [pipeline.words, layers, _RUNTIME_WORDS[pipeline.runtime]]
    if pipeline.partition_method == DEFAULT_METHOD and pipeline.layers_per_stage is None:
        found.append(f"layers dealt by partition_method={pipeline.partition_method}")
    if model.head.tied:
        found.append("a copy of the tied matrix on the last stage")
    return (", ".join(found),)


def stage_words(model: ModelSpec, setup: TrainingSetup, rank: int) -> str:
    """Which stages a rank has, and what is in them."""
    pipeline = setup.pipeline
    assert pipeline is not None
    counts = layer_counts(model, pipeline)
    parts = []
    for number in stages_of_rank(setup, rank):
        start = sum(counts[:number])
        stop = start + counts[number] - 1
        held = [f"layers {start}-{stop}" if stop > start else f"layer {start}"]
        if not counts[number]:
            held = []
        if number == 0:
            held.insert(0, "the embedding")
        if number == pipeline.num_stages - 1:
            held.append("the head with its loss")
        parts.append(f"stage {number} ({', '.join(held)})")
    return f"rank {rank} has {' and '.join(parts)} of {pipeline.num_stages} stages"


def stages_of_rank(setup: TrainingSetup, rank: int) -> tuple[int, ...]:
    """The stages that a rank has, by number; none where there is no pipeline."""
    pipeline = setup.pipeline
    if pipeline is None:
        return ()
    place = rank // (setup.num_gpus // pipeline.degree)
    return rank_stages(
        pipeline.schedule, num_ranks=pipeline.degree, num_virtual=pipeline.num_virtual, rank=place
    )


def layer_counts(model: ModelSpec, pipeline: PipelineParallel) -> tuple[int, ...]:
    """The layers of each stage.

    Raises ``SetupError`` where they cannot be divided so.
    """
    explicit = pipeline.layers_per_stage
    if explicit is None and pipeline.runtime is PipelineRuntime.DEEPSPEED:
        explicit = _dealt(model, pipeline)
    return divide_layers(
        model.num_layers,
        pipeline.num_stages,
        explicit=explicit,
        runtime=pipeline.runtime,
    )


@lru_cache(maxsize=64)
def _dealt(model: ModelSpec, pipeline: PipelineParallel) -> tuple[int, ...]:
    """Layers as ``PipelineModule`` deals them: the table, each layer, the last norm and the head are items.

    A last norm that falls to the stage before the head's is counted on the head's.
    """
    tape = record(model, TapeOptions())
    numels = dict.fromkeys(ModelPart, 0)
    layers: list[int] = []
    for segment in tape.segments:
        own = sum(each.numel for each in segment.parameters)
        if segment.is_layer:
            layers += [own] * segment.repeat
        else:
            numels[segment.part] += own
    head = numels[ModelPart.EMBEDDING] if model.head.tied else numels[ModelPart.HEAD]
    items = [numels[ModelPart.EMBEDDING], *layers, numels[ModelPart.NORM], head]
    names = ["Embedding", *["DecoderLayer"] * len(layers), "Norm", "Head"]
    bounds = stage_bounds(
        pipeline.partition_method, numels=items, names=names, num_stages=pipeline.num_stages
    )
    counts = [
        min(stop, len(layers) + 1) - min(max(start, 1), len(layers) + 1)
        for start, stop in pairwise(bounds)
    ]
    return tuple(max(0, count) for count in counts)


def stages_of(
    model: ModelSpec, options: TapeOptions, pipeline: PipelineParallel
) -> tuple[Stage, ...]:
    """Every stage of a pipeline, in the model's order.

    Raises ``SetupError`` for a model that cannot be cut so.
    """
    check_stages(model, pipeline.runtime)
    if options.expert_parallel is not None:
        # Only where experts are spread.
        from memplan.graph.experts.parallel import check_has_experts

        check_has_experts(model)
    counts = layer_counts(model, pipeline)
    return _stages(model, options, counts, pipeline)


@OF_TAPES.remembered(maxsize=64)
def _stages(
    model: ModelSpec, options: TapeOptions, counts: tuple[int, ...], pipeline: PipelineParallel
) -> tuple[Stage, ...]:
    found: list[Stage] = []
    start, last = 0, len(counts) - 1
    for number, count in enumerate(counts):
        place = StagePlace(
            is_first=not number,
            is_last=number == last,
            runtime=pipeline.runtime,
            has_copy=model.head.tied and number == last,
            splits_backward=pipeline.schedule.splits_backward,
        )
        layers = range(start, start + count)
        own = stage_options(options, num_layers=model.num_layers, layers=layers, place=place)
        found.append(_stage(walked_on_card(stage_model(model, layers, place), own)))
        start += count
    return tuple(found)


@OF_TAPES.remembered(maxsize=256)
def _stage(walked: Walked) -> Stage:
    return Stage(tape=walked.tape, passes=walked.passes)
