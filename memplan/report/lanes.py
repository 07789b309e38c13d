"""A step drawn as lanes over time: computing, communication, the host; and what each stage takes."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memplan.compute.lanes import Interval, Lane
from memplan.estimator.run_cost import TimeQuestion
from memplan.estimator.step_time import step_time
from memplan.report.times import seconds_text, time_lines

if TYPE_CHECKING:
    from memplan.estimator import Estimate
    from memplan.report.console import Console

LABEL_WIDTH = max(len(lane.value) for lane in Lane) + 2
MARKS = {Lane.COMPUTE: "█", Lane.LINK: "▒", Lane.HOST: "░"}
BACKWARD_MARK = "▓"
LEAST_WIDTH = 20
TOLERANCE = 1e-6
MOST_STAGES = 12
"""That are listed; the longest."""


def print_lanes(console: "Console", answer: "Estimate") -> None:
    """Print how long a step takes, its lanes, and its stages."""
    from memplan.report.console import Text

    time = step_time(answer)
    for line in time_lines(answer, TimeQuestion()):
        console.print(Text(line), soft_wrap=True)
    console.print()
    width = max(LEAST_WIDTH, console.width - LABEL_WIDTH - 2)
    for line in lane_lines(time.intervals, width):
        console.print(Text(line), soft_wrap=True)
    console.print()
    for line in stage_lines(time.intervals):
        console.print(Text(line), soft_wrap=True)
    note = (
        "█ computing forward and the update, ▓ backward, ▒ between GPUs, ░ to and from the host. Micro-"
        "batches that are alike are drawn once."
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
            mark = BACKWARD_MARK if _is_backward(each) else MARKS[lane]
            share = min(1.0, each.busy_s / (each.stop_s - each.start_s))
            for place in range(first, min(last, width)):
                if int((place - first + 1) * share + TOLERANCE) > int(
                    (place - first) * share + TOLERANCE
                ):
                    cells[place] = mark
        yield (f"{lane.value:<{LABEL_WIDTH}}" + "".join(cells)).rstrip()
    stop = seconds_text(end)
    yield " " * LABEL_WIDTH + "0 s" + stop.rjust(width - 3)


def _is_backward(each: Interval) -> bool:
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
