"""A run replayed through the allocator, on a card with room or with little: by compiled code where that
was built (``_replay.c``), and in Python where it was not, with the same answers.

A run settles: from some step on each leaves the allocator as the one before it did, and all later ones
are like it. Until then it is played; what survives a few steps may die in a later one.

What a run does goes by capacity only where the allocator asks whether there is enough. So an answer
holds for every capacity at which these questions are answered alike.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from memplan.fast_dataclass import dataclass
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.replaying.allocator import SEGMENT_ROUNDING_BYTES
from memplan.memory.replaying.ledger import Cycle, with_sizes

if TYPE_CHECKING:
    from memplan.memory.replaying.in_python import PythonRun

_UNIT = ALLOCATION_ROUNDING
MAX_CYCLES = 64
"""Further steps after which a run is not followed any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorPeaks:
    """What a replay reached [bytes]."""

    requested_bytes: int
    """Requests, each rounded up to ``ALLOCATION_ROUNDING``: what is alive at most."""
    allocated_bytes: int
    """Blocks handed out, their unsplit rests included: ``max_memory_allocated``."""
    reserved_bytes: int
    """Segments: ``max_memory_reserved``."""
    num_mallocs: int
    """Calls of ``cudaMalloc``; of expandable segments pages that were mapped."""
    num_flushes: int
    """How often what is wholly free was given back for want of memory."""
    died_at: int | None = None
    """The event at which memory ran out; None: it did not."""
    num_cycles: int = 0
    """How often the step that recurs was played again."""
    flushes_recur: bool = False
    """The cache was given back in the last of these too."""
    is_settled: bool = True
    """The allocator's state had been there before, so that all later steps are like these."""
    lacked_bytes: int | None = None
    """The least capacity with which something else would have happened; None: there was room."""
    pressed_bytes: int = 0
    """The most that was reserved right after a flush: what the run could not have done without."""

    def holds_on(self, capacity_bytes: int | None, *, max_cycles: int = MAX_CYCLES) -> bool:
        """Whether the same happens in so many further steps on a card of another capacity; None: one with room."""
        # What a run does later is no answer to what it does so far: else it would matter what was asked before.
        is_over = self.is_settled or self.died_at is not None
        if self.num_cycles > max_cycles or (self.num_cycles < max_cycles and not is_over):
            return False
        if capacity_bytes is None:
            return self.lacked_bytes is None
        if capacity_bytes < self.reserved_bytes:
            return False
        return self.lacked_bytes is None or capacity_bytes < self.lacked_bytes


INTERFACE = 3
"""Of the compiled code: raised with every change of what it is given or gives back. An editable installation may have
an older one lying there."""


class _Compiled(Protocol):
    """The compiled code."""

    def prepare(
        self,
        events: "array[int]",
        streams: dict[int, int],
        sizes: "array[int]",
        before: int,
        cycle: int,
        expandable: bool,
        /,
    ) -> object:
        """A run, stand-ins with their sizes; it keeps some states in which it was."""

    def replay(
        self, run: object, max_cycles: int, capacity: int, /
    ) -> tuple[int, int, int, int, int, int, int, int, int, int, int]:
        """Peaks, counts, where it died and how it settled; in units."""


PURE_PYTHON = "MEMPLAN_PURE_PYTHON"
"""Set in the environment to anything: the compiled code is neither built nor used."""


def compiled_code() -> _Compiled | None:
    """The compiled code, where it was built and is wanted."""
    from os import environ  # asked for once

    if environ.get(PURE_PYTHON):
        return None
    try:
        from memplan.memory import _replay  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return None
    found: _Compiled = _replay
    return None if _is_old(found) else found


def _is_old(compiled: object) -> bool:
    return getattr(compiled, "INTERFACE", None) != INTERFACE


def is_outdated() -> bool:
    """Whether compiled code lies there that is of another version, and so is not used.

    >>> is_outdated()
    False
    """
    try:
        from memplan.memory import _replay  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return False
    return _is_old(_replay)


COMPILED = compiled_code()
"""None: replays are made in Python."""
_ENDLESS = (1 << 63) // 8
"""Of the compiled code: with this capacity something else would not have happened."""


def packed(numbers: Sequence[int]) -> "array[int]":
    """Numbers in eight bytes each, as the compiled code takes them. Raises ``OverflowError`` for one that has more.

    >>> packed([512, ~0])
    array('q', [512, -1])
    """
    return numbers if isinstance(numbers, array) else array("q", numbers)


def playable(events: Sequence[int]) -> Sequence[int]:
    """Events as they are replayed: packed, unless that is done in Python, which would have to unpack them again."""
    if COMPILED is None:
        return events
    try:
        return packed(events)
    except OverflowError:
        return events


class Replayer:
    """One run, asked what becomes of it on cards of several capacities."""

    __slots__ = ("_cycle", "_expandable", "_in_python", "_num_events", "_run", "_streams")

    def __init__(
        self,
        events: Sequence[int],
        streams: dict[int, int] | None = None,
        cycle: Cycle | None = None,
        *,
        expandable: bool = False,
        sizes: Sequence[int] = (),
    ) -> None:
        """``sizes`` are what stand-ins among the events are for (``memplan.memory.shapes``) [bytes]."""
        self._streams = streams or {}
        self._cycle = cycle
        self._expandable = expandable
        self._num_events = len(events)
        self._run: object = None
        if COMPILED is not None:
            self._run = self._prepared(COMPILED, events, sizes)
        self._in_python: PythonRun | None = None
        if self._run is None:
            played = with_sizes(events, sizes) if sizes else events
            self._in_python = _in_python(played, self._streams, cycle, expandable=expandable)

    def _prepared(self, code: _Compiled, events: Sequence[int], sizes: Sequence[int]) -> object:
        """As the compiled code takes it; None: blocks are larger than it counts."""
        end = len(events)
        before, start = self._cycle if self._cycle is not None else (end, end)
        try:
            numbers, own = packed(events), packed(sizes)
            return code.prepare(numbers, self._streams, own, before, start, self._expandable)
        except OverflowError:
            return None

    @property
    def num_events(self) -> int:
        """How long it is, loading and the steps that are played out."""
        return self._num_events

    @property
    def caution(self) -> "Caution":
        """With which its least capacity is looked for."""
        cycle = self._num_events - self._cycle.start if self._cycle is not None else 0
        trials = TRIED_EVENTS // (
            self._num_events + cycle * 3 // 2
        )  # of which most die or settle soon
        if self._num_events >= MANY_EVENTS:
            return LITTLE_CAUTION
        parts = min(MOST_CAUTION.parts, max(LEAST_CAUTION, trials // 3))
        return Caution(max(LEAST_CAUTION, trials), parts, TEN_STEPS)

    def on_card(
        self, capacity_bytes: int | None, *, max_cycles: int = MAX_CYCLES
    ) -> AllocatorPeaks:
        """What is reached with so much room for segments; None: with as much as it wants."""
        if COMPILED is not None and self._run is not None:
            return self._compiled(COMPILED, capacity_bytes, max_cycles)
        assert self._in_python is not None, "a run that is not compiled is replayed in Python"
        return peaks_in_python(self._in_python, capacity_bytes, max_cycles)

    def _compiled(
        self, code: _Compiled, capacity_bytes: int | None, max_cycles: int
    ) -> AllocatorPeaks:
        capacity = -1 if capacity_bytes is None else capacity_bytes // _UNIT
        requested, allocated, reserved, mallocs, flushes, died_at, cycles, settled, lacked, pressed, flushing = (
            code.replay(self._run, max_cycles, capacity)
        )  # fmt: skip
        return AllocatorPeaks(
            requested_bytes=requested * _UNIT,
            allocated_bytes=allocated * _UNIT,
            reserved_bytes=reserved * _UNIT,
            num_mallocs=mallocs,
            num_flushes=flushes,
            died_at=None if died_at < 0 else died_at,
            num_cycles=cycles,
            flushes_recur=bool(flushing),
            is_settled=bool(settled) or self._cycle is None,
            lacked_bytes=None if lacked >= _ENDLESS else lacked * _UNIT,
            pressed_bytes=pressed * _UNIT,
        )


def _in_python(
    events: Sequence[int], streams: dict[int, int], cycle: Cycle | None, *, expandable: bool
) -> "PythonRun":
    from memplan.memory.replaying.in_python import PythonRun  # only where nothing is compiled

    return PythonRun(events, streams, cycle, expandable=expandable)


def known_on(
    found: Sequence[AllocatorPeaks], capacity_bytes: int | None, *, max_cycles: int = MAX_CYCLES
) -> AllocatorPeaks | None:
    """An answer that holds for a card of this capacity, where there is one."""
    return next(
        (each for each in found if each.holds_on(capacity_bytes, max_cycles=max_cycles)), None
    )


def replay(
    events: list[int],
    streams: dict[int, int] | None = None,
    cycle: Cycle | None = None,
    *,
    capacity_bytes: int | None = None,
    expandable: bool = False,
) -> AllocatorPeaks:
    """Replay a run on a card of ``capacity_bytes``, or on one with room.

    >>> replay([3 << 20, ~0]).reserved_bytes >> 20
    20
    """
    return Replayer(events, streams, cycle, expandable=expandable).on_card(capacity_bytes)


def peaks_in_python(
    run: "PythonRun", capacity_bytes: int | None, max_cycles: int = MAX_CYCLES
) -> AllocatorPeaks:
    """What a run reaches, told without compiled code."""
    followed = run.follow(capacity_bytes, max_cycles=max_cycles)
    way = followed.way
    return AllocatorPeaks(
        requested_bytes=way.requested * _UNIT,
        allocated_bytes=way.allocated * _UNIT,
        reserved_bytes=way.reserved * _UNIT,
        num_mallocs=way.num_mallocs,
        num_flushes=way.num_flushes,
        died_at=way.died_at,
        num_cycles=followed.num_cycles,
        flushes_recur=followed.flushes,
        is_settled=followed.is_settled or run.cycle is None,
        lacked_bytes=None if way.lacked >= _ENDLESS else way.lacked * _UNIT,
        pressed_bytes=way.pressed * _UNIT,
    )


class OnCard(Protocol):
    """Says what is reached with so much room for segments, in so many further steps at most."""

    def __call__(
        self, capacity_bytes: int | None, *, max_cycles: int = MAX_CYCLES
    ) -> AllocatorPeaks:
        """What is reached; ``None``: with as much room as it wants."""


class Caution(NamedTuple):
    """With which a least capacity is looked for, from above: what fits is not monotone."""

    in_turn: int
    """Ranges that are looked at one after the other before any is passed over."""
    parts: int
    """Into so many a surplus is cut to pass over one of them at a time."""
    max_cycles: int
    """Further steps in which a run is followed there."""


TRIED_EVENTS = 1_000_000
"""Of all ranges of a run that are looked at in turn, together."""
LEAST_CAUTION = 16
"""Ranges in turn and parts. Of 64 runs (ten families, all engines) 57 then come to what looking at each range finds; where the
first are passed over and followed for three steps alone, 51, and a run may die in its sixth step of what it is said to need."""
TEN_STEPS = 8
"""Further steps behind those that are played out."""
MOST_CAUTION = Caution(TRIED_EVENTS, 128, TEN_STEPS)
"""All of a run's ranges."""
MANY_EVENTS, LITTLE_CAUTION = 60_000, Caution(8, 12, 3)
"""Of runs with so many, as of pipelines, a trial takes long."""


def floor_bytes(on_card: OnCard, *, caution: Caution = MOST_CAUTION) -> int:
    """The least capacity for segments from which on every larger one is enough [bytes].

    What fits is not monotone: with less room the cache is flushed sooner, other blocks serve other
    requests, and a run that died may live again. So capacities are tried from what is reserved on a
    card with room downwards, one range after the other that are answered alike, to the first with which
    the run dies within a few steps. Where there are many such ranges, a part of what the
    run has more than it was pressed for is passed over at a time (``Caution``). With the last one that lived the run is then
    played until it settles; should it die of that, longer and longer steps lead up to one with which it lives.
    What lies between that and the largest that it died with is halved.

    >>> run = Replayer([3 << 20, ~0, 30 << 20])
    >>> floor_bytes(run.on_card) >> 20
    30
    """
    lives, dies = _walked_down(on_card, caution=caution, down_to_bytes=0)
    return _settled(on_card, lives, dies)


def is_enough(on_card: OnCard, capacity_bytes: int, *, caution: Caution = MOST_CAUTION) -> bool:
    """Whether a capacity is enough, and every larger one: what ``floor_bytes`` says, but sooner.

    >>> run = Replayer([3 << 20, ~0, 30 << 20])
    >>> is_enough(run.on_card, 30 << 20), is_enough(run.on_card, 28 << 20)
    (True, False)
    """
    found = on_card(capacity_bytes)
    if found.died_at is not None:
        return False
    if found.lacked_bytes is None:
        return True
    lives, dies = _walked_down(on_card, caution=caution, down_to_bytes=capacity_bytes)
    if lives <= capacity_bytes:
        return True
    return dies < capacity_bytes and _settled(on_card, lives, dies) <= capacity_bytes


def _walked_down(on_card: OnCard, *, caution: Caution, down_to_bytes: int) -> tuple[int, int]:
    """From what is reserved with room down to the last capacity that a few steps live with, or to one that is
    low enough; and the first that they die with, of which nothing is known where none was met [bytes]."""
    lives, dies, num_tried = on_card(None).reserved_bytes, 0, 0
    tried = lives - _UNIT
    while lives > down_to_bytes:
        found = on_card(tried, max_cycles=caution.max_cycles)
        if found.died_at is not None:
            return lives, tried
        further = _further(tried + _UNIT, found, caution.parts)
        lives, num_tried = found.reserved_bytes, num_tried + 1
        tried = lives - _UNIT
        if num_tried >= caution.in_turn:
            tried = min(tried, further)
    return lives, dies


def _further(floor_bytes: int, found: AllocatorPeaks, parts: int) -> int:
    """The capacity to try next, by how much the last was more than enough [bytes]."""
    surplus = (floor_bytes - found.pressed_bytes) // parts
    return _rounded(floor_bytes - max(surplus, floor_bytes // parts**2))


def _settled(on_card: OnCard, lives_bytes: int, dies_bytes: int) -> int:
    """The least capacity with which later steps live, too, above one that is known to be too small [bytes]."""
    found, step = on_card(lives_bytes), 0
    while found.died_at is not None:
        assert found.lacked_bytes is not None, "a run dies for want of something"
        dies_bytes = found.lacked_bytes - _UNIT
        found = on_card(found.lacked_bytes + step)
        step = 2 * step or SEGMENT_ROUNDING_BYTES
    return _between(on_card, dies_bytes, found.reserved_bytes)


def _between(on_card: OnCard, dies_bytes: int, lives_bytes: int) -> int:
    """The least capacity with which a run lives, above one with which it dies, by bisection [bytes]."""
    while True:
        middle = _rounded((dies_bytes + lives_bytes) // 2)
        if not dies_bytes < middle < lives_bytes:
            return lives_bytes
        found = on_card(middle)
        if found.died_at is None:
            lives_bytes = found.reserved_bytes
        else:
            assert found.lacked_bytes is not None, "a run dies for want of something"
            dies_bytes = found.lacked_bytes - _UNIT


def _rounded(capacity_bytes: int) -> int:
    return capacity_bytes // SEGMENT_ROUNDING_BYTES * SEGMENT_ROUNDING_BYTES


def islands(on_card: OnCard, *, below_bytes: int) -> list[tuple[int, int]]:
    """Capacities below one with which a run lives all the same, each range with its end [bytes].

    Down to what it asks for at its fullest, the largest first.
    """
    least = on_card(None).requested_bytes
    return _joined(
        (start, end)
        for start, end, lives in _ranges(on_card, least, below_bytes, max_cycles=MAX_CYCLES)
        if lives
    )


def gaps(on_card: OnCard, *, above_bytes: int) -> list[tuple[int, int]]:
    """Capacities above one that was found enough with which a run dies all the same, each range with its end [bytes].

    ``floor_bytes`` passes over some where there are many; here each is looked at, for ten steps, the largest first.
    """
    most = on_card(None).reserved_bytes
    return _joined(
        (start, end)
        for start, end, lives in _ranges(on_card, above_bytes, most, max_cycles=TEN_STEPS)
        if not lives
    )


def _ranges(
    on_card: OnCard, least_bytes: int, end_bytes: int, *, max_cycles: int
) -> Iterator[tuple[int, int, bool]]:
    """Ranges of capacities that are answered alike, from the largest down, and whether a run lives with them."""
    while end_bytes > least_bytes:
        tried = _rounded(end_bytes - _UNIT)
        found = on_card(tried, max_cycles=max_cycles)
        start = max(min(found.reserved_bytes, tried), least_bytes)
        yield start, end_bytes, found.died_at is None
        end_bytes = start


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours as one range, the largest first."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][0] == end:
            joined[-1] = start, joined[-1][1]
        else:
            joined.append((start, end))
    return joined
