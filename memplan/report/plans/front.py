"""Memory against time: the setups that no other beats in both."""

from memplan.report.estimates.changes import setup_label
from memplan.report.plans.answer import training_parts, way_text
from memplan.search.planning.concessions import Concession
from memplan.search.planning.goal import Plan, PlannedSetup
from memplan.units import GIB


def front_lines(plan: Plan) -> list[str]:
    """Memory against time: what each step down in memory costs."""
    if len(plan.front) < 2 or plan.front[0].time is None:
        return []
    fastest = plan.front[0].time.tokens_per_s
    ways = [training_parts(each, plan) for each in plan.front]
    shared = [part for part in ways[0] if all(part in way for way in ways)]
    everywhere = f" (all {', '.join(shared)})" if shared else ""
    lines = [f"Memory against time, what no other setup beats in both{everywhere}:"]
    for each, way in zip(plan.front, ways, strict=True):
        assert each.time is not None
        needed = each.estimate.total_bytes.high
        share = each.time.tokens_per_s / fastest
        bar = "█" * max(1, round(share * FRONT_WIDTH))
        label = (
            f"{each.setup.num_gpus} x {_short_way(each)}",
            *(part for part in way if part not in shared),
            f"micro-batch {each.setup.micro_batch_size}",
        )
        figures = f"{needed / GIB:7,.1f} GiB  {share:4.0%}"
        lines.append(f"  {figures} {bar:<{FRONT_WIDTH}} {', '.join(label)}")
    return [*lines, ""]


def _short_way(each: PlannedSetup) -> str:
    """The engine, behind what is given up."""
    kept = each.given_up is Concession.NONE
    return setup_label(each.setup) if kept else way_text(each)


FRONT_WIDTH = 20
"""Of the longest bar."""
