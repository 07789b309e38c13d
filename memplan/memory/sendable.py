"""What one micro-batch keeps that can go to CPU RAM while others run."""

from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter
from memplan.memory.forward_playback import ForwardPlayback
from memplan.memory.passes import StepPasses
from memplan.memory.playback import kept_blocks
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.memory.stops import Acts, Stops


def sendable_bytes(tape: Tape, passes: StepPasses, least_bytes: int) -> int:
    """What one micro-batch keeps in blocks of at least so many bytes, played out apart [bytes]."""
    engine = _Bystander()
    played = ForwardPlayback(tape, passes, Ledger(), engine, workspace_bytes=0)
    played.forward()
    played.return_loss()
    return sum(size for _, _, size in kept_blocks(played.frames, least_bytes))


class _Bystander:
    """An engine that does nothing."""

    is_even = True
    takes_all_at_once = False
    sum_stream = 0

    def before_forward(self, segment: Segment, repetition: int) -> None:
        """Nothing."""

    def renew(self, segment: Segment) -> bool:  # noqa: ARG002
        """Nothing."""
        return False

    def after_forward(self, segment: Segment, repetition: int) -> None:
        """Nothing."""

    def end_forward(self) -> None:
        """Nothing."""

    def before_backward(self, segment: Segment, repetition: int) -> None:
        """Nothing."""

    def after_backward(self, segment: Segment, repetition: int) -> None:
        """Nothing."""

    def gradient_ready(self, weight: tuple[Parameter, int], block: Block) -> None:
        """Nothing."""

    def run_joined(self) -> None:
        """Nothing."""

    def stops(self, segment: Segment) -> Stops | None:  # noqa: ARG002
        """Nowhere."""
        return None

    def reach(self, segment: Segment, repetition: int, acts: Acts) -> None:
        """Nothing."""
