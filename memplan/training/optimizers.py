"""Optimizers, as a table of what each keeps of a tensor that it is handed, and needs during its step.

What is kept is a function of that tensor's shape and dtype, not a count: a factored second moment
has a row and a column, an 8-bit one its blocks' scales, and some optimizers step matrices only. An
engine that hands over flat shards hands over vectors, and gets what its optimizer really makes of
them.

Sources: torch 2.13 ``torch/optim/adam.py`` and ``sgd.py``; what the step holds was counted on their
foreach and fused forms. Adding an optimizer is adding a row.
"""

from collections.abc import Callable
from enum import Enum
from math import prod

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass


class Optimizer(Enum):
    """Optimizers by the names the command line takes."""

    ADAMW_FUSED = "adamw-fused"
    ADAMW_FOREACH = "adamw-foreach"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"


StateTensor = tuple[int, DType]
"""A tensor of an optimizer: its elements and their format."""
StatesOf = Callable[[tuple[int, ...], DType], tuple[StateTensor, ...]]
"""What belongs to one stepped tensor, by its shape and the format of the states, in the order made."""


def no_tensors(shape: tuple[int, ...], dtype: DType) -> tuple[StateTensor, ...]:
    """Nothing, whatever is stepped."""
    del shape, dtype
    return ()


def one_alike(shape: tuple[int, ...], dtype: DType) -> tuple[StateTensor, ...]:
    """A momentum buffer, or a copy of a state: a tensor of the stepped one's size.

    >>> [(numel, dtype.label) for numel, dtype in one_alike((4, 8), DType.BF16)]
    [(32, 'bf16')]
    """
    return ((prod(shape), dtype),)


def two_moments(shape: tuple[int, ...], dtype: DType) -> tuple[StateTensor, ...]:
    """Adam's ``exp_avg`` and ``exp_avg_sq``."""
    return one_alike(shape, dtype) * 2


def counted_moments(shape: tuple[int, ...], dtype: DType) -> tuple[StateTensor, ...]:
    """Adam's moments behind a step counter on the GPU, as its fused form keeps one.

    >>> [(numel, dtype.label) for numel, dtype in counted_moments((4, 8), DType.BF16)]
    [(1, 'fp32'), (32, 'bf16'), (32, 'bf16')]
    """
    return (STEP_COUNTER, *two_moments(shape, dtype))


STEP_COUNTER: StateTensor = (1, DType.FP32)
"""``step``: a scalar for each stepped tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStates:
    """What one optimizer holds."""

    states: StatesOf = no_tensors
    """What it keeps between steps, on the GPU."""
    step_copies: StatesOf = no_tensors
    """What its step makes besides, for all stepped tensors at once, and lets go at its end."""

    @property
    def num_states(self) -> int:
        """States that are as large as the stepped tensor, where all but a counter are."""
        return self._alike(self.states)

    @property
    def num_step_copies(self) -> int:
        """Copies within the step that are as large as a state."""
        return self._alike(self.step_copies)

    @property
    def has_step_counter(self) -> bool:
        """Whether each stepped tensor has an fp32 scalar on the GPU."""
        return STEP_COUNTER in self.states(_PROBE, DType.BF16)

    def _alike(self, made: StatesOf) -> int:
        return made(_PROBE, DType.BF16).count((prod(_PROBE), DType.BF16))


_PROBE = (3, 5)
"""A shape to ask about where no shape matters."""

OPTIMIZERS: dict[Optimizer, OptimizerStates] = {
    Optimizer.ADAMW_FUSED: OptimizerStates(states=counted_moments),
    # _foreach_sqrt(exp_avg_sqs) makes a copy of every second moment at once.
    Optimizer.ADAMW_FOREACH: OptimizerStates(states=two_moments, step_copies=one_alike),
    Optimizer.SGD: OptimizerStates(),
    Optimizer.SGD_MOMENTUM: OptimizerStates(states=one_alike),
}
"""AdamW's step counters are on the CPU except in the fused form."""
