"""Memory against time: the setups that no other beats in both."""

from memplan.report.changes import (
    checkpointing_label,
    setup_label,
)
from memplan.report.plans.answer import way_text
from memplan.search.concessions import Concession
from memplan.search.goal import Plan, PlannedSetup
from memplan.units import GIB


def front_lines(plan: Plan) -> list[str]:
    """Memory against time: what each step down in memory costs."""
    if len(plan.front) < 2 or plan.front[0].time is None:
        return []
    fastest = plan.front[0].time.tokens_per_s
    lines = ["Memory against time, what no other setup beats in both:"]
    for each in plan.front:
        assert each.time is not None
        needed = each.estimate.total_bytes.high
        share = each.time.tokens_per_s / fastest
        bar = "█" * max(1, round(share * FRONT_WIDTH))
        label = (
            f"{each.setup.num_gpus} x {_short_way(each)}, {each.setup.chosen_precision.value}, "
            f"checkpointing {checkpointing_label(each.setup)}, micro-batch {each.setup.micro_batch_size}"
        )
        lines.append(f"  {needed / GIB:7,.1f} GiB  {share:4.0%} {bar:<{FRONT_WIDTH}} {label}")
    return [*lines, ""]


def _short_way(each: PlannedSetup) -> str:
    """The engine, behind what is given up."""
    kept = each.given_up is Concession.NONE
    return setup_label(each.setup) if kept else way_text(each)


FRONT_WIDTH = 20
"""Of the longest bar."""
