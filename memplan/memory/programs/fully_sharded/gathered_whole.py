"""A frozen model under FSDP2 that is one unit: gathered whole for its pass (TRL 1.16, ``prepare_fsdp``).

``fully_shard`` is called on the model alone, not on its layers; the result of its all-gather stays until
the forward pass is over (torch 2.13, ``wait_for_unshard``).
"""

from memplan.graph.core.segments import Segment
from memplan.memory.fsdp2.units import whole_unit
from memplan.memory.programs.fully_sharded.holding import UnitUse
from memplan.memory.programs.fully_sharded.program import Fsdp2Program
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger


class GatheredWholeProgram(Fsdp2Program):
    """One rank's shards of a model that is not trained."""

    def __init__(self, given: RankInput, ledger: Ledger) -> None:
        super().__init__(given, ledger)
        parameters = [parameter for parameter, _ in self.weights]
        self.model = UnitUse(whole_unit(parameters, self.formats, reshard=True), 0)

    def begin_pass(self) -> None:
        """All weights are gathered at once, and copied out of the flat result."""
        self._unshard_forward(self.model)

    def before_forward(self, segment: Segment, repetition: int) -> None:
        """Everything is there."""

    def after_forward(self, segment: Segment, repetition: int) -> None:
        """Everything stays."""

    def end_forward(self) -> None:
        """Everything goes."""
        self._reshard(self.model)
        self._drop_kept()

    def end_pass(self) -> None:
        """Nothing is left."""
