"""Optimizers, as a table of what each keeps per parameter and needs during its step.

Sources: torch 2.13 ``torch/optim/adam.py`` and ``sgd.py``; what the step holds was counted on their
foreach and fused forms. Adding an optimizer is adding a row.
"""

from enum import Enum

from memplan.fast_dataclass import dataclass


class Optimizer(Enum):
    """Optimizers by the names the command line takes."""

    ADAMW_FUSED = "adamw-fused"
    ADAMW_FOREACH = "adamw-foreach"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStates:
    """What one optimizer holds."""

    num_states: int
    """Tensors of the parameters' size kept between steps."""
    num_step_copies: int
    """Further tensors of the states' size alive at once inside the step."""
    has_step_counter: bool
    """An fp32 scalar for each parameter tensor, on the GPU."""


OPTIMIZERS: dict[Optimizer, OptimizerStates] = {
    Optimizer.ADAMW_FUSED: OptimizerStates(num_states=2, num_step_copies=0, has_step_counter=True),
    # _foreach_sqrt(exp_avg_sqs) makes a copy of every second moment at once.
    Optimizer.ADAMW_FOREACH: OptimizerStates(
        num_states=2, num_step_copies=1, has_step_counter=False
    ),
    Optimizer.SGD: OptimizerStates(num_states=0, num_step_copies=0, has_step_counter=False),
    Optimizer.SGD_MOMENTUM: OptimizerStates(
        num_states=1, num_step_copies=0, has_step_counter=False
    ),
}
"""AdamW's step counters are on the CPU except in the fused form."""
