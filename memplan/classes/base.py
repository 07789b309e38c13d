"""What every base model offers the heads of its tasks."""

from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module


class Base(Module):
    """The model that every task of a type shares."""

    def adjusted(self, logits: Handle) -> Handle:
        """What the class does with its logits."""
        return logits

    def keep_logits(self) -> None:
        """What a loss on all layers' routers keeps."""
