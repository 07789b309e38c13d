"""Stage 3: parameters are sharded too (runtime/zero/stage3.py).

Each parameter is cut into equal shards, one element of padding at most. Held: the shards, fp32
master weights and states of them, a gradient for each shard, and one reduce bucket, all allocated
once. The bucket has the dtype in which gradients travel between the ranks. A full one is
reduce-scattered through a copy in which the shards of each rank stand together
(``comm/coalesced_collectives.py``), but for a single gradient that divides evenly; gradients that lie
outside it, larger than it or for want of one (``contiguous_gradients``), are cast first where they
travel in another dtype. Without ``reduce_scatter`` the bucket is summed in place and then multiplied
into a copy. This rank's shards are cast to the dtype in which they accumulate.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from memplan.fast_dataclass import dataclass
from memplan.graph.segments import Segment
from memplan.memory.deepspeed.coordinator import Coordinator, FetchSettings
from memplan.memory.deepspeed.job import MASTER_BYTES
from memplan.memory.deepspeed.modules import Act, SegmentScript
from memplan.memory.deepspeed.partition import shard_numel
from memplan.memory.deepspeed.peak import Peak
from memplan.memory.deepspeed.recording import upper_hull
from memplan.memory.deepspeed.reduction import NORM_BYTES
from memplan.memory.deepspeed.timeline import BackwardTimeline, Moment
from memplan.memory.step import BackwardPass, StepPasses
from memplan.memory.walk import Level

NORM_CHUNK = 250_000_000
"""Elements whose norm is taken at once with offload (``_constant_buffered_norm2``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScatterSettings:
    """How stage 3 reduces gradients."""

    num_ranks: int
    bucket_numel: int
    weight_bytes: int
    """Of a gradient as autograd makes it."""
    communication_bytes: int
    """Of a gradient in the bucket and on its way between the ranks."""
    accumulated_bytes: int
    """Of an element of a shard's gradient where it accumulates."""
    is_contiguous: bool
    """There is a bucket: gradients move into it."""
    scatters: bool
    """The bucket is reduce-scattered, not summed as a whole."""
    offloads: bool
    """Shards' gradients go to the CPU."""
    swaps: bool
    """They go on to NVMe, in fp32, a bucket at a time."""


class Spot(IntEnum):
    """Where an offer's level comes from; a number from 0 up is an ``Act.LEVEL`` of the script."""

    PEAK = -1
    """The moment's peak."""
    END = -2
    """Its end, with the gradient that ends it."""
    START = -3
    """The beginning of the repetition."""


class ForwardOffer(NamedTuple):
    """What is gathered at one place of the forward pass."""

    stage: int
    """Number of its ``ForwardPass``."""
    copy: int
    """Number of the repetition."""
    act: int
    """The script's ``Act.LEVEL`` that it stands on; -1: where the repetition begins."""
    gathered: int


class BackwardOffer(NamedTuple):
    """What the engine holds at one place of the backward pass."""

    number: int
    """Of the moment."""
    spot: int
    gradients: int
    buckets: int
    temporaries: int
    gathered: int

    @property
    def engine_bytes(self) -> int:
        """All of it."""
        return self.gradients + self.buckets + self.temporaries + self.gathered


@dataclass(frozen=True, slots=True)
class StepOffers:
    """The offers of a replay that can be the highest, in the order they are made."""

    forward: tuple[ForwardOffer, ...]
    turn_gathered: int
    """What is gathered between forward and backward."""
    backward: tuple[BackwardOffer, ...]


class StepReplay:
    """Forward and backward of one micro-step, with the coordinator and the bucket.

    It notes what the engine holds and where; ``forward_peak`` and ``backward_peak`` weigh that
    against the levels of a walk.
    """

    def __init__(
        self,
        *,
        passes: StepPasses,
        timeline: BackwardTimeline,
        segments: Sequence[Segment],
        scripts: Sequence[SegmentScript],
        numels: Sequence[int],
        fetching: FetchSettings,
        scattering: ScatterSettings,
    ) -> None:
        self.passes = passes
        self.timeline = timeline
        self.scripts = scripts
        self.numels = numels
        self.scattering = scattering
        self.gathers = fetching.gathers
        self.members = [
            [
                [module_numbers(module.weights, copy) for module in script.modules]
                for copy in range(segment.repeat)
            ]
            for script, segment in zip(scripts, segments, strict=True)
        ]
        """For each segment and repetition, the parameters of each module."""
        trace = self._trace() if self.gathers else []
        self.coordinator = Coordinator(fetching, numels, trace)
        self.filled = 0
        """Elements in the reduce bucket."""
        self.waiting: list[int] = []
        """Their parameters."""
        self.outside_bytes = 0
        """Gradients that wait in their own memory: larger than the bucket, or without one."""
        self.outside_numel = 0
        """Their elements."""
        self.waiting_bytes = 0
        """Those of them that the next reduction takes."""
        self.delayed = {
            place
            for script, segment in zip(scripts, segments, strict=True)
            for module in script.modules
            for copy in range(segment.repeat)
            for place in module_numbers(module.delayed, copy)
        }
        """Parameters whose gradients wait for others of their module."""
        self.arrived: dict[int, int] = {}
        """The moments of those that do, by parameter."""
        self.offers: list[BackwardOffer] = []

    def run(self) -> StepOffers:
        """Forward, then backward."""
        forward = self._forward() if self.gathers else []
        turn = self.coordinator.gathered_bytes
        self._backward()
        return StepOffers(
            forward=_forward_candidates(forward),
            turn_gathered=turn,
            backward=_backward_candidates(self.offers, self.timeline.moments),
        )

    # -- the trace -------------------------------------------------------------------------------

    def _trace(self) -> list[list[int]]:
        """The parameters that each step needs, in the order that the hooks fire."""
        trace: list[list[int]] = []
        for stage in self.passes.forward:
            script = self.scripts[stage.segment.index]
            needed = [module for act, module in script.forward if act is Act.FETCH]
            for members in self.members[stage.segment.index]:
                trace += [members[module] for module in needed]
        done: dict[int, int] = {}
        for back in self.passes.backward:
            script = self.scripts[back.segment.index]
            needed = [module for act, module in script.backward if act is Act.FETCH]
            for copy in _copies(back, done):
                members = self.members[back.segment.index][copy]
                trace += [members[module] for module in needed]
        return trace

    # -- forward ---------------------------------------------------------------------------------

    def _forward(self) -> list[ForwardOffer]:
        offers = []
        coordinator = self.coordinator
        for number, stage in enumerate(self.passes.forward):
            script = self.scripts[stage.segment.index]
            for copy, members in enumerate(self.members[stage.segment.index]):
                level = -1
                for position, (act, operand) in enumerate(script.forward):
                    if act is Act.LEVEL:
                        level = position
                        gathered = coordinator.gathered_bytes
                    elif act is Act.FETCH:
                        gathered = coordinator.enter()
                    else:
                        coordinator.release(members[operand])
                        continue
                    offers.append(ForwardOffer(number, copy, level, gathered))
        return offers

    # -- backward --------------------------------------------------------------------------------

    def _backward(self) -> None:
        done: dict[int, int] = {}
        position = 0
        for stage in self.passes.backward:
            script = self.scripts[stage.segment.index]
            count = len(stage.intervals)
            for copy in _copies(stage, done):
                members = self.members[stage.segment.index][copy]
                self._back(script, members, range(position, position + count))
                position += count
        self._reduce(len(self.timeline.moments) - 1, 0)

    def _back(
        self, script: SegmentScript, members: Sequence[Sequence[int]], indices: range
    ) -> None:
        coordinator = self.coordinator
        now = indices[0]
        spot: int = Spot.START
        for position, (act, operand) in enumerate(script.backward):
            if act is Act.PEAK:
                now = indices[operand]
                self._offer(now, Spot.PEAK, coordinator.gathered_bytes)
            elif act is Act.GRADIENT:
                self._finish(indices[operand])
                now = min(indices[operand] + 1, indices[-1])
            elif act is Act.HAND_OVER:
                self._hand_over()
            elif not self.gathers:
                continue
            elif act is Act.FETCH:
                self._offer(now, spot, coordinator.enter())
            elif act is Act.RELEASE:
                coordinator.release(members[operand])
            else:
                spot = position
                self._offer(now, spot, coordinator.gathered_bytes)

    def _offer(self, now: int, spot: int, gathered: int) -> None:
        held = self.outside_bytes + self.timeline.moments[now].waiting_bytes
        self.offers.append(BackwardOffer(now, spot, held, 0, 0, gathered))

    def _finish(self, index: int) -> None:
        """A moment is over, maybe with a gradient."""
        moment = self.timeline.moments[index]
        if moment.weight in self.delayed:
            self.arrived[moment.weight] = index
            self.outside_bytes += moment.gradient_bytes
        elif moment.weight >= 0:
            self._take(index, index)

    def _hand_over(self) -> None:
        """All gradients of a module that is taken as a whole, in the order of its parameters."""
        now = max(self.arrived.values(), default=0)
        for _, index in sorted(self.arrived.items()):
            self.outside_bytes -= self.timeline.moments[index].gradient_bytes
            self._take(index, now)
        self.arrived = {}

    def _take(self, index: int, now: int) -> None:
        """Put the gradient that ended a moment in the bucket."""
        moment = self.timeline.moments[index]
        numel, limit = self.numels[moment.weight], self.scattering.bucket_numel
        if self.filled and self.filled + numel > limit:
            self._reduce(now, moment.gradient_bytes)
        if not self.scattering.is_contiguous or numel > limit:
            self.outside_bytes += moment.gradient_bytes
            self.waiting_bytes += moment.gradient_bytes
            self.outside_numel += numel
        self.waiting.append(moment.weight)
        self.filled += numel

    def _reduce(self, index: int, arriving_bytes: int) -> None:
        """Reduce-scatter what waits; ``arriving_bytes`` is the gradient that did not fit."""
        if not self.waiting:
            return
        numels = [self.numels[weight] for weight in self.waiting]
        copies = reduction_copies(self.scattering, numels, outside_numel=self.outside_numel)
        waiting = self.timeline.moments[index].waiting_bytes
        held = self.outside_bytes + arriving_bytes + waiting
        gathered = self.coordinator.gathered_bytes
        for flat, extra in copies:
            self.offers.append(BackwardOffer(index, Spot.END, held, flat, extra, gathered))
        self.outside_bytes -= self.waiting_bytes
        self.waiting_bytes = self.outside_numel = 0
        self.waiting = []
        self.filled = 0


def _forward_candidates(offers: Sequence[ForwardOffer]) -> tuple[ForwardOffer, ...]:
    """The offers that can be the highest.

    From the second repetition on the level rises by the same step.
    """
    groups: dict[tuple[int, int, bool], list[tuple[int, int, int]]] = {}
    for order, offer in enumerate(offers):
        place = (offer.stage, offer.act, offer.copy > 0)
        groups.setdefault(place, []).append((offer.copy, offer.gathered, order))
    kept = sorted(order for points in groups.values() for _, _, order in upper_hull(points))
    return tuple(offers[order] for order in kept)


def _backward_candidates(
    offers: Sequence[BackwardOffer], moments: Sequence[Moment]
) -> tuple[BackwardOffer, ...]:
    groups: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for order, offer in enumerate(offers):
        moment = moments[offer.number]
        inside = offer.spot in (Spot.PEAK, Spot.END)
        place = (moment.place, offer.spot, moment.interval if inside else 0)
        point = (moment.repetition, offer.engine_bytes, order)
        groups.setdefault(place, []).append(point)
    kept = sorted(order for points in groups.values() for _, _, order in upper_hull(points))
    return tuple(offers[order] for order in kept)


def forward_peak(
    passes: StepPasses, scripts: Sequence[SegmentScript], offers: StepOffers, *, gathers: bool
) -> Peak:
    """The forward pass at its highest."""
    peak = Peak()
    if not gathers:
        for stage in passes.forward:
            for height in stage.heights():
                peak.offer(height.total_bytes, height=height)
        return peak
    best = -1
    chosen: tuple[ForwardOffer, int] | None = None
    starts = [stage.start.total_bytes for stage in passes.forward]
    for offer in offers.forward:
        number, copy, act, gathered = offer
        stage = passes.forward[number]
        level = starts[number]
        if copy:
            level += stage.first_bytes + (copy - 1) * stage.later_bytes
        if act >= 0:
            level += scripts[stage.segment.index].forward[act][1]
        if level + gathered > best:
            best, chosen = level + gathered, (offer, level)
    if chosen is not None:
        offer, level = chosen
        stage = passes.forward[offer.stage]
        inside = Level(saved_bytes=level - starts[offer.stage])
        height = stage.start.plus(inside, loss=stage.loss)
        peak.offer(level, gathered=offer.gathered, height=height)
    return peak


def backward_peak(
    passes: StepPasses,
    timeline: BackwardTimeline,
    scripts: Sequence[SegmentScript],
    offers: StepOffers,
) -> Peak:
    """The backward pass at its highest."""
    peak = Peak()
    after = passes.after_forward
    peak.offer(after.total_bytes, gathered=offers.turn_gathered, height=after)
    best, chosen, level = peak.total_bytes, None, 0
    runs = [
        (run.start.total_bytes, run.change.total_bytes, scripts[run.segment.index].backward)
        for run in passes.backward
    ]
    for offer in offers.backward:
        moment = timeline.moments[offer[0]]
        spot = offer[1]
        if spot == Spot.PEAK:
            base = moment.peak_bytes
        elif spot == Spot.END:
            base = moment.end_bytes
        else:
            start, change, acts = runs[moment.place]
            base = start + moment.repetition * change
            if spot >= 0:
                base += acts[spot][1]
        total = base + offer[2] + offer[3] + offer[4] + offer[5]
        if total > best:
            best, chosen, level = total, offer, base
    if chosen is not None:
        _take(peak, timeline, chosen, level)
    return peak


def _take(peak: Peak, timeline: BackwardTimeline, offer: BackwardOffer, level: int) -> None:
    """Make an offer the peak, with what the model itself holds there."""
    moment = timeline.moments[offer.number]
    if offer.spot in (Spot.PEAK, Spot.END):
        peak.offer(
            level,
            gradients=offer.gradients,
            buckets=offer.buckets,
            temporaries=offer.temporaries,
            gathered=offer.gathered,
            moment=moment,
            at_end=offer.spot == Spot.END,
        )
        return
    height = timeline.start(moment)
    inside = height.plus(Level(saved_bytes=level - height.total_bytes), loss=False)
    peak.offer(level, gradients=offer.gradients, gathered=offer.gathered, height=inside)


def reduction_copies(
    settings: ScatterSettings, numels: Sequence[int], *, outside_numel: int
) -> list[tuple[int, int]]:
    """Copies alive at once in one reduction: of whole gradients, and of this rank's shards [bytes].

    First gradients outside the bucket are cast and all are laid out flat, while the shards that come
    back are cast; then the shards, in the flat copy or cast, go to where they accumulate.
    """
    ranks, width = settings.num_ranks, settings.communication_bytes
    shards = [shard_numel(numel, ranks) for numel in numels]
    casts = outside_numel * width if width != settings.weight_bytes else 0
    if settings.is_contiguous and not settings.scatters and not outside_numel:
        flat = sum(numels) * width if ranks > 1 else 0
        reduced = sum(numels)
    else:
        is_alone = len(numels) == 1 and not numels[0] % ranks
        flat = 0 if is_alone else sum(shards) * ranks * width
        reduced = sum(shards)
    recast = reduced * settings.accumulated_bytes if width != settings.accumulated_bytes else 0
    copies = [(casts + flat, recast)]
    if settings.offloads:
        copies.append((0 if recast else flat, recast + _offload_copies(settings, shards)))
    return copies


def _offload_copies(settings: ScatterSettings, shards: Sequence[int]) -> int:
    """A shard comes back from the buffer on the CPU, for its norm in fp64; for NVMe all of them are
    cast to fp32 before they leave."""
    largest = max(shards)
    copies = largest * settings.accumulated_bytes + min(largest, NORM_CHUNK) * NORM_BYTES
    return copies + (sum(shards) * MASTER_BYTES if settings.swaps else 0)


def module_numbers(weights: Sequence[tuple[int, int]], copy: int) -> list[int]:
    """A module's parameters in one repetition, in the order of the model's."""
    return sorted([first + stride * copy for first, stride in weights])


def _copies(stage: BackwardPass, done: dict[int, int]) -> range:
    """The repetitions that a ``BackwardPass`` runs, the last layer first."""
    before = done.get(stage.segment.index, 0)
    done[stage.segment.index] = before + stage.repeats
    first = stage.segment.repeat - 1 - before
    return range(first, first - stage.repeats, -1)
