"""The page of a plan: the answer, memory against time, and every setup's figures."""

from typing import TYPE_CHECKING

from memplan.estimator.time.run_cost import TimeQuestion
from memplan.report.estimates.times import time_columns
from memplan.report.pages.tables import table
from memplan.report.pictures.picture import page
from memplan.report.pictures.scatter import (
    front_picture,
    front_title,
    fronted,
    needed_gib,
    timed_setups,
    whole_way,
)

if TYPE_CHECKING:
    from memplan.search.planning.goal import Plan


def front_page(plan: "Plan", *, version: str, question: "TimeQuestion | None" = None) -> str:
    """A page with the answer, the drawing and the setups' figures, which asks the network for nothing."""
    from memplan.report.plans.answer import answer_text, run_lines

    on_front = fronted(plan)
    shown = timed_setups(plan)
    times = time_columns([each.estimate for each in shown], question or TimeQuestion())
    head = ("GPUs", "setup", "GiB needed", *(each.name for each in times), "none beats it")
    rows = [
        (
            str(each.setup.num_gpus), whole_way(each, plan), f"{needed_gib(each):,.1f}",
            *(column.cells[place] for column in times), "*" if each.setup in on_front else "",
        )
        for place, each in enumerate(shown)
    ]  # fmt: skip
    told = (answer_text(plan), *run_lines(plan, question)) if plan.setups else ()
    title = front_title(plan)
    return page(
        [front_picture(plan)],
        title=title,
        lines=(*told, f"Made by memplan {version}."),
        below=table(head, rows, caption="Every setup whose time is known"),
    )
