"""Stage 3: parameters are sharded too (runtime/zero/stage3.py).

Each parameter is cut into equal shards, one element of padding at most. Held: the shards, fp32
master weights and states of them, a gradient for each shard, and one reduce bucket, all allocated
once. A full bucket is reduce-scattered through a copy in which the shards of each rank stand
together (``comm/coalesced_collectives.py``), but for a single gradient that divides evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memplan.graph.tape import Segment
from memplan.memory.deepspeed.coordinator import Coordinator, FetchSettings
from memplan.memory.deepspeed.modules import Act, SegmentScript
from memplan.memory.deepspeed.partition import shard_numel
from memplan.memory.deepspeed.peak import Peak
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
    element_bytes: int
    """Of a gradient as it is reduced."""
    cast_bytes: int
    """Of an element of a reduced shard that is cast for accumulation; 0 without a cast."""
    offloads: bool
    """Shards' gradients go to the CPU."""


class StepReplay:
    """Forward and backward of one micro-step, with the coordinator and the bucket."""

    def __init__(
        self,
        *,
        passes: StepPasses,
        timeline: BackwardTimeline,
        segments: Sequence[Segment],
        scripts: Sequence[SegmentScript],
        numels: list[int],
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
                [_numbers(module.weights, copy) for module in script.modules]
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
        self.large_bytes = 0
        """A gradient larger than the bucket, in its own memory until the next reduction."""

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

    def forward(self) -> Peak:
        """The forward pass."""
        peak = Peak()
        coordinator = self.coordinator
        for stage in self.passes.forward:
            if not self.gathers:
                for height in stage.heights():
                    peak.offer(height.total_bytes, height=height)
                continue
            script = self.scripts[stage.segment.index]
            level = stage.start.total_bytes
            best = peak.total_bytes
            for copy, members in enumerate(self.members[stage.segment.index]):
                now = level
                for act, operand in script.forward:
                    if act is Act.LEVEL:
                        now = level + operand
                        gathered = coordinator.gathered_bytes
                    elif act is Act.FETCH:
                        gathered = coordinator.enter()
                    else:
                        coordinator.release(members[operand])
                        continue
                    if now + gathered > best:
                        best = now + gathered
                        height = stage.start.plus(
                            Level(saved_bytes=now - stage.start.total_bytes), loss=stage.loss
                        )
                        peak.offer(now, gathered=gathered, height=height)
                level += stage.later_bytes if copy else stage.first_bytes
        return peak

    # -- backward --------------------------------------------------------------------------------

    def backward(self) -> Peak:
        """The backward pass, after ``forward``."""
        peak = Peak()
        after = self.passes.after_forward
        peak.offer(after.total_bytes, gathered=self.coordinator.gathered_bytes, height=after)
        done: dict[int, int] = {}
        position = 0
        moments = self.timeline.moments
        for stage in self.passes.backward:
            script = self.scripts[stage.segment.index]
            count = len(stage.intervals)
            for copy in _copies(stage, done):
                members = self.members[stage.segment.index][copy]
                self._back(stage, script, members, moments[position : position + count], peak)
                position += count
        last = moments[-1]
        self._reduce(last, 0, peak)
        return peak

    def _back(
        self,
        stage: BackwardPass,
        script: SegmentScript,
        members: Sequence[Sequence[int]],
        moments: Sequence[Moment],
        peak: Peak,
    ) -> None:
        if not self.gathers:
            for moment in moments:
                self._pass(moment, peak)
            return
        coordinator = self.coordinator
        start = self._start(stage, moments[0])
        now = moments[0]
        level = start
        for act, operand in script.backward:
            if act is Act.INTERVAL:
                now = moments[operand]
                self._pass(now, peak)
                level = now.end_bytes + now.waiting_bytes
            elif act is Act.FETCH:
                self._offer(peak, now, level, coordinator.enter())
            elif act is Act.LEVEL:
                level = start + operand
                self._offer(peak, now, level, coordinator.gathered_bytes)
            else:
                coordinator.release(members[operand])

    def _start(self, stage: BackwardPass, first: Moment) -> int:
        """The level at which a repetition begins [bytes]."""
        total = stage.start.total_bytes + first.repetition * stage.change.total_bytes
        return total + first.waiting_bytes

    def _offer(self, peak: Peak, moment: Moment, level: int, gathered: int) -> None:
        if level + gathered + self.large_bytes > peak.total_bytes:
            height = self.timeline.start(moment)
            rest = level - height.total_bytes - moment.waiting_bytes
            inside = height.plus(Level(saved_bytes=rest), loss=False)
            peak.offer(
                level - moment.waiting_bytes,
                gradients=self.large_bytes + moment.waiting_bytes,
                gathered=gathered,
                height=inside,
            )

    def _pass(self, moment: Moment, peak: Peak) -> None:
        peak.offer(
            moment.peak_bytes,
            gradients=self.large_bytes + moment.waiting_bytes,
            gathered=self.coordinator.gathered_bytes,
            moment=moment,
        )
        if moment.weight < 0:
            return
        numel, limit = self.numels[moment.weight], self.scattering.bucket_numel
        if self.filled and self.filled + numel > limit:
            self._reduce(moment, moment.gradient_bytes, peak)
        if numel > limit:
            self.large_bytes = moment.gradient_bytes
        self.waiting.append(moment.weight)
        self.filled += numel

    def _reduce(self, moment: Moment, arriving_bytes: int, peak: Peak) -> None:
        """Reduce-scatter what waits; ``arriving_bytes`` is the gradient that did not fit."""
        if not self.waiting:
            return
        flat, extra = reduction_bytes(
            self.scattering, [self.numels[weight] for weight in self.waiting]
        )
        peak.offer(
            moment.end_bytes,
            gradients=self.large_bytes + arriving_bytes + moment.waiting_bytes,
            buckets=flat,
            temporaries=extra,
            gathered=self.coordinator.gathered_bytes,
            moment=moment,
            at_end=True,
        )
        self.large_bytes = 0
        self.waiting = []
        self.filled = 0


def reduction_bytes(settings: ScatterSettings, numels: Sequence[int]) -> tuple[int, int]:
    """Copies that one reduction makes: the flat one, and those of this rank's shards [bytes]."""
    ranks = settings.num_ranks
    shards = [shard_numel(numel, ranks) for numel in numels]
    flat = sum(shards) * ranks * settings.element_bytes
    if len(numels) == 1 and not numels[0] % ranks:
        flat = 0
    extra = sum(shards) * settings.cast_bytes
    if settings.offloads:
        largest = max(shards)
        extra += largest * settings.element_bytes
        extra += min(largest, NORM_CHUNK) * NORM_BYTES
    return flat, extra


def _numbers(weights: Sequence[tuple[int, int]], copy: int) -> list[int]:
    """A module's parameters in one repetition, in the order of the model's."""
    return sorted([first + stride * copy for first, stride in weights])


def _copies(stage: BackwardPass, done: dict[int, int]) -> range:
    """The repetitions that a ``BackwardPass`` runs, the last layer first."""
    before = done.get(stage.segment.index, 0)
    done[stage.segment.index] = before + stage.repeats
    first = stage.segment.repeat - 1 - before
    return range(first, first - stage.repeats, -1)
