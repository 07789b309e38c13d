"""What the reader of a plan's table has to know."""

from collections.abc import Sequence

from memplan.memory.engine_options import loads_under_zero_init
from memplan.report.estimates.printed import ZERO_INIT_LINE
from memplan.report.plans.answer import LARGEST, OBJECTIVES
from memplan.report.plans.table import shows_cpu
from memplan.search.planning.goal import Plan, PlannedSetup


def footnotes(plan: Plan) -> list[str]:
    """What the figures mean."""
    goal = plan.goal
    kept = ""
    if goal.headroom:
        kept = f", and {100 * goal.headroom:g} % of the GPU stay free besides"
    fits = f"Fits: what it needs, by a replay of its run{kept}"
    if plan.setups:
        order = (
            f"{OBJECTIVES[goal.objective]}, each with its "
            f"{LARGEST.get(goal.objective, 'largest micro-batch')}; among equals (2 %) the simplest. "
            f"{fits}; left: what that leaves"
        )
        order += "; CPU: RAM of a node." if shows_cpu(plan) else "."
        assumed = "; ".join(plan.assumptions)
        speed = "Speed is relative to the fastest here, an order and no forecast."
        lines = [order, f"{speed} Assumed: {assumed}."]
        if any(each.time is not None for each in plan.setups):
            lines = [order, *(f"Assumed: {text}" for text in plan.some.model.assumptions)]
    else:
        lines = [f"{fits}.", *(f"Assumed: {text}" for text in plan.some.model.assumptions)]
    if any(loads_under_zero_init(each.setup) for each in plan.setups):
        lines.append(ZERO_INIT_LINE)
    if any(each.tier for each in plan.setups):
        lines.append("Setups without fp32 optimizer states come last: they train less precisely.")
    lines += _notes(plan.setups)
    lines += [f"Not tried: {reason}" for reason in plan.refused]
    return lines


def _notes(setups: Sequence[PlannedSetup]) -> list[str]:
    return list(
        dict.fromkeys(
            note
            for each in setups
            for note in each.estimate.all_notes
            if note != each.estimate.stage_note
        )
    )
