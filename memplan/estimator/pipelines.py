"""A pipeline's stages, recorded and walked; and which setups may have any."""

from functools import lru_cache

from memplan.errors import SetupError
from memplan.estimator.recording import Walked, walked_on_card
from memplan.graph.options import TapeOptions
from memplan.graph.stages import check_stages, stage_model, stage_options
from memplan.memory.rank import Stage
from memplan.model.spec import ModelSpec
from memplan.training.compilation import Compilation
from memplan.training.fp8 import Fp8Recipe
from memplan.training.jobs import PLAIN
from memplan.training.kernels import Packing
from memplan.training.parallelism import PipelineParallel, PipelineRuntime, StagePlace
from memplan.training.precision import Engine
from memplan.training.setup import Offload, TrainingSetup
from memplan.training.stages import divide_layers


def check_pipeline(setup: TrainingSetup) -> None:
    """Refuse a pipeline beside which something else is not modelled.

    Raises ``SetupError``.
    """
    engine = setup.chosen_engine
    if engine is not Engine.DDP or setup.data_parallel > 1:
        msg = (
            f"pipeline_parallel: is not modelled for the engine {engine.value} over "
            f"{setup.data_parallel} ranks of data yet: leave one of the two out"
        )
        raise SetupError(msg)
    for name, odd in _beside(setup):
        if odd:
            msg = f"{name}: is not modelled beside pipeline_parallel; leave one of the two out"
            raise SetupError(msg)


def _beside(setup: TrainingSetup) -> tuple[tuple[str, bool], ...]:
    """Fields, and whether they say what does not go with a pipeline."""
    return (
        ("adapter", setup.adapter is not None),
        ("job", setup.job is not PLAIN),
        ("ema", setup.ema is not None),
        ("lengths", setup.lengths is not None),
        ("quantize", setup.chosen_quantization is not None),
        ("fp8", setup.fp8 is not Fp8Recipe.NONE),
        ("compile", setup.compile is not Compilation.NONE),
        ("packing", setup.packing is not Packing.NONE),
        ("freeze", setup.freeze.any),
        ("optimizer_in_backward", setup.optimizer_in_backward),
        ("offload_optimizer", setup.offload_optimizer is not Offload.NONE),
        ("offload_param", setup.offload_param is not Offload.NONE),
    )


def stages_of(
    model: ModelSpec, options: TapeOptions, pipeline: PipelineParallel
) -> tuple[Stage, ...]:
    """Every stage of a pipeline, in the model's order.

    Raises ``SetupError`` for a model that cannot be cut so.
    """
    check_stages(model)
    counts = divide_layers(
        model.num_layers,
        pipeline.num_stages,
        explicit=pipeline.layers_per_stage,
        runtime=pipeline.runtime,
    )
    return _stages(model, options, counts, pipeline.runtime)


@lru_cache(maxsize=64)
def _stages(
    model: ModelSpec, options: TapeOptions, counts: tuple[int, ...], runtime: PipelineRuntime
) -> tuple[Stage, ...]:
    found: list[Stage] = []
    start, last = 0, len(counts) - 1
    for number, count in enumerate(counts):
        place = StagePlace(is_first=not number, is_last=number == last, runtime=runtime)
        layers = range(start, start + count)
        own = stage_options(options, num_layers=model.num_layers, layers=layers, place=place)
        found.append(_stage(walked_on_card(stage_model(model, layers, place), own)))
        start += count
    return tuple(found)


@lru_cache(maxsize=256)
def _stage(walked: Walked) -> Stage:
    return Stage(tape=walked.tape, passes=walked.passes)
