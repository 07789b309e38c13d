"""The peaks of a step without an engine, straight from the passes: what tests of walks compare."""

from dataclasses import dataclass

from memplan.memory.passes import Height, StepPasses
from memplan.memory.walks.walk import Level


@dataclass(frozen=True, slots=True)
class PlainStep:
    """The peaks of a step in which every gradient stays where autograd put it."""

    forward_peak: Height
    after_forward: Height
    backward_peak: Height
    after_backward: Height


def plain_step(passes: StepPasses) -> PlainStep:
    """Lay plain gradients over the passes: the account of one GPU without an engine."""
    forward_peak = max(
        (height for each in passes.forward for height in each.heights()),
        key=lambda height: height.total_bytes,
    )
    peak = passes.after_forward
    gradients = 0
    for each in passes.backward:
        for repetition in {0, each.repeats - 1}:
            start = each.start_of(repetition)
            finished = gradients + repetition * each.gradient_bytes
            for interval in each.intervals:
                height = start.total_bytes + finished + interval.peak.total_bytes
                if height > peak.total_bytes:
                    peak = _with(start.plus(interval.peak, loss=each.loss), finished)
                finished += interval.gradient_bytes
        gradients += each.repeats * each.gradient_bytes
    return PlainStep(
        forward_peak=forward_peak,
        after_forward=passes.after_forward,
        backward_peak=peak,
        after_backward=_with(Height(), gradients),
    )


def _with(height: Height, gradients_bytes: int) -> Height:
    return height.plus(Level(other_bytes=gradients_bytes), loss=False)
