"""What is alive over a run, layer by layer: the fold of a named run's events that a timeline draws."""

from collections.abc import Iterable, Iterator, Mapping

from memplan.fast_dataclass import dataclass
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.account import ComponentKind
from memplan.memory.replaying.ledger import Block, Part
from memplan.memory.replaying.tracing import Action, trace
from memplan.memory.snapshots.named import NamedRun, Stretch
from memplan.units import round_up

_GAINS = {
    Action.SEGMENT_ALLOC: 1, Action.SEGMENT_MAP: 1,
    Action.SEGMENT_FREE: -1, Action.SEGMENT_UNMAP: -1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLevel:
    """A moment of a run."""

    stretch: Stretch
    components: dict[ComponentKind, int]
    """Bytes alive, each block rounded up to ``ALLOCATION_ROUNDING``."""
    reserved_bytes: int
    """What the allocator holds by then."""
    largest: tuple[tuple[str, int], ...] = ()
    """Blocks by name, the largest first, those of a name together [bytes]; a few."""

    @property
    def total_bytes(self) -> int:
        """All that is alive."""
        return sum(self.components.values())


def run_levels(run: NamedRun, *, expandable: bool = False) -> list[RunLevel]:
    """Loading, then the last micro-batch of the last step and its update, layer by layer.

    Of each stretch of a layer there is the fullest moment, and what it leaves.
    """
    last = max(
        stretch.start
        for stretch in run.ledger.stretches
        if stretch.part is Part.FORWARD and stretch.segment is None
    )
    return list(_levels(run, last, expandable=expandable))


def _levels(run: NamedRun, last: int, *, expandable: bool) -> Iterator[RunLevel]:
    """Those of loading, and from this event on."""
    ledger, names = run.ledger, _names(run)
    reserved_at = _reserved(run, expandable=expandable)
    components: dict[ComponentKind, int] = {}
    sizes: dict[Block, int] = {}
    reserved = total = 0
    ends = [*(stretch.start for stretch in ledger.stretches[1:]), len(ledger.events)]
    for stretch, end in zip(ledger.stretches, ends, strict=True):
        fullest, highest = dict(components), total
        since: list[tuple[Block, int]] = []
        """Blocks that came (above 0) or went since then."""
        for number in range(stretch.start, end):
            event = ledger.events[number]
            if event > 0:
                size = sizes[number] = round_up(event, ALLOCATION_ROUNDING)
                kind = run.labels[number].kind
                reserved = reserved_at[number]
            elif event < 0:
                size = -sizes.pop(~event)
                kind = run.labels[~event].kind
            else:
                continue
            components[kind] = components.get(kind, 0) + size
            total += size
            since.append((number if event > 0 else ~event, size))
            if total > highest:
                fullest, highest = dict(components), total
                since.clear()
        if stretch.part is not Part.LOAD and stretch.start < last:
            continue
        alive = _largest(names, _back(sizes, since))
        yield RunLevel(stretch=stretch, components=fullest, reserved_bytes=reserved, largest=alive)
        if stretch.segment is not None:
            yield RunLevel(
                stretch=stretch, components=dict(components), reserved_bytes=reserved,
                largest=_largest(names, sizes),
            )  # fmt: skip


NUM_LARGEST = 6
"""Names that a moment tells."""


def _back(sizes: Mapping[Block, int], since: Iterable[tuple[Block, int]]) -> dict[Block, int]:
    """The blocks that were alive before these came and went."""
    found = dict(sizes)
    for block, size in since:
        if size > 0:
            found.pop(block, None)
    came = {block for block, size in since if size > 0}
    found |= {block: -size for block, size in since if size < 0 and block not in came}
    return found


def _names(run: NamedRun) -> dict[Block, str]:
    """What each block is called."""
    kinds = {kind: kind.label.replace("_", " ") for kind in ComponentKind}
    return {block: f"{kinds[label.kind]}: {label.name}" for block, label in run.labels.items()}


def _largest(names: Mapping[Block, str], sizes: Mapping[Block, int]) -> tuple[tuple[str, int], ...]:
    """What takes most of a moment, by name."""
    sums: dict[str, int] = {}
    for block, size in sizes.items():
        name = names[block]
        sums[name] = sums.get(name, 0) + size
    return tuple(sorted(sums.items(), key=lambda item: -item[1])[:NUM_LARGEST])


def _reserved(run: NamedRun, *, expandable: bool) -> dict[Block, int]:
    """What is reserved once a block is there."""
    found: dict[Block, int] = {}
    reserved = 0
    for entry in trace(run.ledger.events, run.ledger.streams, expandable=expandable).entries:
        reserved += _GAINS.get(entry.action, 0) * entry.num_bytes
        if entry.action is Action.ALLOC:
            found[entry.block] = reserved
    return found
