"""Which optimizers run under which engine, and what stops those that do not."""

from collections.abc import Hashable
from enum import Enum, IntEnum
from typing import Protocol

from memplan.errors import SetupError
from memplan.training.optimizers import Optimizer
from memplan.training.optimizers.script import OptimizerRow
from memplan.training.optimizers.table import chosen
from memplan.training.precision import PRECISIONS, Engine, Precision


class Asked(Protocol):
    """What of a ``TrainingSetup`` decides."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""

    @property
    def optimizer_options(self) -> Hashable:
        """Its own settings as pairs."""

    @property
    def optimizer_in_backward(self) -> bool:
        """Whether it steps within backward."""

    @property
    def engine(self) -> Engine | None:
        """The engine where one is named."""

    @property
    def chosen_engine(self) -> Engine:
        """The engine, the default filled in."""

    @property
    def chosen_precision(self) -> Precision:
        """The precision, the default filled in."""

    @property
    def zero_stage(self) -> IntEnum | None:
        """DeepSpeed's stage."""

    @property
    def num_gpus(self) -> int:
        """All GPUs of the job."""

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""

    @property
    def offload_optimizer(self) -> Enum:
        """Where states are kept."""

    @property
    def offload_param(self) -> Enum:
        """Where parameters are kept."""


_NEAREST = "the nearest that runs on shards: adamw-fused, bnb-adamw-8bit or adafactor-loop"
_ON_DTENSORS = frozenset({Optimizer.ADAM_MINI, Optimizer.MUON})
"""Need matrices: Adam-mini takes a rank's rows of one for a smaller matrix, Muon (dion's) has ranks hand
parts about until each has one whole."""


def check_optimizer(setup: Asked) -> None:
    """Refuse what cannot run.

    Raises ``SetupError`` for unknown or wrong options, and for an optimizer that its engine cannot run.
    """
    row, _ = chosen(setup.optimizer, setup.optimizer_options)
    _check_shards(setup, row)
    _check_single(setup, row)
    _check_offload(setup, row)
    if setup.optimizer_in_backward or row.in_backward:
        _check_backward(setup, row)


def _check_shards(setup: Asked, row: OptimizerRow) -> None:
    """What steps matrices cannot be handed flat shards, nor a part of each matrix."""
    engine, name = setup.chosen_engine, setup.optimizer.value
    if not row.needs_matrices or engine is Engine.DDP:
        return
    if setup.engine is None:
        return  # Several GPUs may have any engine: it is looked at once there is one.
    if engine is Engine.FSDP and setup.optimizer in _ON_DTENSORS:
        return
    if engine is Engine.DEEPSPEED and setup.zero_stage is not None and not int(setup.zero_stage):
        return
    shards = {
        Engine.DEEPSPEED: "ZeRO hands it flat shards",
        Engine.FSDP1: "fsdp1 hands it pieces of a flat parameter",
        Engine.FSDP: "fsdp hands it a part of each matrix",
    }.get(engine, f"{engine.value} hands it parts")
    msg = f"optimizer: {name} steps whole matrices, and {shards}; {_NEAREST}"
    raise SetupError(msg)


def _check_single(setup: Asked, row: OptimizerRow) -> None:
    if row.single_gpu and (setup.num_gpus > 1 or setup.chosen_engine is not Engine.DDP):
        msg = (
            f"optimizer: {setup.optimizer.value} is modelled on one GPU without an engine, for which "
            "it is made; for several take deepspeed with offload_optimizer, or bnb-adamw-8bit"
        )
        raise SetupError(msg)


def has_cpu_form(row: OptimizerRow) -> bool:
    """Whether DeepSpeed or torch can step it on the CPU."""
    return row.zero_offload or row.source.startswith("torch ")


def _check_offload(setup: Asked, row: OptimizerRow) -> None:
    """DeepSpeed and FSDP step offloaded shards on the CPU.

    FSDP's lie where its parameters do; DeepSpeed's are told apart (``zero/stage3.py``, ``self.device``).
    """
    goes_with_weights = setup.chosen_engine is not Engine.DEEPSPEED
    stays = setup.offload_param.value == "none" or not goes_with_weights
    if setup.offload_optimizer.value == "none" and stays:
        return
    if not has_cpu_form(row) and not (goes_with_weights and row.any_device):
        msg = (
            f"offload_optimizer: {setup.optimizer.value} has no form for the CPU; "
            "adamw-fused (CPU Adam), lion-fused and adagrad have one"
        )
        raise SetupError(msg)


def _check_backward(setup: Asked, row: OptimizerRow) -> None:
    """A step within backward sees one gradient, whole, once."""
    what = f"optimizer_in_backward: {setup.optimizer.value}"
    if row.on_cpu:
        msg = f"{what} steps on the CPU; give optimizer_options offload_gradients=true instead"
        raise SetupError(msg)
    if setup.chosen_engine is not Engine.DDP or setup.num_gpus > 1:
        msg = (
            f"{what} is modelled on one GPU without an engine: DDP, FSDP and ZeRO reduce gradients "
            "in buckets, after each is there"
        )
        raise SetupError(msg)
    if setup.gradient_accumulation_steps > 1:
        msg = (
            f"{what} steps in every backward pass, so gradients cannot accumulate: set "
            "gradient_accumulation_steps to 1"
        )
        raise SetupError(msg)
    formats = PRECISIONS[setup.chosen_precision]
    if "fp16" in setup.chosen_precision.value and formats.autocast is not None:
        msg = f"{what} cannot wait for fp16's loss scaler; take bf16"
        raise SetupError(msg)
