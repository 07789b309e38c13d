"""Which setups may split a model over tensor-parallel ranks: the others are refused, never ignored."""

from memplan.errors import SetupError
from memplan.training.compilation import Compilation
from memplan.training.fp8 import Fp8Recipe
from memplan.training.jobs import PLAIN
from memplan.training.kernels import LossKernel, Packing
from memplan.training.losses import LOSS_FORMS, LossGradient
from memplan.training.precision import Engine
from memplan.training.setup import PLAIN_OPTIMIZERS, TrainingSetup

_PARTS = ("sequence_parallel", "loss_parallel")


def check_split(setup: TrainingSetup) -> None:
    """Refuse a split that is none, and one beside which something else is not modelled.

    Raises ``SetupError``.
    """
    if setup.tensor_parallel == 1:
        for name in _PARTS:
            if getattr(setup, name):
                msg = f"{name}: splits more of what tensor_parallel splits, and that is 1: give it too"
                raise SetupError(msg)
        return
    _check_engine(setup)
    for name, odd, nearest in _beside(setup):
        if odd:
            msg = f"{name}: is not modelled beside tensor_parallel; {nearest}"
            raise SetupError(msg)


def _check_engine(setup: TrainingSetup) -> None:
    engine = setup.chosen_engine
    if engine not in (Engine.DDP, Engine.FSDP):
        msg = (
            f"tensor_parallel: is modelled for the engines ddp and fsdp, and the engine is "
            f"{engine.value}: name one of them"
        )
        raise SetupError(msg)
    if engine is Engine.DDP and setup.gradient_ranks > 1:
        msg = (
            f"tensor_parallel: {setup.num_gpus} GPUs are {setup.gradient_ranks} groups of "
            f"{setup.tensor_parallel}, which the engine ddp is not modelled for: name the engine fsdp"
        )
        raise SetupError(msg)


def _beside(setup: TrainingSetup) -> tuple[tuple[str, bool, str], ...]:
    """Fields, whether they say what does not go with a split model, and what to do."""
    form = LOSS_FORMS[setup.chosen_kernels.loss]
    kept = form.gradient is LossGradient.TORCH and form.matrix is None
    other_loss = setup.loss_parallel and setup.chosen_kernels.loss is not LossKernel.EAGER
    plain = "leave it out"
    return (
        ("adapter", setup.adapter is not None, plain),
        ("job", setup.job is not PLAIN, plain),
        ("ema", setup.ema is not None, plain),
        ("lengths", setup.lengths is not None, plain),
        ("quantize", setup.chosen_quantization is not None, plain),
        ("fp8", setup.fp8 is not Fp8Recipe.NONE, plain),
        ("compile", setup.compile is not Compilation.NONE, plain),
        ("packing", setup.packing is not Packing.NONE, plain),
        ("optimizer_in_backward", setup.optimizer_in_backward, plain),
        (
            f"optimizer: {setup.optimizer.value}", setup.optimizer not in PLAIN_OPTIMIZERS,
            f"those that are: {', '.join(each.value for each in PLAIN_OPTIMIZERS)}",
        ),
        (
            f"loss: {setup.chosen_kernels.loss.value}", not kept or other_loss,
            "take loss eager, which is transformers' own",
        ),
    )  # fmt: skip
