"""Where a prediction and a recording part: level by level, size by size, block by block."""

from collections import Counter
from collections.abc import Iterator

from memplan.fast_dataclass import dataclass
from memplan.memory.snapshots.recorded import RecordedBlock, Recording, RunPart, Stack
from memplan.memory.snapshots.snapshot import OWN_FILE


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
    place: str
    """Where: a line of Python, or a layer and its operation."""
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
    counts = Counter(
        (block.num_bytes, place_of(block.stack)) for block in alive if surplus[block.num_bytes] > 0
    )
    left = dict(surplus)
    for (size, place), count in sorted(counts.items(), key=lambda each: each[1]):
        taken = min(count, left[size])
        if taken > 0:
            left[size] -= taken
            yield LoneBlocks(num_bytes=size, count=taken, place=place, recorded=recorded)


def place_of(stack: Stack) -> str:
    """Where a block was made, in a few words; layers of one stack are one place.

    >>> from memplan.memory.snapshots.recorded import Frame
    >>> place_of((Frame("site-packages/torch/nn/modules/linear.py", 134, "forward"),))
    'torch/nn/modules/linear.py:134 forward'
    """
    if not stack:
        return UNKNOWN_PLACE
    inner, outer = stack[0], stack[-1]
    if outer.file == OWN_FILE:
        layer, _, number = inner.file.rpartition(".")
        return f"{layer if number.isdigit() else inner.file}: {inner.name}, {outer.name}"
    python = [frame for frame in stack if frame.file.endswith(".py")]
    found = [frame for frame in python if "torch/" not in frame.file] or python or [inner]
    places = dict.fromkeys([(python or [inner])[0], found[0]])
    return " < ".join(f"{_short(each.file)}:{each.line} {each.name}" for each in places)


def _short(file: str) -> str:
    """A path from its package on."""
    _, found, package = file.rpartition("site-packages/")
    return package if found else "/".join(file.split("/")[-3:])


UNKNOWN_PLACE = "no stack: a thread of autograd, or before the recording began"
