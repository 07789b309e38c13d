"""Memory against speed: every setup of a plan, and the line of those that none beats in both."""

from typing import TYPE_CHECKING

from memplan.report.estimates.changes import setup_label
from memplan.report.pictures.canvas import LINE, Canvas, Dot, Shape, Stroke, Words, round_ticks
from memplan.report.pictures.picture import Picture
from memplan.search.planning.order import EQUAL_SPEED
from memplan.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memplan.search.planning.goal import Plan, PlannedSetup
    from memplan.training.setup import TrainingSetup

WIDTH, HEIGHT = 720, 360
LEFT, TOP, RIGHT, BOTTOM = 92, 60, 24, 62
MARGIN = 1.08
"""The axes end so far beyond the largest figure."""
CHART_WIDTH, CHART_HEIGHT = 60, 14


def front_picture(plan: "Plan") -> Picture:
    """The drawing of a plan whose setups have times; what has none is left out."""
    shown = timed_setups(plan)
    on_front = fronted(plan)
    told = "; ".join(
        f"{_label(each, plan)}: {needed_gib(each):,.1f} GiB, {_speed(each):,.0f} tokens/s"
        for each in plan.front
    )
    rows = tuple(
        (
            str(each.setup.num_gpus), whole_way(each, plan), f"{needed_gib(each):,.1f}", f"{_speed(each):,.0f}",
            _money(plan, each), "*" if each.setup in on_front else "",
        )
        for each in shown
    )  # fmt: skip
    return Picture(
        title=front_title(plan),
        words=told or "no setup's time is known",
        canvas=_drawn(plan, shown),
        head=("GPUs", "setup", "GiB needed", "tokens/s", "cost", "none beats it"),
        rows=rows,
        chart=tuple(_chart(plan, shown)),
    )


def timed_setups(plan: "Plan") -> "Sequence[PlannedSetup]":
    """Those whose time is known, the best first."""
    found = {each.setup: each for each in (*plan.setups, *plan.front) if each.time is not None}
    return list(found.values())


def fronted(plan: "Plan") -> "set[TrainingSetup]":
    """The setups on the front of memory and time."""
    return {each.setup for each in plan.front}


def front_title(plan: "Plan") -> str:
    """Of the drawing and its page."""
    return f"{plan.some.model.name} on {plan.gpu.short_name}: memory against time"


def needed_gib(each: "PlannedSetup") -> float:
    """What it needs of a card at the most [GiB]."""
    return each.estimate.total_bytes.high / GIB


def whole_way(each: "PlannedSetup", plan: "Plan") -> str:
    """How it trains."""
    from memplan.report.plans.answer import training_parts

    setup = each.setup
    parts = (setup_label(setup), *training_parts(each, plan))
    return f"{', '.join(parts)}, micro-batch {setup.micro_batch_size}"


def _speed(each: "PlannedSetup") -> float:
    assert each.time is not None
    return each.time.tokens_per_s


def _money(plan: "Plan", each: "PlannedSetup") -> str:
    """What the run costs, where its length and a price are known."""
    if plan.times is None or plan.times.prices is None:
        return ""
    from memplan.report.estimates.times import timed

    run = timed(each.estimate, plan.times).run
    return f"{run.cost:,.0f}" if run is not None and run.cost is not None else ""


def _label(each: "PlannedSetup", plan: "Plan") -> str:
    return f"{each.setup.num_gpus} x {whole_way(each, plan)}"


def _drawn(plan: "Plan", shown: "Sequence[PlannedSetup]") -> Canvas:
    most_gib = MARGIN * max(map(needed_gib, shown), default=1.0)
    most_speed = MARGIN * max(map(_speed, shown), default=1.0)

    def place(each: "PlannedSetup") -> tuple[float, float]:
        x = LEFT + WIDTH * needed_gib(each) / most_gib
        return x, TOP + HEIGHT * (1 - _speed(each) / most_speed)

    shapes: list[Shape] = [Words(x=LEFT - 80, y=20, text=front_title(plan), is_bold=True)]
    shapes += _axes(most_gib, most_speed)
    if len(plan.front) > 1:
        shapes.append(Stroke(points=tuple(map(place, plan.front)), colour="long"))
    on_front = fronted(plan)
    for each in shown:
        x, y = place(each)
        told = f"{_label(each, plan)}: {needed_gib(each):,.1f} GiB, {_speed(each):,.0f} tokens/s"
        shapes.append(Dot(x=x, y=y, fill="long" if each.setup in on_front else "short", words=told))
    shapes += _labels(plan, place)
    return Canvas(width=LEFT + WIDTH + RIGHT, height=TOP + HEIGHT + BOTTOM, shapes=tuple(shapes))


def _axes(most_gib: float, most_speed: float) -> list[Shape]:
    shapes: list[Shape] = []
    for tick in round_ticks(most_speed):
        y = TOP + HEIGHT * (1 - tick / most_speed)
        shapes += [
            Stroke(points=((LEFT, y), (LEFT + WIDTH, y)), colour="edge"),
            Words(x=LEFT - 8, y=y + 4, text=f"{tick:,g}", anchor="end"),
        ]
    for tick in round_ticks(most_gib):
        x = LEFT + WIDTH * tick / most_gib
        shapes += [
            Stroke(points=((x, TOP), (x, TOP + HEIGHT)), colour="edge"),
            Words(x=x, y=TOP + HEIGHT + 18, text=f"{tick:,g}", anchor="middle"),
        ]
    below = (
        "GiB needed of a GPU; on the line: less memory than any that is as fast, within "
        f"{EQUAL_SPEED:.0%}"
    )
    return [
        *shapes,
        Words(x=LEFT - 80, y=TOP - 16, text="tokens/s"),
        Words(x=LEFT + WIDTH / 2, y=TOP + HEIGHT + 38, text=below, anchor="middle"),
    ]


def _labels(plan: "Plan", place: "Callable[[PlannedSetup], tuple[float, float]]") -> list[Shape]:
    """What lies on the line, from the top downwards, none on another."""
    shapes: list[Shape] = []
    above = 0.0
    for each in plan.front:
        x, y = place(each)
        above = max(y - 8, above + LINE)
        is_right = x > LEFT + WIDTH / 2
        shapes.append(
            Words(
                x=x - 10 if is_right else x + 10,
                y=above,
                text=_label(each, plan),
                anchor="end" if is_right else "start",
            )
        )
    return shapes


def _chart(plan: "Plan", shown: "Sequence[PlannedSetup]") -> list[str]:
    """Dots of characters, numbered on the line."""
    on_front = fronted(plan)
    if not shown:
        return ["no setup's time is known"]
    cells = [[" "] * CHART_WIDTH for _ in range(CHART_HEIGHT)]
    most_gib, most_speed = max(map(needed_gib, shown)), max(map(_speed, shown))
    told: list[str] = []
    for each in sorted(shown, key=lambda each: each.setup in on_front):
        x = round((CHART_WIDTH - 1) * needed_gib(each) / most_gib)
        y = round((CHART_HEIGHT - 1) * (1 - _speed(each) / most_speed))
        mark = "·"
        if each.setup in on_front:
            mark = str((len(told) + 1) % 10)
            told.append(
                f"{mark} {_label(each, plan)}: {needed_gib(each):,.1f} GiB, {_speed(each):,.0f} tokens/s"
            )
        cells[y][x] = mark
    lines = []
    for number, row in enumerate(cells):
        left = f"{most_speed:>9,.0f} ┤" if number == 0 else " " * 10 + "│"
        lines.append((left + "".join(row)).rstrip())
    lines.append(" " * 10 + "┼" + "─" * CHART_WIDTH)
    lines.append(
        " " * 11 + "tokens/s against GiB needed, at the most " + f"{most_gib:,.0f}".rjust(19)
    )
    return [*lines, *told]
