"""Walks where what is kept for the backward pass goes to CPU RAM in between, and comes back.

A tensor that goes may wait on the GPU until a few others have been handed over, and what came back for
one formula until the next one that reads such a tensor has run. What waits crosses the ends of
segments, so a walk begins with what earlier ones left waiting, and leaves its own.
"""

from collections.abc import Mapping, Sequence

from memplan.fast_dataclass import dataclass
from memplan.graph.core.away import Away, Handed
from memplan.graph.core.operation_kinds import ATTENTION_KERNELS
from memplan.graph.core.segments import Change, Operation, Segment
from memplan.graph.core.tensors import Parameter, Storage, Tensor
from memplan.graph.operations.reduction import Multiprocessors
from memplan.memory.walks.backward_profile import BackwardProfile, GradientBuffer, SharedGradient
from memplan.memory.walks.backward_walk import BackwardWalk, Made, Products
from memplan.memory.walks.split_backward import InputsWalk, WeightsWalk
from memplan.memory.walks.walk import (
    WORKSPACE,
    Event,
    ForwardProfile,
    ForwardWalk,
    InTransit,
    Level,
    forward_stages,
    further_freed,
)
from memplan.training.activation_offload import OffloadRules

OFFLOAD_STREAM = 9
"""What comes back does so on a stream of its own, and lies in that stream's memory."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Something on its way to CPU RAM when a walk ends."""

    age: int
    """How many tensors were handed over since, and this one."""
    num_bytes: int
    """What only the way holds; 0 where something else holds it too."""
    away: Away


class Transit:
    """What is on its way from one walk to the next."""

    def __init__(self, rules: OffloadRules) -> None:
        self.rules = rules
        self.waiting: tuple[Waiting, ...] = ()
        """On its way to CPU RAM."""
        self.waiting_back: tuple[int, ...] = ()
        """Bytes of each that came back."""
        self.present: frozenset[Away] = frozenset()
        """What has not gone when backward begins."""

    def forward(
        self, segment: Segment, *, drops_input: bool
    ) -> tuple[ForwardWalk, ForwardProfile, bool]:
        """Walk one repetition; the last tells whether the next one does the same."""
        walk = OffloadForwardWalk(
            segment, keep=not segment.checkpointed, rules=self.rules, waiting=self.waiting,
            drops_input=drops_input,
        )  # fmt: skip
        profile = walk.run()
        is_steady = walk.waiting == self.waiting
        self.waiting = walk.waiting
        return walk, profile, is_steady

    def turn(self) -> None:
        """Forward has ended: what has not gone is there when backward begins."""
        self.waiting_back = tuple(each.num_bytes for each in self.waiting if each.num_bytes)
        self.present = frozenset(each.away for each in self.waiting)

    def backward(
        self,
        kind: type[BackwardWalk],
        segment: Segment,
        saves: dict[Storage, int],
        *,
        in_place_sums: bool,
        accumulated: dict[Parameter, bool],
        shared: dict[Tensor, SharedGradient],
        again: ForwardProfile | None,
        device: Multiprocessors | None,
        hooked: bool,
        lent: bool,
    ) -> "OffloadBackwardWalk":
        """A walk of some kind over one repetition, from what came back before it."""
        return _OFFLOADED[kind](
            segment, saves, rules=self.rules, waiting=self.waiting_back, present=self.present,
            in_place_sums=in_place_sums, accumulated=accumulated, shared=shared, again=again,
            device=device, hooked=hooked, lent=lent,
        )  # fmt: skip

    def went_back(self, walk: BackwardWalk) -> None:
        """Take over what it leaves."""
        assert isinstance(walk, OffloadBackwardWalk)
        self.waiting_back = tuple(_size(key) for key in walk.waiting)
        self.present = walk.present


def _size(key: object) -> int:
    assert isinstance(key, Storage | InTransit)
    return key.num_bytes


class OffloadForwardWalk(ForwardWalk):
    """Forward over a segment of whose kept tensors some go to CPU RAM."""

    def __init__(
        self,
        segment: Segment,
        *,
        keep: bool,
        rules: OffloadRules,
        waiting: tuple[Waiting, ...],
        drops_input: bool,
    ) -> None:
        super().__init__(segment, keep=keep)
        self.rules = rules
        self.drops_input = drops_input
        """Nothing but this segment holds its input, which goes with it."""
        self.number = 0
        self.under_way: list[tuple[int, object, Away]] = []
        """What is on its way, the first to go first: its number, key and tensor."""
        self.holders: dict[object, int] = {}
        """How often each key is on its way."""
        self.let_go: set[object] = set()
        """Keys that only the way holds."""
        self.arriving: list[object] = []
        self.live = self.saved = self.earlier = 0
        self.peak = Level()
        self.events: list[Event] = []
        for each in waiting:
            key = InTransit(each.num_bytes)
            self._send(key, each.away, number=-each.age)
            if each.num_bytes:
                self.let_go.add(key)
                self.arriving.append(key)

    def run(self) -> ForwardProfile:
        """Walk all operations, as the forward pass does."""
        segment = self.segment
        kept = self.saves
        if segment.checkpointed:
            kept = dict.fromkeys(segment.kept_outputs | segment.handed_in | segment.pinned, 1)
        return self._run(kept)

    def _run(self, kept: dict[Storage, int]) -> ForwardProfile:
        segment, events = self.segment, self.events
        output = segment.output.storage if segment.output is not None else None
        dying: list[list[Storage]] = [[] for _ in segment.operations]
        cached = 0
        starts: list[int] = []
        if segment.input_away is not None:
            self._take((segment.input_away,))
        for position, operation in enumerate(segment.operations):
            starts.append(len(events))
            self._take(_of(operation, results=False))
            after: Sequence[Change] = ()
            between: list[Sequence[Change]] = []
            if operation.forward_scratch or operation.tiles is not None:
                before, *between, after = forward_stages(operation)
                self._play(before)
            for tensor in operation.outputs:
                storage = tensor.storage
                is_alias = any(each.storage is storage for each in operation.inputs)
                if storage.segment != segment.index or is_alias:
                    continue
                self._allocate(storage, storage.num_bytes)
                if between:
                    self._play(between.pop(0))
                if storage in kept:
                    self.saved += storage.num_bytes
                elif storage.weight_cast:
                    cached += storage.num_bytes
                elif storage is not output and not storage.held:
                    last = max(storage.last_read, position)
                    dying[last].insert(len(dying[last]) if last > position else 0, storage)
            if operation.multiplies and (not events or events[-1][0] is not WORKSPACE):
                events.append((WORKSPACE, 0))
            self._play(after)
            self._take(_of(operation, results=True))
            for storage in sorted(dying[position], key=lambda each: each.touched):
                if self.holders.get(storage):
                    self.let_go.add(storage)
                else:
                    self._free(storage, storage.num_bytes)
        starts.append(len(events))
        return self._profile(kept, cached, starts)

    def _profile(self, kept: dict[Storage, int], cached: int, starts: list[int]) -> ForwardProfile:
        given = self.segment.input.storage if self.segment.input is not None else None
        is_waiting = False
        if given is not None and given not in kept and self.drops_input:
            is_waiting = bool(self.holders.get(given))
        if is_waiting:
            self.let_go.add(given)
        # What is on its way twice goes with the last of both.
        last = {key: number for number, key, _ in self.under_way if key in self.let_go}
        leaving = sorted(last, key=lambda key: last[key])
        for key in leaving:
            if isinstance(key, Storage) and key is not given:
                self.earlier += key.num_bytes
        self.waiting = tuple(
            Waiting(self.number - number, _size(key) if last.get(key) == number else 0, away)
            for number, key, away in self.under_way
        )
        return ForwardProfile(
            peak=self.peak,
            end=self._level(),
            input_freed=given is not None and given not in kept and not is_waiting,
            further_freed=further_freed(self.segment, kept),
            cached_cast_bytes=cached,
            events=self.events,
            starts=starts,
            arriving=self.arriving,
            leaving=leaving,
        )

    # -- what goes -------------------------------------------------------------------------------

    def _take(self, handed: Sequence[Away | None]) -> None:
        """The hooks take tensors, one after another."""
        for away in handed:
            self.number += 1
            if away is None:
                continue
            if not self.rules.in_flight:
                if away.copied_bytes:
                    copy = InTransit(away.copied_bytes)
                    self._allocate(copy, copy.num_bytes)
                    self._free(copy, copy.num_bytes)
                continue
            key: object = away.storage
            is_held = self.rules.holds_copies
            if away.copied_bytes and is_held:
                key = InTransit(away.copied_bytes)
                self._allocate(key, away.copied_bytes)
                self.let_go.add(key)
            self._let_arrive()
            if away.copied_bytes and not is_held:
                copy = InTransit(away.copied_bytes)
                self._allocate(copy, copy.num_bytes)
                self._free(copy, copy.num_bytes)
            self._send(key, away, number=self.number)

    def _send(self, key: object, away: Away, *, number: int) -> None:
        self.under_way.append((number, key, away))
        self.holders[key] = self.holders.get(key, 0) + 1

    def _let_arrive(self) -> None:
        """What was handed over long enough ago is in CPU RAM: its way no longer holds it."""
        while self.under_way and self.under_way[0][0] <= self.number - self.rules.in_flight:
            _, key, _ = self.under_way.pop(0)
            self.holders[key] -= 1
            if not self.holders[key] and key in self.let_go:
                assert isinstance(key, Storage | InTransit)
                self.let_go.discard(key)
                self._free(key, key.num_bytes)

    # -- levels ----------------------------------------------------------------------------------

    def _level(self) -> Level:
        return Level(
            saved_bytes=self.saved,
            other_bytes=self.live - self.saved - self.earlier,
            earlier_bytes=self.earlier,
        )

    def _allocate(self, key: object, num_bytes: int) -> None:
        self.live += num_bytes
        if isinstance(key, InTransit):
            self.earlier += num_bytes
        self.events.append((key, num_bytes))
        if self.live > self.peak.total_bytes:
            self.peak = self._level()

    def _free(self, key: object, num_bytes: int) -> None:
        self.live -= num_bytes
        if isinstance(key, InTransit):
            self.earlier -= num_bytes
        self.events.append((key, 0))

    def _play(self, changes: Sequence[Change]) -> None:
        for key, size in changes:
            if size > 0:
                self._allocate(key, size)
            else:
                self._free(key, -size)


def _of(operation: Operation, *, results: bool) -> Handed:
    """What an operation's hooks take before it runs, or when it has: inputs come before results."""
    handed = operation.handed
    first = next(
        (n for n, each in enumerate(handed) if each is not None and each.is_result), len(handed)
    )
    return handed[first:] if results else handed[:first]


class OffloadBackwardWalk(BackwardWalk):
    """Backward over a segment of whose kept tensors some lie in CPU RAM."""

    def __init__(
        self,
        segment: Segment,
        saves: dict[Storage, int],
        *,
        rules: OffloadRules,
        waiting: Sequence[int],
        present: frozenset[Away],
        in_place_sums: bool,
        accumulated: dict[Parameter, bool],
        shared: dict[Tensor, SharedGradient],
        again: ForwardProfile | None = None,
        device: Multiprocessors | None = None,
        hooked: bool = False,
        lent: bool = False,
    ) -> None:
        super().__init__(
            segment, saves, in_place_sums=in_place_sums, accumulated=accumulated,
            shared=shared, again=again, device=device, hooked=hooked, lent=lent,
        )  # fmt: skip
        self.rules = rules
        self.present = present
        """What never went, since backward began before it had gone."""
        self.waiting: list[object] = [InTransit(size) for size in waiting]
        """What came back for earlier formulas, until the next one has run."""
        self.arriving = list(self.waiting)
        self.held: list[Storage] = []
        """What is kept, and did not go before backward began."""
        self.back: list[object] = []
        """What has come back for the formula at hand."""
        self.streams: dict[object, int] = {}

    def run(self) -> BackwardProfile:
        """Walk the operations backward."""
        for away in self.present:
            if away.storage in self.saves:
                self.saves[away.storage] += 1
                self.held.append(away.storage)
        profile = super().run()
        profile.arriving = self.arriving
        profile.leaving = self.waiting
        if self.rules.in_flight:
            profile.streams = self.streams
        return profile

    def _recompute(self, again: ForwardProfile) -> None:
        """The input comes back before its layer runs again."""
        away = self.segment.input_away
        if away is None:
            super()._recompute(again)
            return
        # What a stage receives lies in a buffer that stays; what comes back does not.
        key: object = away.storage if away.storage.num_bytes else InTransit(away.num_bytes)
        if key is away.storage:
            self.saves[away.storage] = self.saves.get(away.storage, 0) + 1
        self._come_back(key, away.num_bytes)
        super()._recompute(again)
        if not self.rules.in_flight:
            self._go(key)
            self.back.clear()

    def _come_back(self, key: object, num_bytes: int) -> None:
        self.saved += num_bytes
        self.earlier += num_bytes
        self._allocate(key, num_bytes)
        self.back.append(key)
        self.streams[key] = OFFLOAD_STREAM

    def _go(self, key: object) -> None:
        if isinstance(key, Storage):
            self._unkeep(key)
            return
        assert isinstance(key, InTransit)
        self.saved -= key.num_bytes
        self.earlier -= key.num_bytes
        self._free(key, key.num_bytes)

    def _formula(self, operation: Operation, incoming: GradientBuffer) -> tuple[Made, Products]:
        """What it reads comes back first."""
        for away in operation.handed:
            if away is not None and away not in self.present:
                self._come_back(InTransit(away.num_bytes), away.num_bytes)
        found = super()._formula(operation, incoming)
        if operation.kind in ATTENTION_KERNELS and len(operation.inputs) > 2:
            value = operation.inputs[2]
            if any(
                away and away.is_turned and away.storage is value.storage
                for away in operation.handed
            ):
                self.across.update(made for tensor, made in found[0] if tensor is value)
        if not self.rules.in_flight:
            for key in reversed(self.back):
                self._go(key)
            self.back.clear()
        return found

    def _end_formula(self, operation: Operation) -> None:
        """What came back for earlier formulas goes when a later one that needs such has run."""
        if not self.rules.in_flight:
            return
        if not self.back and not any(operation.handed):
            return
        for key in (*self.waiting, *self.held):
            self._go(key)
        self.waiting, self.held = [], []
        for key in self.back:
            if isinstance(key, Storage) and self.saves[key] > 1:
                self._unkeep(key)
            else:
                self.waiting.append(key)
        self.back.clear()
        self.present = frozenset()


class OffloadInputsWalk(InputsWalk, OffloadBackwardWalk):
    """The same for the gradient of a pipeline's stage's input alone."""


class OffloadWeightsWalk(WeightsWalk, OffloadBackwardWalk):
    """The same for those of its weights."""


_OFFLOADED: Mapping[type[BackwardWalk], type[OffloadBackwardWalk]] = {
    BackwardWalk: OffloadBackwardWalk,
    InputsWalk: OffloadInputsWalk,
    WeightsWalk: OffloadWeightsWalk,
}
"""What walks of each kind are where something goes to CPU RAM."""
