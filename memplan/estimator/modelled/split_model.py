"""Which setups may split a model over tensor-parallel ranks: the others are refused, never ignored."""

from memplan.errors import SetupError
from memplan.training.choices import ZeroStage
from memplan.training.choices_of_kernels.fp8 import FP8_RECIPES, Fp8Package, Fp8Recipe
from memplan.training.choices_of_kernels.kernels import LossKernel, Packing
from memplan.training.choices_of_kernels.losses import LOSS_FORMS
from memplan.training.compilation import Compilation
from memplan.training.jobs import PLAIN
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
    if engine not in (Engine.DDP, Engine.FSDP, Engine.DEEPSPEED):
        msg = (
            f"tensor_parallel: is modelled for the engines ddp, fsdp, deepspeed and megatron, and the engine is "
            f"{engine.value}: name one of them"
        )
        raise SetupError(msg)
    if engine is Engine.DEEPSPEED and setup.zero_stage is ZeroStage.PARAMETERS:
        msg = (
            "tensor_parallel: AutoTP beside ZeRO-3 is not modelled; take zero_stage 1 or 2, or the engine "
            "fsdp"
        )
        raise SetupError(msg)
    for name in ("context_parallel", "pipeline_parallel"):
        if engine is Engine.DEEPSPEED and getattr(setup, name) > 1:
            msg = f"tensor_parallel: AutoTP beside {name} is not modelled; leave one of the two out"
            raise SetupError(msg)
    if engine is Engine.DDP and setup.gradient_ranks > 1:
        msg = (
            f"tensor_parallel: {setup.num_gpus} GPUs are {setup.gradient_ranks} groups of "
            f"{setup.tensor_parallel}, and torch's DDP takes no DTensors (accelerate refuses the pair): name "
            "the engine fsdp, whose fsdp_strategy hybrid keeps replicas"
        )
        raise SetupError(msg)


def _is_split_lora(setup: TrainingSetup) -> bool:
    """Whether an adapter is one that peft splits, LoRA on a group that is the whole job, or one that is split
    beside its layers under FSDP2 (``memplan.graph.replacing.split_adapters``)."""
    from memplan.training.adapters import Lora  # only where it is split

    adapter = setup.adapter
    if adapter is None:
        return True
    if (
        not isinstance(adapter, Lora)
        or adapter.dora
        or adapter.modules_to_save
        or adapter.parameters
    ):
        return False
    if setup.chosen_engine is Engine.FSDP:
        return not adapter.lora_bias
    return setup.chosen_engine is Engine.DDP and not setup.sequence_parallel


def _is_torchaos(setup: TrainingSetup) -> bool:
    """Whether 8 bits, if there are any, are torchao's linear layers, which take DTensors."""
    if setup.fp8 is Fp8Recipe.NONE:
        return True
    package = FP8_RECIPES[setup.fp8].package
    return package is Fp8Package.TORCHAO and setup.chosen_engine is not Engine.DEEPSPEED


def _beside(setup: TrainingSetup) -> tuple[tuple[str, bool, str], ...]:
    """Fields, whether they say what does not go with a split model, and what to do."""
    form = LOSS_FORMS[setup.chosen_kernels.loss]
    other_loss = setup.loss_parallel and setup.chosen_kernels.loss is not LossKernel.EAGER
    plain, shares = "leave it out", setup.sequence_parallel
    return (
        ("adapter", not _is_split_lora(setup), "plain LoRA is, under fsdp, or under ddp on layers of columns"),
        ("job", setup.job != PLAIN, plain),
        ("ema", setup.ema is not None, plain),
        ("lengths", setup.lengths is not None and shares, "leave it out, or sequence_parallel"),
        ("quantize", setup.chosen_quantization is not None, plain),
        ("fp8", not _is_torchaos(setup), "torchao's recipes are, under fsdp or ddp"),
        (
            "compile: model", setup.compile is Compilation.MODEL,
            "compile each layer on its own, as torchtitan does",
        ),
        ("compile", setup.compile is not Compilation.NONE and setup.chosen_engine is Engine.DEEPSPEED, plain),
        ("packing", setup.packing is not Packing.NONE and shares, "leave it or sequence_parallel out"),
        ("optimizer_in_backward", setup.optimizer_in_backward, plain),
        (
            f"optimizer: {setup.optimizer.value}", setup.optimizer not in PLAIN_OPTIMIZERS,
            f"those that are: {', '.join(each.value for each in PLAIN_OPTIMIZERS)}",
        ),
        (
            f"loss: {setup.chosen_kernels.loss.value}", form.matrix is not None or other_loss,
            "take loss eager, which is transformers' own: the output matrix is split",
        ),
    )  # fmt: skip
