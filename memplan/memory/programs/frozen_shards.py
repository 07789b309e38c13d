"""A frozen model under stage 3 of ZeRO: ``deepspeed.initialize`` without an optimizer (DeepSpeed 0.19.8).

``DeepSpeedZeRoOffload`` shards and gathers as the trained model's stage 3 does; there are no masters, no
bucket and no gradients.
"""

from memplan.memory.programs.zero3 import ShardedParametersProgram


class FrozenShardsProgram(ShardedParametersProgram):
    """One rank's shards of a model that is not trained."""

    def load(self) -> None:
        """The model is sharded, and that is all."""
        self._load_shards()

    def begin_pass(self) -> None:
        """The coordinator starts anew."""
        if self.gathers:
            self.coordinator.restart()
            if not self.coordinator.recorded:
                self.coordinator.recorded = list(self._order_of_modules())

    def end_pass(self) -> None:
        """What no hook let go of goes, but for what stays."""
        if self.gathers:
            stays = self.coordinator.persistent
            everything = range(len(self.numels))
            self.coordinator.let_go([each for each in everything if each not in stays])
