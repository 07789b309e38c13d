"""Memory against time as a drawing: every setup of a plan, and the line of those that none beats in both."""

from html import escape
from string import Template
from typing import TYPE_CHECKING

from memplan.estimator.run_cost import TimeQuestion
from memplan.report.blocks import Column
from memplan.report.changes import checkpointing_label, setup_label
from memplan.report.palette import DARK, LIGHT
from memplan.report.times import time_columns
from memplan.units import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.search.goal import Plan, PlannedSetup

WIDTH, HEIGHT = 720, 360
LEFT, TOP, RIGHT, BOTTOM = 92, 60, 24, 48
MARGIN = 1.08
"""The axes end so far beyond the largest figure."""
LINE = 18
"""From one label to the next."""
_COLOURS = Template("""
.front{stroke:$long}.best{fill:$long}.other{fill:$short}.words{fill:$ink;stroke:$back}.back{fill:$back}""")
STYLE = (
    ".front{fill:none;stroke-width:2}.grid{stroke:#8884}"
    ".words{font:13px system-ui,sans-serif;stroke-width:3;paint-order:stroke}"
    + _COLOURS.substitute(LIGHT)
    + "@media (prefers-color-scheme:dark){"
    + _COLOURS.substitute(DARK)
    + "}"
)
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title><style>body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;
color-scheme:light dark}td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:bottom}
.figure{text-align:right}.table{overflow-x:auto}</style></head>
<body><h1>$title</h1>$answers$drawing<div class="table"><table><thead><tr>$heads</tr></thead><tbody>$rows</tbody></table></div>
<p>On the line and marked *: what no other setup beats in both memory and time. Written by memplan $version.</p></body></html>
""")


def front_svg(plan: "Plan") -> str:
    """The drawing alone."""
    shown = _timed(plan)
    most_gib = MARGIN * max((_gib(each) for each in shown), default=1.0)
    most_speed = MARGIN * max((_speed(each) for each in shown), default=1.0)

    def place(each: "PlannedSetup") -> tuple[float, float]:
        x = LEFT + WIDTH * _gib(each) / most_gib
        return x, TOP + HEIGHT * (1 - _speed(each) / most_speed)

    parts = [_text(LEFT - 80, 20, _title(plan))]
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = LEFT + WIDTH * share, TOP + HEIGHT * (1 - share)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}h{WIDTH}M{x:.1f} {TOP}v{HEIGHT}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{most_speed * share:,.0f}", anchor="end"))
        parts.append(_text(x, TOP + HEIGHT + 18, f"{most_gib * share:,.0f}", anchor="middle"))
    parts.append(_text(LEFT - 80, TOP - 16, "tokens/s"))
    parts.append(_text(LEFT + WIDTH / 2, TOP + HEIGHT + 38, "GiB needed of a GPU", anchor="middle"))
    on_front = {id(each) for each in plan.front}
    for each in shown:
        x, y = place(each)
        kind = "best" if id(each) in on_front else "other"
        label = escape(_label(each))
        parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{label}</title></circle>'
        )
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(place, plan.front))
    if line:
        parts.append(f'<path class="front" d="M{line}"/>')
    above = 0.0
    for each in plan.front:  # from the top downwards
        x, y = place(each)
        above = max(y - 8, above + LINE)
        is_right = x > LEFT + WIDTH / 2
        anchor = "end" if is_right else "start"
        parts.append(_text(x - 10 if is_right else x + 10, above, _label(each), anchor=anchor))
    width, height = LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>{escape(_in_words(plan))}</title><style>{STYLE}</style>"
        f'<rect class="back" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def front_page(plan: "Plan", *, version: str, question: "TimeQuestion | None" = None) -> str:
    """A page with the answer, the drawing and the setups' figures, which asks the network for nothing."""
    from memplan.report.plan import answer_text, run_lines

    on_front = {id(each) for each in plan.front}
    shown = _timed(plan)
    columns = [
        Column(
            header=("GPUs",), cells=tuple(str(each.setup.num_gpus) for each in shown), is_figure=True
        ),
        Column(header=("setup",), cells=tuple(map(_way, shown))),
        Column(header=("GiB", "needed"), cells=tuple(f"{_gib(each):,.1f}" for each in shown), is_figure=True),
        *time_columns([each.estimate for each in shown], question or TimeQuestion()),
        Column(header=("",), cells=tuple("*" if id(each) in on_front else "" for each in shown)),
    ]  # fmt: skip
    heads = "".join(_cell("th", " ".join(each.header), each) for each in columns)
    rows = "".join(
        "<tr>" + "".join(_cell("td", each.cells[place], each) for each in columns) + "</tr>"
        for place in range(len(shown))
    )
    told = (answer_text(plan), *run_lines(plan, question)) if plan.setups else ()
    return _PAGE.substitute(
        title=escape(_title(plan)),
        answers="".join(f"<p>{escape(text)}</p>" for text in told),
        drawing=front_svg(plan),
        heads=heads,
        rows=rows,
        version=version,
    )


def _cell(tag: str, words: str, column: Column) -> str:
    kind = ' class="figure"' if column.is_figure else ""
    return f"<{tag}{kind}>{escape(words)}</{tag}>"


def _timed(plan: "Plan") -> "Sequence[PlannedSetup]":
    found = {id(each): each for each in (*plan.setups, *plan.front) if each.time is not None}
    return list(found.values())


def _gib(each: "PlannedSetup") -> float:
    return each.estimate.total_bytes.high / GIB


def _speed(each: "PlannedSetup") -> float:
    assert each.time is not None
    return each.time.tokens_per_s


def _label(each: "PlannedSetup") -> str:
    return f"{each.setup.num_gpus} x {_way(each)}"


def _way(each: "PlannedSetup") -> str:
    setup = each.setup
    return (
        f"{setup_label(setup)}, {setup.chosen_precision.value}, checkpointing {checkpointing_label(setup)}, "
        f"micro-batch {setup.micro_batch_size}"
    )


def _title(plan: "Plan") -> str:
    return f"{plan.some.model.name} on {plan.gpu.short_name}: memory against time"


def _in_words(plan: "Plan") -> str:
    told = "; ".join(
        f"{_label(each)}: {_gib(each):,.1f} GiB, {_speed(each):,.0f} tokens/s"
        for each in plan.front
    )
    return f"{_title(plan)}: {told}"


def _text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    return (
        f'<text class="words" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
    )
