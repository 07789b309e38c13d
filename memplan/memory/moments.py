"""Finding the fullest moment of a phase while an engine's buffers are laid over the passes."""

from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind, Entry
from memplan.memory.step import BackwardPass, ForwardPass, Height
from memplan.memory.walk import Interval, Level

_NOTHING = Level()


@dataclass(slots=True)
class Held:
    """What the engine itself holds at one moment [bytes]."""

    gathered_bytes: int = 0
    """Whole parameters."""
    buffers_bytes: int = 0
    """Inputs and outputs of collectives."""
    gradients_bytes: int = 0
    """Gradients of parameters, whole or sharded."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.gathered_bytes + self.buffers_bytes + self.gradients_bytes

    def copy(self) -> "Held":
        """The same bytes, apart from further changes."""
        return Held(self.gathered_bytes, self.buffers_bytes, self.gradients_bytes)


class Moments:
    """Keeps the highest sum of activations and engine that it is shown."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.best_bytes = -1
        self._height = Height()
        self._moved = _NOTHING
        self._level = _NOTHING
        self._loss = False
        self._held = Held()

    def see(
        self,
        height: Height,
        moved: Level = _NOTHING,
        level: Level = _NOTHING,
        *,
        loss: bool = False,
        gradients_bytes: int = 0,
    ) -> None:
        """Look at one moment: a height, moved by earlier repetitions, and a level on top."""
        held = self.held
        total = (
            height.total_bytes + moved.total_bytes + level.total_bytes
            + held.gathered_bytes + held.buffers_bytes + held.gradients_bytes + gradients_bytes
        )  # fmt: skip
        if total <= self.best_bytes:
            return
        self.best_bytes = total
        self._height, self._moved, self._level, self._loss = height, moved, level, loss
        self._held = held.copy()
        self._held.gradients_bytes += gradients_bytes

    @property
    def height(self) -> Height:
        """The activations of the fullest moment."""
        return self._height.plus(self._moved, loss=self._loss).plus(self._level, loss=self._loss)

    def entries(self) -> list[Entry]:
        """The fullest moment by component."""
        height, held = level_off(self.height), self._held
        return [
            Entry(
                ComponentKind.GRADIENTS,
                held.gradients_bytes + height.gradients_bytes,
                "finished gradients, whole or sharded",
            ),
            Entry(
                ComponentKind.ACTIVATIONS, height.activations_bytes, "kept for the backward pass"
            ),
            Entry(ComponentKind.LOGITS_AND_LOSS, height.loss_bytes, "the head and its loss"),
            Entry(
                ComponentKind.GATHERED_PARAMETERS,
                held.gathered_bytes,
                "whole parameters of the units in use",
            ),
            Entry(
                ComponentKind.COMMUNICATION_BUFFERS,
                held.buffers_bytes,
                "inputs and outputs of all-gather and reduce-scatter",
            ),
            Entry(
                ComponentKind.TEMPORARIES,
                height.temporaries_bytes,
                "inside or between operations",
            ),
        ]


def level_off(height: Height) -> Height:
    """The same total without a negative part.

    The passes book a tensor's release where it is found, which may be another part than the one its
    making was booked to.
    """
    parts = [height.activations_bytes, height.temporaries_bytes, height.loss_bytes]
    for index, part in enumerate(parts):
        for other in range(len(parts)):
            if part < 0 < parts[other]:
                taken = min(-part, parts[other])
                parts[other] -= taken
                part += taken
        parts[index] = part
    if min(parts) < 0:
        parts = [max(0, part) for part in parts]
    return Height(
        activations_bytes=parts[0],
        temporaries_bytes=parts[1],
        loss_bytes=parts[2],
        gradients_bytes=height.gradients_bytes,
    )


def moved_forward(each: ForwardPass, repetition: int) -> Level:
    """What the repetitions before this one left alive."""
    if repetition == 0:
        return _NOTHING
    return Level(saved_bytes=each.first_bytes + (repetition - 1) * each.later_bytes)


def moved_backward(each: BackwardPass, repetition: int) -> Level:
    """How the repetitions before this one moved the level."""
    if repetition == 0:
        return _NOTHING
    change = each.change
    return Level(
        saved_bytes=repetition * change.saved_bytes, other_bytes=repetition * change.other_bytes
    )


@dataclass(frozen=True, slots=True)
class Crest:
    """The fullest interval of a segment's backward pass, gradients finished in it included."""

    level: Level
    finished_bytes: int
    """Gradients of this segment that are finished by then."""


def crest_of(intervals: list[Interval], *, pile_up: bool) -> Crest:
    """Find it; unless gradients ``pile_up``, each is added to one that is there already."""
    best = Crest(_NOTHING, 0)
    best_bytes: int | None = None
    finished = 0
    for interval in intervals:
        total = interval.peak.total_bytes + finished
        if best_bytes is None or total > best_bytes:
            best_bytes = total
            best = Crest(interval.peak, finished)
        if pile_up:
            finished += interval.gradient_bytes
    return best
