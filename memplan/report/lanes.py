"""A step drawn as lanes over time: computing, communication, the host; and what each stage takes."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memplan.compute.lanes import Interval, Lane
from memplan.estimator.time.run_cost import TimeQuestion
from memplan.estimator.time.step_time import step_time
from memplan.report.estimates.times import seconds_text, time_lines

if TYPE_CHECKING:
    from memplan.estimator import Estimate
    from memplan.report.terminal.console import Console

LABEL_WIDTH = max(len(lane.value) for lane in Lane) + 2
MARKS = {Lane.COMPUTE: "█", Lane.LINK: "▒", Lane.HOST: "░", Lane.ASKED: "·", Lane.STAGES: "~"}
BACKWARD_MARK = "▓"
LEAST_WIDTH = 20
TOLERANCE = 1e-6
MOST_STAGES = 12
"""That are listed; the longest."""


def print_lanes(console: "Console", answer: "Estimate") -> None:
    """Print how long a step takes, its lanes, and its stages."""
    from memplan.report.terminal.console import Text

    time = step_time(answer)
    for line in time_lines(answer, TimeQuestion()):
        console.print(Text(line), soft_wrap=True)
    console.print()
    width = max(LEAST_WIDTH, console.width - LABEL_WIDTH - 2)
    for line in lane_lines(time.intervals, width):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(path_line(time.path, width)), soft_wrap=True)
    console.print()
    for line in stage_lines(time.intervals):
        console.print(Text(line), soft_wrap=True)
    note = (
        "█ computing forward and the update, ▓ backward, ▒ between GPUs, ░ to and from the host; the critical "
        "path is what the step waits for: these, · launches, ~ other stages. Micro-batches that are alike are drawn once."
    )
    console.print(Text(note, style="dim"))


def lane_lines(intervals: Sequence[Interval], width: int) -> Iterator[str]:
    """A line for each lane that is ever busy, and the scale below.

    >>> layers = Interval(Lane.COMPUTE, 0.0, 0.5, "layers", 0.5)
    >>> gathers = Interval(Lane.LINK, 0.25, 1.0, "layers", 0.25)
    >>> print("\\n".join(lane_lines([layers, gathers], 20)))
    compute        ██████████
    communication         ▒  ▒  ▒  ▒  ▒
                   0 s           1.00 s
    """
    end = max((each.stop_s for each in intervals), default=0.0)
    if not end:
        return
    for lane in Lane:
        own = [each for each in intervals if each.lane is lane]
        if not own:
            continue
        cells = [" "] * width
        for each in own:
            first = min(width - 1, int(each.start_s / end * width))
            last = max(first + 1, round(each.stop_s / end * width))
            mark = BACKWARD_MARK if is_backward(each) else MARKS[lane]
            share = min(1.0, each.busy_s / (each.stop_s - each.start_s))
            for place in range(first, min(last, width)):
                if int((place - first + 1) * share + TOLERANCE) > int(
                    (place - first) * share + TOLERANCE
                ):
                    cells[place] = mark
        yield (f"{lane.value:<{LABEL_WIDTH}}" + "".join(cells)).rstrip()
    stop = seconds_text(end)
    yield " " * LABEL_WIDTH + "0 s" + stop.rjust(width - 3)


def path_line(path: Sequence[Interval], width: int) -> str:
    """What the step waits for, each column by what most of its time is spent on.

    >>> layers = Interval(Lane.COMPUTE, 0.0, 0.5, "layers", 0.5)
    >>> late = Interval(Lane.LINK, 0.5, 1.0, "layers", 0.5)
    >>> path_line([layers, late], 10)
    'critical path  █████▒▒▒▒▒'
    """
    end = max((each.stop_s for each in path), default=0.0)
    cells = [dict[str, float]() for _ in range(width)]
    for each in path:
        mark = BACKWARD_MARK if is_backward(each) else MARKS[each.lane]
        first, last = each.start_s / end * width, each.stop_s / end * width
        for place in range(int(first), min(width, int(last) + 1)):
            own = cells[place]
            own[mark] = own.get(mark, 0.0) + min(last, place + 1) - max(first, place)
    found = [max(own, key=lambda mark: own[mark]) if own else " " for own in cells]
    return (f"{'critical path':<{LABEL_WIDTH}}" + "".join(found)).rstrip()


def is_backward(each: Interval) -> bool:
    """Whether it computes gradients."""
    return each.lane is Lane.COMPUTE and (
        each.words.endswith("backward") or each.words[:1] in ("B", "I", "W")
    )


def stage_lines(intervals: Sequence[Interval]) -> Iterator[str]:
    """What each stage keeps each lane busy for, the longest first."""
    sums: dict[tuple[Lane, str], float] = {}
    for each in intervals:
        key = each.lane, each.words or "beside the layers"
        sums[key] = sums.get(key, 0.0) + each.busy_s
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    for (lane, words), seconds in ordered[:MOST_STAGES]:
        yield f"  {seconds_text(seconds):>9}  {lane.value:<{LABEL_WIDTH}}{words}"
