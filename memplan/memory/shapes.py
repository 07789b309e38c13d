"""The shape of a run: in which order a model's blocks come and go, however large they are.

Micro-batches of other sizes, other lengths, and cards that split a sum otherwise, mostly ask for the same blocks in
the same order. Such runs are played out once, with numbers in the place of the model's own sizes; each has
its own sizes put in when it is replayed.
"""

from array import array
from collections.abc import Hashable, Iterable

from memplan.fast_dataclass import replace
from memplan.graph.core.tensors import Storage
from memplan.memory.ends import batch_of, seed_of
from memplan.memory.passes import BackwardPass, ForwardPass, StandIns
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import FIRST_STAND_IN
from memplan.memory.walks.backward_profile import BackwardProfile, GradientBuffer
from memplan.memory.walks.walk import Event, ForwardProfile


def shape_of(given: RankInput, *, workspace_bytes: int) -> tuple[Hashable, list[int]]:
    """All that the order of a model's blocks hangs on, for equal ones to be found, and their sizes [bytes].

    Of recordings of one model, in which nothing but sizes may differ; ``workspace_bytes`` is cuBLAS's, of
    one thread.
    """
    passes, seen, sizes = given.passes, _Seen(), list[int]()
    pattern: list[Hashable] = []
    for forward in passes.forward:
        pattern += [forward.segment.index, forward.first, forward.repeats]
        pattern += _forward_pattern(forward.profile, seen, sizes)
    for backward in passes.backward:
        pattern += [backward.segment.index, backward.repeats]
        pattern += _backward_pattern(backward.profile, seen, sizes)
    batch, buffers = batch_of(given.tape), given.tape.buffers_in_use
    sizes += (*batch, _seed_bytes(given), *buffers, workspace_bytes)
    loaded = tuple([each.num_bytes for each in given.tape.buffers])
    loaded += tuple([each.codes_bytes for part in given.tape.segments for each in part.parameters])
    return (
        tuple(pattern),
        seen.kinds(),
        loaded,
        len(batch),
        len(buffers),
        workspace_bytes > 0,
    ), sizes


def numbered(given: RankInput) -> RankInput:
    """The same, with stand-ins for the sizes that ``shape_of`` gives, in their order."""
    numbers, passes = _Numbers(), given.passes
    return replace(
        given,
        passes=replace(
            passes,
            forward=[_numbered_forward(each, numbers) for each in passes.forward],
            backward=[_numbered_backward(each, numbers) for each in passes.backward],
            stand_ins=StandIns(
                batch=tuple([numbers.next() for _ in batch_of(given.tape)]),
                seed=numbers.next(),
                buffers=tuple([numbers.next() for _ in given.tape.buffers_in_use]),
                workspace=numbers.next(),
            ),
        ),
    )


class _Seen:
    """Things that are told apart by themselves, each by the number under which it was seen first."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def number(self, thing: object) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def all(self, things: Iterable[object]) -> tuple[int, ...]:
        return tuple(map(self.number, things))

    def kinds(self) -> tuple[Hashable, ...]:
        """What a playback asks of each."""
        return tuple(map(_kind, self._numbers))


def _kind(thing: object) -> Hashable:
    if isinstance(thing, Storage):
        return thing.segment, thing.held, thing.weight_cast
    if isinstance(thing, GradientBuffer):
        return thing.is_view
    return type(thing).__name__


def _events_pattern(events: list[Event], seen: _Seen, sizes: list[int]) -> bytes:
    """In which order they come. Bytes: of a long run they are kept, hashed and compared as a whole."""
    sizes += [size for _, size in events if size]
    number = seen.number
    return array("q", [number(key) << 1 | (size > 0) for key, size in events]).tobytes()


def _forward_pattern(profile: ForwardProfile, seen: _Seen, sizes: list[int]) -> list[Hashable]:
    return [
        _events_pattern(profile.events, seen, sizes),
        profile.input_freed,
        seen.all(profile.further_freed),
        tuple(profile.starts),
        seen.all(profile.arriving),
        seen.all(profile.leaving),
    ]


def _backward_pattern(profile: BackwardProfile, seen: _Seen, sizes: list[int]) -> list[Hashable]:
    found: list[Hashable] = []
    for interval in profile.intervals:
        found += [
            _events_pattern(interval.events, seen, sizes),
            tuple(interval.marks),
            interval.parameter is None or interval.parameter.name,
            interval.gradient is not None and seen.number(interval.gradient),
        ]
    if profile.first_sum is not None:
        sizes.append(profile.first_sum[1].num_bytes)
    for pairs in (profile.given, profile.left, profile.handed):
        found += [seen.all(pairs), seen.all(pairs.values())]
    streams = profile.streams
    return [
        *found,
        profile.first_sum is not None and seen.all(profile.first_sum),
        (seen.all(streams), tuple(streams.values())),
        seen.all(profile.arriving),
        seen.all(profile.leaving),
    ]


def _seed_bytes(given: RankInput) -> int:
    """Of the gradient that backward begins with."""
    seed = seed_of(given.tape)
    return seed.num_bytes if seed else 0


class _Numbers:
    """Stand-ins, one after the other."""

    def __init__(self) -> None:
        self._next = FIRST_STAND_IN

    def next(self) -> int:
        self._next += 1
        return self._next - 1

    def in_place(self, events: list[Event]) -> list[Event]:
        """Events with stand-ins for their sizes."""
        return [(key, self.next() if size else 0) for key, size in events]


def _numbered_forward(each: ForwardPass, numbers: _Numbers) -> ForwardPass:
    profile = each.profile
    return replace(each, profile=replace(profile, events=numbers.in_place(profile.events)))


def _numbered_backward(each: BackwardPass, numbers: _Numbers) -> BackwardPass:
    profile = each.profile
    intervals = [
        replace(interval, events=numbers.in_place(interval.events))
        for interval in profile.intervals
    ]
    stand_in = None if profile.first_sum is None else numbers.next()
    return replace(each, profile=replace(profile, intervals=intervals, sum_bytes=stand_in))
