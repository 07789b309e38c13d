"""What does not fit, and what it lacks."""

from typing import TYPE_CHECKING

from memplan.report.estimates.account import deciding_text
from memplan.report.estimates.changes import (
    ONE_GPU,
    checkpointing_label,
    describe_change,
    gpus_label,
    saving_text,
    setup_label,
)
from memplan.search.planning.concessions import CONCESSIONS, Concession
from memplan.search.planning.goal import Plan, Shortfall
from memplan.units import format_gib

if TYPE_CHECKING:
    from memplan.estimator import Estimate


MAX_SHORTFALLS, FEW_SHORTFALLS = 8, 3
"""Setups that do not fit and are written out, and where others do; the rest are counted."""


def shortfall_lines(plan: Plan) -> list[str]:
    """What does not fit, each with the nearest change that would make it fit."""
    alike: dict[tuple[Concession, int, str], list[Shortfall]] = {}
    for each in plan.shortfalls:
        key = (each.given_up, each.setup.num_gpus, setup_label(each.setup))
        alike.setdefault(key, []).append(each)
    # Only of those that are shown is it looked for how much they need.
    most = FEW_SHORTFALLS if plan.setups else MAX_SHORTFALLS
    kept = [shortfall_text(_least(each)) for each in list(alike.values())[:most]]
    if not kept:
        return []
    more = [f"  ... and {len(alike) - len(kept)} more"] if len(alike) > len(kept) else []
    return ["Does not fit, even with the smallest micro-batch:", *kept, *more]


def _least(alike: list[Shortfall]) -> Shortfall:
    """The one that lacks least of those that a reader is told as one."""
    if len(alike) == 1:
        return alike[0]
    return min(alike, key=lambda each: (each.tier, each.estimate.worst_bytes))


def overfilling_lines(plan: Plan) -> list[str]:
    """What a node's CPU RAM is not enough for, each way to hold the model once."""
    least: dict[tuple[int, str], Estimate] = {}
    for each in plan.overfilling:
        key = (each.setup.num_gpus, setup_label(each.setup))
        if key not in least or each.host_bytes < least[key].host_bytes:
            least[key] = each
    if not least:
        return []
    usual = plan.gpu.node
    named = plan.goal.node_memory_bytes
    head = f"Needs more CPU RAM than the {format_gib(named or 0, digits=1)} of a node:"
    if named is None and usual is not None:
        head = (
            f"Needs more CPU RAM than a usual node has ({usual.name}; --cpu-memory says another):"
        )
    return [
        head,
        *(
            f"  {gpus_label(each.setup)}, {setup_label(each.setup)}: {host_text(each, named)}"
            for each in least.values()
        ),
    ]


def host_text(each: "Estimate", named: int | None) -> str:
    """CPU RAM that is needed, and of how much where nobody said."""
    needed = format_gib(each.host_bytes, digits=1)
    if named is not None:
        return needed
    return f"{needed} of {format_gib(each.node_memory_bytes or 0, digits=1)}"


def shortfall_text(shortfall: Shortfall) -> str:
    """One setup that does not fit, in one line."""
    setup = shortfall.setup
    engine = [setup_label(setup)] if setup_label(setup) != ONE_GPU else []
    lost = CONCESSIONS[shortfall.given_up].label
    given_up = [lost] if shortfall.given_up is not Concession.NONE else []
    parts = [gpus_label(setup), *engine, *given_up, setup.chosen_precision.value]
    label = f"  {', '.join(parts)}, checkpointing {checkpointing_label(setup)}"
    if deciding := deciding_text(shortfall.estimate):
        label += f" ({deciding})"
    better = shortfall.better
    if better is None:
        missing = format_gib(shortfall.missing_bytes, digits=1)
        return f"{label}: {missing} more needed, and nothing that was tried fits"
    change = describe_change(setup, better.setup)
    text = saving_text(
        change, missing_bytes=shortfall.missing_bytes, saved_bytes=shortfall.saved_bytes
    )
    return f"{label}: {text}"
