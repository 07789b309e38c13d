"""A frozen model under FSDP2 that is one unit: gathered whole for its pass (TRL 1.16, ``prepare_fsdp``).

``fully_shard`` is called on the model alone, not on its layers; the result of its all-gather stays until
the forward pass is over (torch 2.13, ``wait_for_unshard``).
"""

from memplan.graph.segments import Segment
from memplan.graph.tensors import allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.fsdp2.units import shard_numel
from memplan.memory.programs.fsdp2 import GATHER_STREAM, Fsdp2Program


class GatheredWholeProgram(Fsdp2Program):
    """One rank's shards of a model that is not trained."""

    def begin_pass(self) -> None:
        """All weights are gathered at once, and copied out of the flat result."""
        degree, compute = self.formats.degree, self.formats.compute
        numels = [shard_numel(parameter, degree) * degree for parameter, _ in self.weights]
        flat = allocated_bytes(sum(numels), compute)
        buffers = ComponentKind.COMMUNICATION_BUFFERS
        name = "result of an all-gather"
        self.gathered = [self.ledger.allocate(flat, GATHER_STREAM, buffers, name)]
        self.gathered += [
            self.ledger.allocate(
                allocated_bytes(numel, compute), 0, ComponentKind.GATHERED_PARAMETERS,
                "the model, whole while it runs",
            )
            for numel in numels
        ]  # fmt: skip

    def before_forward(self, segment: Segment, repetition: int) -> None:
        """Everything is there."""

    def after_forward(self, segment: Segment, repetition: int) -> None:
        """Everything stays."""

    def end_forward(self) -> None:
        """Everything goes."""
        for block in self.gathered:
            self.ledger.free(block)
        self.gathered = []

    def end_pass(self) -> None:
        """Nothing is left."""
