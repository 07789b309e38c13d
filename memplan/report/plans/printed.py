"""Plans as people read them: the answer first, then what it was chosen from."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.report.terminal.blocks import hanging
from memplan.search.planning.goal import Plan
from memplan.units import format_gib

if TYPE_CHECKING:
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.report.terminal.console import Console

from memplan.report.plans.answer import answer_text, job_text, run_lines
from memplan.report.plans.footnotes import footnotes
from memplan.report.plans.front import front_lines
from memplan.report.plans.shortfalls import overfilling_lines, shortfall_lines
from memplan.report.plans.table import plan_lines


def print_plan(console: "Console", plan: Plan, *, question: "TimeQuestion | None" = None) -> None:
    """Print the ranked setups, what falls short, and what the speeds rest on."""
    print_plans(console, [plan], question=question)


def print_plans(
    console: "Console", plans: Sequence[Plan], *, question: "TimeQuestion | None" = None
) -> None:
    """Print the answer for each card, then the setups of each, and once what the figures mean."""
    from memplan.report.terminal.console import Text

    ordered = in_order(plans, question)
    for place, plan in enumerate(ordered.plans):
        style = "green" if plan.setups else "bold red"
        for text in (_lead(plan, place, ordered), *run_lines(plan, question)):
            for line in hanging(text, console.width):
                console.print(Text(line, style=style))
    if not ordered.is_ranked:
        for line in hanging(_unpriced_text(plans), console.width):
            console.print(Text(line))
    for plan in ordered.plans:
        if len(plans) > 1:
            console.print()
        _print_setups(console, plan, question)
    for line in dict.fromkeys(line for plan in plans for line in footnotes(plan)):
        console.print(Text(line, style="dim"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordered:
    """Plans as they are told."""

    plans: Sequence[Plan]
    question: "TimeQuestion"
    is_ranked: bool
    """The best card comes first; else they stand as the cards were named."""


def in_order(plans: Sequence[Plan], question: "TimeQuestion | None") -> Ordered:
    """The best card first, where what is wanted can be compared among cards."""
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.search.planning.among_cards import best_card_first, is_comparable

    asked = question or TimeQuestion()
    is_ranked = len(plans) == 1 or is_comparable(plans, asked)
    told = best_card_first(plans, asked) if is_ranked else plans
    return Ordered(plans=told, question=asked, is_ranked=is_ranked)


def _unpriced_text(plans: Sequence[Plan]) -> str:
    """What it takes to say which card is cheapest."""
    names = (next(iter(plan.gpu.aliases), plan.gpu.gpu_id) for plan in plans)
    prices = ",".join(f"{name}=..." for name in names)
    return f"Which card is cheapest? --price {prices} (of one GPU's hour) puts it first"


def _lead(plan: Plan, place: int, ordered: Ordered) -> str:
    """The answer in a line, with the card's name where there are several."""
    name = plan.gpu.short_name
    if not plan.setups:
        return f"Nothing fits {name}."
    text = answer_text(plan, ordered.question)
    if len(ordered.plans) == 1:
        return text
    if place and ordered.is_ranked:
        text = text.partition(": ")[2]
    return f"{name}  {text}"


def _print_setups(console: "Console", plan: Plan, question: "TimeQuestion | None") -> None:
    """What is planned for, the table of what fits, the front, and what does not fit."""
    from memplan.report.terminal.console import Text

    some = plan.some
    about = (
        f"{some.model.name} ({some.model.task.value}), {job_text(plan)}on {plan.gpu.short_name} "
        f"({format_gib(plan.gpu.capacity_bytes, digits=1)})"
    )
    if plan.setups:
        about += (
            f": {len(plan.setups)} of {plan.num_fitting} setups with room for what they allocate"
        )
    for line in hanging(about, console.width):
        text = Text(line)
        start = line.find(some.model.name)
        text.stylize("bold" if start >= 0 else "", start, start + len(some.model.name))
        console.print(text)
    if plan.setups:
        console.print()
        for drawn in plan_lines(console.width, plan, question):
            console.print(drawn, soft_wrap=True)
        console.print()
    told = (*front_lines(plan), *shortfall_lines(plan), *overfilling_lines(plan))
    for words in told:
        for line in hanging(words, console.width) or [""]:
            console.print(Text(line))
