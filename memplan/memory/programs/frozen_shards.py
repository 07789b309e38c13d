"""A frozen model under stage 3 of ZeRO: ``deepspeed.initialize`` without an optimizer (DeepSpeed 0.19.8).

``DeepSpeedZeRoOffload`` shards and gathers as the trained model's stage 3 does; there are no masters, no
bucket and no gradients.
"""

from memplan.memory.programs.zero3 import ShardedParametersProgram


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

    def begin_pass(self) -> None:
        """The coordinator starts anew, with the order of modules that a first pass would record."""
        if self.gathers:
            if not self.coordinator.recorded:
                self.coordinator.recorded = list(self._order_of_modules())
            self.coordinator.restart()

    def end_pass(self) -> None:
        """All that was gathered goes, but for what stays."""
        if self.gathers:
            self.coordinator.let_go(range(len(self.numels)))
            self._keep_small()
