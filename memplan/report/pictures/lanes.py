"""A training step as lanes over time, the critical path marked below them; its parts as a table, which sum to the step."""

from collections.abc import Iterator, Sequence

from memplan.compute.lanes import Interval, Lane
from memplan.estimator import Estimate
from memplan.estimator.time.step_time import StepTime
from memplan.memory.account import ComponentKind
from memplan.report.estimates.times import seconds_text
from memplan.report.lanes import is_backward, lane_lines, path_line
from memplan.report.pictures.canvas import LINE, Canvas, Shape, Stroke, Words, box, legend
from memplan.report.pictures.picture import Picture

WIDTH, LEFT, TOP = 880, 116, 16
TALL, APART = 26, 10
"""A lane, and between two of them."""
CHART_WIDTH = 62
FORWARD, BACKWARD = "forward and update", "backward"
COLOURS = {
    FORWARD: "long", BACKWARD: "medium", Lane.LINK.value: "added", Lane.HOST.value: ComponentKind.GATHERED_PARAMETERS.label,
    Lane.ASKED.value: "red", Lane.STAGES.value: "short",
}  # fmt: skip


def lanes_picture(found: Estimate, time: StepTime) -> Picture:
    """What is busy when, and what the step waits for."""
    longest = time.shares[0]
    rows = [
        (each.words, seconds_text(each.seconds), f"{each.seconds / time.expected_s:.1%}")
        for each in time.shares
    ]
    return Picture(
        title=f"{found.model.name}: the time of a step",
        words=f"Expected {seconds_text(time.expected_s)}, {seconds_text(time.low_s)} to {seconds_text(time.high_s)}; most of it {longest.words}",
        canvas=_drawn(time),
        head=("part of the step", "takes", "of it"),
        rows=(*rows, ("all", seconds_text(sum(each.seconds for each in time.shares)), "100.0%")),
        chart=(*lane_lines(time.intervals, CHART_WIDTH), path_line(time.path, CHART_WIDTH)),
    )


def _drawn(time: StepTime) -> Canvas:
    end_s = max((each.stop_s for each in (*time.intervals, *time.path)), default=0.0) or 1.0
    lanes = [lane for lane in Lane if any(each.lane is lane for each in time.intervals)]
    shapes: list[Shape] = []
    y = float(TOP)
    for lane in lanes:
        own = [each for each in time.intervals if each.lane is lane]
        shapes += _row(lane.value, own, y, end_s)
        y += TALL + APART
    shapes.append(
        Stroke(
            points=((LEFT, y - APART / 2), (LEFT + WIDTH, y - APART / 2)),
            colour="soft",
            dashed=True,
        )
    )
    shapes += _row("critical path", time.path, y + APART / 2, end_s)
    y += TALL + APART / 2 + LINE
    shapes += [
        Words(x=LEFT, y=y, text="0 s"),
        Words(x=LEFT + WIDTH, y=y, text=seconds_text(end_s), anchor="end"),
    ]
    used = dict.fromkeys(_kind(each) for each in (*time.intervals, *time.path))
    below, y = legend(
        [(COLOURS[each], each) for each in used], x=LEFT, y=y + 1.5 * LINE, width=WIDTH
    )
    note = "Micro-batches that are alike are drawn once."
    shapes += [*below, Words(x=LEFT, y=y + LINE, text=note)]
    return Canvas(width=LEFT + WIDTH + 16, height=y + 2 * LINE, shapes=tuple(shapes))


def _row(name: str, intervals: Sequence[Interval], y: float, end_s: float) -> Iterator[Shape]:
    """One lane; where exchanges leave it idle between them it is as much lower."""
    yield Words(x=LEFT - 10, y=y + TALL - 8, text=name, anchor="end")
    for each in intervals:
        length_s = each.stop_s - each.start_s
        tall = TALL * min(1.0, each.busy_s / length_s) if length_s else TALL
        words = f"{each.words or name}: {seconds_text(each.busy_s)}"
        x, wide = WIDTH * each.start_s / end_s, WIDTH * length_s / end_s
        yield box(LEFT + x, y + TALL - tall, wide, tall, COLOURS[_kind(each)], words)


def _kind(each: Interval) -> str:
    if each.lane is not Lane.COMPUTE:
        return each.lane.value
    return BACKWARD if is_backward(each) else FORWARD
