"""Which setups may run networks and losses in tiles: the others are refused, never ignored."""

from memplan.errors import SetupError
from memplan.model.spec import ModelSpec
from memplan.training.choices import ZeroStage
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import (
    FITTING_TILES,
    TILED_LOSSES,
    WHOLE,
    LossKernel,
)
from memplan.training.compilation import Compilation
from memplan.training.jobs import PLAIN
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import TrainingSetup


def check_tiled(model: ModelSpec, setup: TrainingSetup) -> None:
    """Refuse tiles of no tiled loss, engines under which tiles do not run, and what is not modelled beside.

    Raises ``SetupError``.
    """
    kernels = setup.chosen_kernels
    loss = kernels.loss in TILED_LOSSES
    if kernels.loss_tiles != FITTING_TILES and not (loss or kernels.loss is LossKernel.CHUNKED):
        msg = (
            "loss_tiles: are those of the losses tiled, tiled_gradients and chunked: name one of them as "
            "loss"
        )
        raise SetupError(msg)
    if not loss and kernels.mlp_tiles == WHOLE:
        return  # pieces within one function, of which no engine knows
    name = "mlp_tiles" if kernels.mlp_tiles != WHOLE else f"loss: {kernels.loss.value}"
    _check_engine(setup, name)
    if loss and model.head.tied and setup.zero_stage in _REDUCED_AT_ONCE:
        msg = (
            f"loss: {kernels.loss.value}: DeepSpeed's stage {setup.zero_stage.value} raises where the output "
            f"matrix is the token table, as in {model.name}, whose gradient it reduces behind the last tile: "
            "take zero_stage 1, or loss fused_linear"
        )
        raise SetupError(msg)
    for other, odd in _beside(setup):
        if odd:
            msg = f"{other}: is not modelled beside {name}; leave one of the two out"
            raise SetupError(msg)


_REDUCED_AT_ONCE = (ZeroStage.GRADIENTS, ZeroStage.PARAMETERS)
"""Stages that reduce each gradient as it comes, and once."""


def _check_engine(setup: TrainingSetup, name: str) -> None:
    """DeepSpeed is told which tile is the last; DDP's and FSDP's hooks take each for it.

    torch raises under DDP: "Expected to mark a variable ready only once".
    """
    engine = setup.chosen_engine
    if engine is Engine.DEEPSPEED or (engine is Engine.DDP and setup.num_gpus == 1):
        return
    msg = (
        f"{name}: runs under the engine deepspeed and on one GPU, and not under {engine.value}, whose hooks "
        "expect one gradient of each weight: name engine deepspeed, or take checkpointing full and loss "
        "fused_linear"
    )
    raise SetupError(msg)


def _beside(setup: TrainingSetup) -> tuple[tuple[str, bool], ...]:
    """Fields, and whether they say what does not go with tiles."""
    precision = PRECISIONS[setup.chosen_precision]
    return (
        (f"precision: {setup.chosen_precision.value}", precision.autocast is not None),
        ("tensor_parallel", setup.tensor_parallel > 1),
        ("pipeline_parallel", setup.pipeline_parallel > 1),
        ("adapter", setup.adapter is not None),
        ("job", setup.job != PLAIN),
        ("quantize", setup.chosen_quantization is not None),
        ("fp8", setup.fp8 is not Fp8Recipe.NONE),
        ("compile", setup.compile is not Compilation.NONE),
    )
