"""Memory against time as a drawing: every setup of a plan, and the line of those that none beats in both."""

from html import escape
from string import Template
from typing import TYPE_CHECKING

from memplan.estimator.run_cost import TimeQuestion
from memplan.report.blocks import Column
from memplan.report.pictures.scatter import (
    front_picture,
    front_title,
    needed_gib,
    timed_setups,
    way_text,
)
from memplan.report.times import time_columns

if TYPE_CHECKING:
    from memplan.search.goal import Plan

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title><style>body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;
color-scheme:light dark}td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:bottom}
.figure{text-align:right}.table{overflow-x:auto}</style></head>
<body><h1>$title</h1>$answers$drawing<div class="table"><table><thead><tr>$heads</tr></thead><tbody>$rows</tbody></table></div>
<p>On the line and marked *: what no other setup beats in both memory and time. Written by memplan $version.</p></body></html>
""")


def front_page(plan: "Plan", *, version: str, question: "TimeQuestion | None" = None) -> str:
    """A page with the answer, the drawing and the setups' figures, which asks the network for nothing."""
    from memplan.report.plan import answer_text, run_lines

    on_front = {id(each) for each in plan.front}
    shown = timed_setups(plan)
    columns = [
        Column(
            header=("GPUs",), cells=tuple(str(each.setup.num_gpus) for each in shown), is_figure=True
        ),
        Column(header=("setup",), cells=tuple(map(way_text, shown))),
        Column(header=("GiB", "needed"), cells=tuple(f"{needed_gib(each):,.1f}" for each in shown), is_figure=True),
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
        title=escape(front_title(plan)),
        answers="".join(f"<p>{escape(text)}</p>" for text in told),
        drawing=front_picture(plan).svg,
        heads=heads,
        rows=rows,
        version=version,
    )


def _cell(tag: str, words: str, column: Column) -> str:
    kind = ' class="figure"' if column.is_figure else ""
    return f"<{tag}{kind}>{escape(words)}</{tag}>"
