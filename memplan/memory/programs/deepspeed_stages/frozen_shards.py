"""A frozen model under stage 3 of ZeRO: ``deepspeed.initialize`` without an optimizer (DeepSpeed 0.19.8).

``DeepSpeedZeRoOffload`` shards and gathers as the trained model's stage 3 does; there are no masters, no
bucket and no gradients.
"""

from memplan.memory.programs.deepspeed_stages.zero3 import ShardedParametersProgram
from memplan.memory.programs.program import Program


class FrozenShardsProgram(ShardedParametersProgram):
    """One rank's shards of a model that is not trained, or a pass of one that lies there."""

    keeps_small = False
    """Small parameters stay gathered: those of a pass alone are the trained model's."""

    def load(self) -> None:
        """The model is sharded, and small parameters gathered, which stay."""
        self._load_shards()
        self.keeps_small = True
        self._keep_small()

    def _keep_small(self) -> None:
        if self.gathers and self.keeps_small:
            self.coordinator.keep(self.persistent)

    shares_coordinator = False
    """It gathers with the trained model's own coordinator, in a pass between its steps."""

    def take_over(self, other: Program) -> None:
        """The trained model's pass without gradients: the hooks are its own, and so is the order of modules.

        That goes on behind a forward pass with the backward one: what this would read stays gathered, as far
        as ``max_reuse_distance`` lets it (``parameter_offload.py``, ``_end_of_forward_hook``, sets the
        coordinator back, and lets go of nothing). Of a frozen model all passes are alike.
        """
        if isinstance(other, ShardedParametersProgram) and self.gathers:
            self.coordinator = other.coordinator
            self.shares_coordinator, self.keeps_small = True, False
            if isinstance(other, FrozenShardsProgram) and not other.shares_coordinator:
                self.shares_coordinator, self.keeps_small = False, other.keeps_small

    def begin_pass(self) -> None:
        """The coordinator starts anew; the first pass records the order of modules."""
        if self.gathers:
            self.coordinator.restart()

    def end_pass(self) -> None:
        """All that was gathered goes, but for what stays."""
        if self.gathers and not self.shares_coordinator:
            self.coordinator.let_go(range(len(self.numels)))
            self._keep_small()
