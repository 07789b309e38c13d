"""What lies beside a pass of a pipeline: counts of a few sizes, of which every batch has its own.

A micro-batch in flight holds what its stage's forward pass leaves; a buffer between stages is as large as
what is sent. How many there are of each beside a pass is the schedule's business alone.
"""

from collections.abc import Iterable, Sequence
from operator import mul

from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind, Entry

Counts = tuple[int, ...]
"""Plain bytes, and how often each size is held."""
_BYTES_BITS = 40
_COUNT_BITS = 24


def symbol(number: int) -> int:
    """What stands for a size: sums of such are counts of each, written into one integer.

    >>> counts_of(3 * symbol(1) + symbol(2) + 512, num_sizes=2)
    (512, 3, 1)
    """
    return 1 << (_BYTES_BITS + _COUNT_BITS * (number - 1))


def counts_of(total: int, *, num_sizes: int) -> Counts:
    """How often each size is in a sum of symbols and plain bytes."""
    found = [total & ((1 << _BYTES_BITS) - 1)]
    total >>= _BYTES_BITS
    for _ in range(num_sizes):
        found.append(total & ((1 << _COUNT_BITS) - 1))
        total >>= _COUNT_BITS
    assert not total, "more in flight than a count can say"
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Crowd:
    """What is beside a pass."""

    counts: Counts
    lines: tuple[tuple[ComponentKind | None, str, Counts], ...]
    """The same by purpose; None: micro-batches in flight."""

    def covers(self, other: "Crowd") -> bool:
        """Whether there is no less of anything, whatever the sizes."""
        return all(one >= few for one, few in zip(self.counts, other.counts, strict=True))


def uncovered(crowds: Iterable[Crowd]) -> tuple[Crowd, ...]:
    """Those of which one is the largest, whatever the sizes."""
    kept: list[Crowd] = []
    for crowd in crowds:
        if any(other.covers(crowd) for other in kept):
            continue
        kept = [other for other in kept if not crowd.covers(other)]
        kept.append(crowd)
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a batch makes of counts."""

    sizes: tuple[int, ...]
    """Of a plain byte and of each number's [bytes]."""
    parts: tuple[tuple[Entry, ...], ...]
    """What a micro-batch in flight holds, where a size is that of one."""

    def bytes_of(self, counts: Counts) -> int:
        """All of it [bytes]."""
        return sum(map(mul, counts, self.sizes))

    def largest(self, crowds: Sequence[Crowd]) -> tuple[int, Crowd]:
        """Of several the one that takes most, and how much [bytes]."""
        if len(crowds) == 1:
            (crowd,) = crowds
            return self.bytes_of(crowd.counts), crowd
        return max(
            ((self.bytes_of(each.counts), each) for each in crowds), key=lambda each: each[0]
        )

    def entries(self, crowd: Crowd) -> list[Entry]:
        """It by purpose; micro-batches in flight by what they hold."""
        found: list[Entry] = []
        flying: dict[tuple[ComponentKind, str], int] = {}
        for kind, name, counts in crowd.lines:
            if kind is not None:
                found.append(Entry(kind, self.bytes_of(counts), name))
                continue
            for count, parts in zip(counts, self.parts, strict=True):
                for part in parts if count else ():
                    key = part.kind, part.origin
                    flying[key] = flying.get(key, 0) + count * part.num_bytes
        found += [Entry(kind, size, name) for (kind, name), size in flying.items()]
        return [entry for entry in found if entry.num_bytes]


NOTHING = Crowd((0,), ())
UNCROWDED = Sizes((1,), ((),))
"""Of a run beside whose passes nothing is."""
