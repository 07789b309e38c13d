"""The backward pass as a list of moments: each gradient of each repetition, in order.

Repetitions of a run are written out here because ZeRO's buckets do not stop at layers.
"""

from typing import NamedTuple

from memplan.fast_dataclass import dataclass
from memplan.graph.tensors import Parameter
from memplan.memory.deepspeed.partition import ModelWeights
from memplan.memory.step import BackwardPass, Height, StepPasses
from memplan.memory.walk import Interval


class Moment(NamedTuple):
    """The stretch of backward that ends with one parameter's gradient."""

    peak_bytes: int
    """The highest level in it, finished gradients left out."""
    end_bytes: int
    """The level when it ends, the gradient that ends it left out."""
    weight: int
    """Whose gradient is ready for the engine; -1: none."""
    gradient_bytes: int
    """Bytes of that gradient."""
    waiting_bytes: int
    """Gradients that autograd still adds to: weights used more than once."""
    place: int
    """Number of its ``BackwardPass``."""
    repetition: int
    interval: int


@dataclass(slots=True)
class BackwardTimeline:
    """All moments of the backward pass, and how to find what they are made of."""

    passes: StepPasses
    moments: list[Moment]

    def height(self, moment: Moment, *, at_end: bool) -> Height:
        """What a moment's level is made of."""
        stage = self.passes.backward[moment.place]
        interval = stage.intervals[moment.interval]
        level = interval.end if at_end else interval.peak
        return stage.start_of(moment.repetition).plus(level, loss=stage.loss)

    def start(self, moment: Moment) -> Height:
        """What is alive when the moment's repetition begins."""
        return self.passes.backward[moment.place].start_of(moment.repetition)


def expand_backward(passes: StepPasses, weights: ModelWeights) -> BackwardTimeline:
    """Write every repetition out."""
    uses = _count_uses(passes, weights)
    waiting: dict[int, int] = {}
    moments: list[Moment] = []
    runs: dict[int, int] = {}
    total_waiting = 0
    for place, stage in enumerate(passes.backward):
        steps = _steps(stage, weights)
        start, change = stage.start.total_bytes, stage.change.total_bytes
        done = runs.get(stage.segment.index, 0)
        runs[stage.segment.index] = done + stage.repeats
        last = stage.segment.num_copies - 1
        for repetition in range(stage.repeats):
            base = start + repetition * change
            copy = max(0, last - done - repetition)
            for number, (peak, end, first, stride, gradient) in enumerate(steps):
                held = total_waiting
                weight, size = -1, 0
                if first >= 0:
                    weight = first + stride * copy
                    uses[weight] -= 1
                    earlier = waiting.pop(weight, 0)
                    size = max(gradient, earlier)
                    total_waiting -= earlier
                    if uses[weight]:
                        waiting[weight] = size
                        total_waiting += size
                        weight, size = -1, 0
                moments.append(
                    Moment(
                        base + peak,
                        base + end,
                        weight,
                        size,
                        held,
                        place,
                        repetition,
                        number,
                    )
                )
    return BackwardTimeline(passes, moments)


def _count_uses(passes: StepPasses, weights: ModelWeights) -> list[int]:
    """How often each parameter's gradient is computed."""
    uses = [0] * len(weights.numels)
    runs: dict[int, int] = {}
    for stage in passes.backward:
        done = runs.get(stage.segment.index, 0)
        runs[stage.segment.index] = done + stage.repeats
        last = stage.segment.num_copies - 1
        for interval in stage.intervals:
            if interval.parameter is not None:
                first, stride = _locate(stage, interval.parameter, weights)
                for repetition in range(stage.repeats):
                    uses[first + stride * max(0, last - done - repetition)] += 1
    return uses


def _locate(stage: BackwardPass, parameter: Parameter, weights: ModelWeights) -> tuple[int, int]:
    """The parameter's number in the first repetition, and the step to the next one."""
    own = weights.segments[stage.segment.index]
    position = own.positions.get(parameter)
    if position is None:
        return weights.owners[parameter], 0
    return own.first + position, own.stride


def _steps(stage: BackwardPass, weights: ModelWeights) -> list[tuple[int, int, int, int, int]]:
    return [_step(stage, interval, weights) for interval in stage.intervals]


def _step(
    stage: BackwardPass, interval: Interval, weights: ModelWeights
) -> tuple[int, int, int, int, int]:
    first, stride = -1, 0
    if interval.parameter is not None:
        first, stride = _locate(stage, interval.parameter, weights)
    return (
        interval.peak.total_bytes,
        interval.end.total_bytes,
        first,
        stride,
        interval.gradient_bytes,
    )
