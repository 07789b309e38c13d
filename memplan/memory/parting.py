"""Where a prediction and a recording part: level by level, size by size, block by block."""

from collections import Counter
from collections.abc import Iterator

from memplan.memory.recorded import RecordedBlock, Recording, RunPart, Stack
from memplan.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A figure on both sides [bytes]; None: a side does not tell."""

    name: str
    predicted_bytes: int | None
    recorded_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeClass:
    """Blocks of one size that are alive at each side's fullest moment."""

    num_bytes: int
    """One block's."""
    num_predicted: int
    num_recorded: int

    @property
    def surplus_bytes(self) -> int:
        """What the recording holds more; negative: what the prediction does."""
        return (self.num_recorded - self.num_predicted) * self.num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LoneBlocks:
    """Blocks that only one side holds at its fullest moment, made at one place."""

    num_bytes: int
    """One block's."""
    count: int
    stack: Stack
    recorded: bool
    """The recording holds them; False: the prediction."""

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.count * self.num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """How a recording differs from what was predicted."""

    predicted: Recording
    recorded: Recording

    @property
    def peaks(self) -> tuple[Level, ...]:
        """The most that was alive, and the most that was reserved."""
        return (
            Level(
                name="allocated",
                predicted_bytes=self.predicted.allocated_bytes,
                recorded_bytes=self.recorded.allocated_bytes,
            ),
            Level(
                name="reserved",
                predicted_bytes=self.predicted.reserved_bytes,
                recorded_bytes=self.recorded.reserved_bytes,
            ),
        )

    @property
    def parts(self) -> tuple[Level, ...]:
        """The most that was alive in each part of the run; empty where frames tell of none."""
        known = self.recorded.part_bytes
        if not known:
            return ()
        return tuple(
            Level(
                name=part.value,
                predicted_bytes=self.predicted.part_bytes.get(part),
                recorded_bytes=known.get(part),
            )
            for part in RunPart
        )

    @property
    def size_classes(self) -> tuple[SizeClass, ...]:
        """Every size, that with the greatest difference in bytes first."""
        predicted = Counter(block.num_bytes for block in self.predicted.alive)
        recorded = Counter(block.num_bytes for block in self.recorded.alive)
        found = [
            SizeClass(num_bytes=size, num_predicted=predicted[size], num_recorded=recorded[size])
            for size in predicted.keys() | recorded.keys()
        ]
        return tuple(sorted(found, key=lambda each: (-abs(each.surplus_bytes), -each.num_bytes)))

    @property
    def lone_blocks(self) -> tuple[LoneBlocks, ...]:
        """What only one side holds, the most bytes first.

        Blocks are told apart by size; of those of one size that a side holds more of, the places with
        the fewest are taken to be the ones that the other side lacks.
        """
        surplus = {
            each.num_bytes: each.num_recorded - each.num_predicted for each in self.size_classes
        }
        found = [
            *_lone(self.recorded.alive, surplus, recorded=True),
            *_lone(self.predicted.alive, {s: -n for s, n in surplus.items()}, recorded=False),
        ]
        return tuple(sorted(found, key=lambda each: (-each.total_bytes, -each.num_bytes)))


def _lone(
    alive: tuple[RecordedBlock, ...], surplus: dict[int, int], *, recorded: bool
) -> Iterator[LoneBlocks]:
    counts = Counter(block for block in alive if surplus[block.num_bytes] > 0)
    left = dict(surplus)
    for block, count in sorted(counts.items(), key=lambda each: each[1]):
        taken = min(count, left[block.num_bytes])
        if taken > 0:
            left[block.num_bytes] -= taken
            yield LoneBlocks(
                num_bytes=block.num_bytes, count=taken, stack=block.stack, recorded=recorded
            )
