"""The passes of one training step on one rank, as a walk over its tape leaves them: heights, repetitions, profiles."""

from typing import NamedTuple

from memplan.fast_dataclass import dataclass, field
from memplan.graph.core.segments import Segment, SegmentComponent
from memplan.graph.core.tensors import Storage
from memplan.memory.walks.backward_profile import BackwardProfile, Interval
from memplan.memory.walks.walk import ForwardProfile, Level


@dataclass(frozen=True, slots=True)
class Height:
    """Bytes alive at one moment of the step, without what is there between steps."""

    activations_bytes: int = 0
    """Kept for backward by the layers and the embedding."""
    loss_bytes: int = 0
    """Kept or made by the head: logits, log-probabilities, their gradients."""
    temporaries_bytes: int = 0
    """Alive inside an operation or between two."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.activations_bytes + self.loss_bytes + self.temporaries_bytes

    def plus(self, level: Level, *, loss: bool) -> "Height":
        """With a segment's level on top."""
        saved, other = level.saved_bytes, level.other_bytes
        return Height(
            activations_bytes=self.activations_bytes + level.earlier_bytes + (0 if loss else saved),
            loss_bytes=self.loss_bytes + (saved + other if loss else 0),
            temporaries_bytes=self.temporaries_bytes + level.passed_bytes + (0 if loss else other),
        )


@dataclass(slots=True)
class ForwardPass:
    """The forward pass of one segment, or of some repetitions of it."""

    segment: Segment
    first: int
    """The repetition with which it begins."""
    repeats: int
    """How many there are of it."""
    start: Height
    """What is alive before the first repetition."""
    peak: Level
    """The highest level of one repetition, above where it begins."""
    first_bytes: int
    """What the first repetition leaves alive."""
    later_bytes: int
    """What each further repetition leaves alive."""
    profile: ForwardProfile
    """One repetition, event by event."""

    @property
    def repetitions(self) -> range:
        """Their numbers."""
        return range(self.first, self.first + self.repeats)

    @property
    def loss(self) -> bool:
        """Whether its bytes are the head's."""
        return self.segment.component is SegmentComponent.LOGITS_AND_LOSS

    def start_of(self, repetition: int) -> Height:
        """What is alive before a repetition."""
        if not repetition:
            return self.start
        risen = self.first_bytes + (repetition - 1) * self.later_bytes
        earlier = repetition * self.profile.end.earlier_bytes
        level = Level(saved_bytes=risen - earlier, earlier_bytes=earlier)
        return self.start.plus(level, loss=self.loss)

    def heights(self) -> list[Height]:
        """The peak of the first and of the last repetition."""
        return [
            self.start_of(repetition).plus(self.peak, loss=self.loss)
            for repetition in {0, self.repeats - 1}
        ]


@dataclass(slots=True)
class BackwardPass:
    """The backward pass of one segment, or of some repetitions of it."""

    segment: Segment
    repeats: int
    start: Height
    """What is alive before, finished gradients of parameters left out."""
    profile: BackwardProfile
    """One repetition."""
    change: Level
    """What one repetition changes, mostly downwards."""
    released_bytes: int = 0
    """Of earlier segments, what the last repetition lets go with what it was given."""

    @property
    def loss(self) -> bool:
        """Whether its bytes are the head's."""
        return self.segment.component is SegmentComponent.LOGITS_AND_LOSS

    @property
    def intervals(self) -> list[Interval]:
        """One repetition, gradient by gradient, above where it begins."""
        return self.profile.intervals

    @property
    def gradient_bytes(self) -> int:
        """Gradients that one repetition finishes."""
        return sum(interval.gradient_bytes for interval in self.intervals)

    def start_of(self, repetition: int) -> Height:
        """What is alive before a repetition, counted from 0 in the order they run."""
        change = self.change
        moved = Level(
            saved_bytes=repetition * change.saved_bytes,
            other_bytes=repetition * change.other_bytes,
            earlier_bytes=repetition * change.earlier_bytes,
            passed_bytes=repetition * change.passed_bytes,
        )
        return self.start.plus(moved, loss=self.loss)


class StandIns(NamedTuple):
    """Numbers that stand for sizes which no event of a pass says (``memplan.memory.shapes``)."""

    batch: tuple[int, ...]
    """Each of its tensors."""
    seed: int
    """The gradient that backward begins with."""
    buffers: tuple[int, ...]
    """Megatron's global memory buffer, as often as it grows."""
    workspace: int
    """cuBLAS's."""


@dataclass(slots=True)
class StepPasses:
    """Forward and backward of the whole tape."""

    forward: list[ForwardPass] = field(default_factory=list)
    at_return: Height = Height()
    """When the model returns, and its hooks run."""
    after_forward: Height = Height()
    """After the loss, when autocast's cache and the outputs are gone."""
    backward: list[BackwardPass] = field(default_factory=list)
    after_backward: Height = Height()
    """What is left beside gradients: the loss, leaves that want gradients, and these."""
    inputs: list[BackwardPass] = field(default_factory=list)
    """The backward pass of a pipeline's stage for its input's gradient alone."""
    after_inputs: Height = Height()
    """When it is over, and what stands behind all weights is gone."""
    weights: list[BackwardPass] = field(default_factory=list)
    """The one for the weights' gradients, which follows, the first segment first."""
    after_weights: Height = Height()
    dropped: list[Storage] = field(default_factory=list)
    """What the graph lets go behind ``inputs``."""
    away_bytes: int = 0
    """What lies in CPU RAM when backward begins, page-locked."""
    stand_ins: StandIns | None = None
    """Numbers in the place of sizes that no event of a pass says; None: who plays knows them."""
