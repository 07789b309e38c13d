"""The plain loop on a rank of a tensor-parallel group that is the whole job."""

from collections.abc import Mapping

from memplan.graph.core.tensors import allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.programs.program import Program
from memplan.memory.programs.weights import Weight, is_trained
from memplan.training.optimizers import Optimizer

GRADIENT_ARGUMENTS = {Optimizer.ADAMW_FOREACH: 2}
"""How often an optimizer's hungriest operation is given the gradients, where it is more than once."""


class SplitProgram(Program):
    """Each rank steps its own part of every split weight."""

    weight_words: Mapping[ComponentKind, str] = {
        **Program.weight_words,
        ComponentKind.PARAMETERS: "the rank's part of every weight",
        ComponentKind.GRADIENTS: "one for each trained part; the token table's is made whole",
    }

    def parameter_groups(self, weights: list[Weight]) -> list[list[Weight]]:
        """DTensors and plain tensors in groups of their own: none of torch's kernels takes both."""
        apart = [
            [weight for weight in weights if weight[0].is_distributed is distributed]
            for distributed in (True, False)
        ]
        return [group for group in apart if group]

    def optimizer_step(self, *, first: bool) -> None:
        """The update, and what it makes of gradients that are split otherwise than their weights.

        DTensor makes it for each operation, and anew for each argument (torch 2.13,
        torch/distributed/tensor/_dispatch.py): foreach's ``addcmul_`` is given them twice.
        """
        super().optimizer_step(first=first)
        blocks = [
            allocated_bytes(parameter.numel, parameter.dtype)
            for parameter, _ in self.weights
            if parameter.has_gradient_apart and is_trained(parameter)
        ]
        times = GRADIENT_ARGUMENTS.get(self.given.setup.optimizer, 1)
        name = "gradients split as their weights are"
        self.ledger.use(*blocks * times, kind=ComponentKind.TEMPORARIES, name=name)
