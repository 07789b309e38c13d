"""A platform's pools beside a plan: which comes first, and why not the others."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.report.lookups.doctor import print_rows

if TYPE_CHECKING:
    from memplan.report.terminal.console import Console
    from memplan.search.planning.pools import PoolPlan

MILLION = 1_000_000


def print_pools(console: "Console", plans: Sequence["PoolPlan"]) -> None:
    """A line for each pool, the best first; the plan that follows is of the first."""
    from memplan.report.terminal.console import Text

    first = plans[0]
    head = f"Pool {first.pool.name}" if first.best is not None else "Nothing fits any pool"
    console.print(Text(head, style="bold"))
    print_rows(console, [(each.pool.name, _cards(each), _words(each)) for each in plans])


def _cards(each: "PoolPlan") -> str:
    price = "" if each.pool.price is None else f" at {each.pool.price:,.2f} an hour"
    return f"{each.pool.usable_gpus} x {each.pool.gpu.short_name}{price}"


def _words(each: "PoolPlan") -> str:
    """What it is good for."""
    from memplan.report.estimates.changes import gpus_label, setup_label

    best = each.best
    if best is None:
        return each.refused or "nothing fits"
    words = f"{setup_label(best.setup)} on {gpus_label(best.setup)}"
    if best.time is not None:
        words += f", {best.time.tokens_per_s:,.0f} tokens/s"
    if each.token_cost != float("inf"):
        words += f", {each.token_cost * MILLION:,.2f} for a million tokens"
    return words
