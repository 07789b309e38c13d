"""A plan as people read it: what fits, best first; what does not, and what would change that."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.memory.engine_options import loads_under_zero_init
from memplan.model.config import MAX_LAYERS
from memplan.report.account import deciding_text
from memplan.report.answer import capacity_text, needed_text, params_text
from memplan.report.blocks import Column, hanging, print_blocks
from memplan.report.changes import (
    ONE_GPU,
    checkpointing_label,
    describe_change,
    gpus_label,
    kernels_label,
    offload_label,
    saving_text,
    setup_label,
)
from memplan.report.estimate import ZERO_INIT_LINE
from memplan.search.concessions import CONCESSIONS, Concession
from memplan.search.goal import Objective, Plan, PlannedSetup, Shortfall
from memplan.search.planner import SEQ_LEN_STEP
from memplan.units import GIB, format_count, format_gib

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memplan.estimator import Estimate
    from memplan.estimator.run_cost import TimeQuestion
    from memplan.report.console import Console, Text

MAX_SHORTFALLS, FEW_SHORTFALLS = 8, 3
"""Setups that do not fit and are written out, and where others do; the rest are counted."""
MARKDOWN_COLUMNS = (
    "rank", "given_up", "num_gpus", "engine", "zero_stage", "fsdp_strategy", "offload_optimizer",
    "offload_param", "precision", "checkpointing", "other_settings", "micro_batch_size",
    "gradient_accumulation_steps", "seq_len", "gpu", "peak_bytes", "headroom_bytes",
    "relative_speed", "verdict",
)  # fmt: skip
"""What a Markdown table shows of a row."""
_OBJECTIVES = {
    Objective.SPEED: "Fastest first", Objective.COST: "Cheapest first", Objective.GPUS: "Fewest GPUs first",
    Objective.BATCH: "Largest batch first", Objective.SEQ_LEN: "Longest sequence first",
    Objective.LAYERS: "Most layers first",
}  # fmt: skip


def markdown_columns(question: "TimeQuestion | None") -> tuple[str, ...]:
    """What a Markdown table shows of a row; times where they are known."""
    if question is None:
        return MARKDOWN_COLUMNS
    from memplan.report.times import time_keys  # which most are not asked for

    return (*MARKDOWN_COLUMNS, *time_keys(question))


def plan_rows(plan: Plan, question: "TimeQuestion | None" = None) -> Iterator[dict[str, object]]:
    """Flat rows for scripts: the columns of an estimate, what the plan adds, and times if asked for."""
    if question is not None:
        from memplan.report.times import time_row  # which most are not asked for

        for row, each in zip(plan_rows(plan), plan.setups, strict=True):
            yield row | time_row(each.estimate, question) | {"on_front": each in plan.front}
        return
    best = _fastest(plan)
    for rank, each in enumerate(plan.setups, start=1):
        yield {
            "rank": rank,
            **({} if plan.pool is None else {"pool": plan.pool.name}),
            "given_up": each.given_up.value,
            **each.estimate.to_dict(),
            "headroom_bytes": each.headroom_bytes,
            "num_layers": each.estimate.model.num_layers,
            "relative_speed": round(each.total_speed / best, 4),
            "relative_speed_per_gpu": round(each.speed.per_gpu, 4),
            "recomputation_cost": round(each.speed.recomputation, 4),
            "small_batch_cost": round(each.speed.small_batches, 4),
            "communication_cost": round(each.speed.communication, 4),
            "offload_cost": round(each.speed.offload, 4),
        }


def print_plan(console: "Console", plan: Plan, *, question: "TimeQuestion | None" = None) -> None:
    """Print the ranked setups, what falls short, and what the speeds rest on."""
    print_plans(console, [plan], question=question)


def print_plans(
    console: "Console", plans: Sequence[Plan], *, question: "TimeQuestion | None" = None
) -> None:
    """Print the answer for each card, then the setups of each, and once what the figures mean."""
    from memplan.report.console import Text

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
    from memplan.estimator.run_cost import TimeQuestion
    from memplan.search.among_cards import best_card_first, is_comparable

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
    from memplan.report.console import Text

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


_STRETCHED: "Mapping[Objective, Mapping[tuple[str, ...], Callable[[PlannedSetup], str]]]" = {
    Objective.SEQ_LEN: {("tokens",): lambda each: f"{each.setup.seq_len:,}"},
    Objective.LAYERS: {
        ("layers",): lambda each: f"{each.estimate.model.num_layers:,}",
        ("params",): lambda each: format_count(each.estimate.num_params),
    },
}
"""What is looked for where it is no micro-batch: columns and what stands in them."""
_LARGEST = {
    Objective.SEQ_LEN: f"longest sequence, in steps of {SEQ_LEN_STEP} tokens",
    Objective.LAYERS: "largest number of layers",
}


def job_text(plan: Plan) -> str:
    """The model's size and the tokens, but for what is looked for."""
    some, looked_for = plan.some, plan.goal.objective
    size = f"{params_text(some, ' parameters')}, "
    length = f"{some.setup.seq_len:,} tokens, "
    size = "" if looked_for is Objective.LAYERS else size
    return size if looked_for is Objective.SEQ_LEN else size + length


def answer_text(plan: Plan, question: "TimeQuestion | None" = None) -> str:
    """The first setup in words, what was looked for before it."""
    best = plan.setups[0]
    setup = best.setup
    way = _way_text(best)
    found = {
        Objective.GPUS: f"{setup.num_gpus} with {way}",
        Objective.SEQ_LEN: f"{setup.seq_len:,} tokens with {way}",
        Objective.LAYERS: f"{_layers_text(best.estimate)} with {way}",
    }.get(plan.goal.objective, f"{way} on {gpus_label(setup)}")
    batch = f"micro-batch {setup.micro_batch_size}"
    if setup.gradient_accumulation_steps > 1:
        batch += f" x {setup.gradient_accumulation_steps}"
    parts = [
        found,
        batch,
        setup.chosen_precision.value,
        f"checkpointing {checkpointing_label(setup)}",
    ]
    if _has_own_kernels(best, plan):
        parts.append(f"kernels {kernels_label(setup)}")
    lead = _OBJECTIVES[plan.goal.objective].removesuffix(" first")
    return f"{lead}: {', '.join(parts)}: {', '.join(_figures(best, plan, question))}"


def _figures(best: PlannedSetup, plan: Plan, question: "TimeQuestion | None") -> list[str]:
    """What a setup needs and takes; where money is what is wanted, its hours and what they cost."""
    answer = best.estimate
    told = [f"needs {needed_text(answer.total_bytes)} of {capacity_text(plan.gpu)}"]
    if best.offloads:
        told.append(f"CPU RAM {format_gib(answer.host_bytes, digits=1)}")
    if best.time is None:
        return told
    from memplan.report.times import SOME_TOKENS, gpu_hours, hours_text, money_text, seconds_text

    told.append(f"a step takes {seconds_text(best.time.expected_s)}")
    if plan.goal.objective is Objective.COST:
        hours = gpu_hours(best.time)
        told.append(f"{hours_text(hours)} GPU-hours for {SOME_TOKENS}")
        price = None if question is None else question.price_of(plan.gpu)
        told += [] if price is None else [f"cost {money_text(hours * price)}"]
    return told


def _way_text(best: PlannedSetup) -> str:
    """How it is trained, in a few words: what is given up before the engine."""
    label = setup_label(best.setup)
    lost = CONCESSIONS[best.given_up].label if best.given_up is not Concession.NONE else ""
    if label == ONE_GPU:
        return lost or "plain training"
    return f"{lost}, {label}" if lost else label


def _has_own_kernels(each: PlannedSetup, plan: Plan) -> bool:
    """Whether it runs other kernels than the goal's."""
    base = plan.goal.base
    return (each.setup.kernels, each.setup.loss) != (base.kernels, base.loss)


def run_lines(plan: Plan, question: "TimeQuestion | None") -> list[str]:
    """The whole run on each number of GPUs, with the first setup that it has there."""
    if question is None or not question.has_length:
        return []
    from memplan.report.times import changed_text, run_text, timed  # which most are not asked for

    firsts: dict[int, PlannedSetup] = {}
    for each in plan.setups:
        firsts.setdefault(each.setup.num_gpus, each)
    told, runs = [], []
    for count, each in sorted(firsts.items()):
        run = timed(each.estimate, question).run
        if run is not None:
            told.append(f"{count} GPUs, {setup_label(each.setup)}: {run_text(run, question)}")
            runs.append(run)
    return told + [changed_text(more, fewer) for fewer, more in pairwise(runs)]


def _layers_text(answer: "Estimate") -> str:
    count = answer.model.num_layers
    more = ", the most that is looked for," if count >= MAX_LAYERS else ""
    return f"{count:,} layers{more}"


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
    return setup_label(each.setup) if kept else _way_text(each)


FRONT_WIDTH = 20
"""Of the longest bar."""


def plan_lines(width: int, plan: Plan, question: "TimeQuestion | None" = None) -> "Iterator[Text]":
    """A table with one line for each setup that fits; rank, GPUs and setup stay where it is narrow."""
    ranks = Column(
        header=("#",), cells=tuple(map(str, range(1, len(plan.setups) + 1))), is_figure=True
    )
    gpus, label, *others = (
        Column(
            header=header,
            cells=tuple(map(words, plan.setups)),
            styles=("bold",) * len(plan.setups) if header in _BOLD else (),
            is_figure=header not in _WORDS,
            gives_way=_GIVE_WAY.get(header, 0),
        )
        for header, words in _columns(plan).items()
        if question is None or header != ("speed",)
    )
    if question is not None:
        from memplan.report.times import time_columns  # which most are not asked for

        others += time_columns([each.estimate for each in plan.setups], question)
    return print_blocks(width, label, others, before=[ranks, gpus])


_WORDS = (("setup",), ("given up",), ("kernels",), ("precision",), ("checkpointing",))
"""Columns that are set to the left."""
_GIVE_WAY = {
    ("precision",): 5, ("CPU", "GiB"): 4, ("peak", "GiB"): 3, ("left", "GiB"): 2, ("accum.",): 1,
}  # fmt: skip
"""Columns that are left out where it is narrow, the highest first."""
_BOLD = (("tokens",), ("layers",), ("params",))
"""What was looked for."""


def _columns(plan: Plan) -> "dict[tuple[str, ...], Callable[[PlannedSetup], str]]":
    """What a table says of each setup, by the lines of its header."""
    accumulates = any(each.setup.gradient_accumulation_steps > 1 for each in plan.setups)
    best = _fastest(plan)
    found: dict[tuple[str, ...], Callable[[PlannedSetup], str]] = {
        ("GPUs",): lambda each: str(each.setup.num_gpus),
        ("setup",): lambda each: setup_label(each.setup),
        ("given up",): lambda each: CONCESSIONS[each.given_up].label,
        ("precision",): lambda each: each.setup.chosen_precision.value,
        ("checkpointing",): lambda each: checkpointing_label(each.setup),
        ("kernels",): lambda each: kernels_label(each.setup),
        **_STRETCHED.get(plan.goal.objective, {}),
        ("batch",): lambda each: str(each.setup.micro_batch_size),
        ("accum.",): lambda each: str(each.setup.gradient_accumulation_steps),
        ("peak", "GiB"): lambda each: f"{each.estimate.peak_bytes / GIB:,.1f}",
        ("left", "GiB"): lambda each: f"{each.headroom_bytes / GIB:,.1f}",
        ("CPU", "GiB"): lambda each: f"{each.estimate.host_bytes / GIB:,.1f}",
        ("speed",): lambda each: f"{100 * each.total_speed / best:.0f} %",
    }
    if not plan.goal.allow:
        del found[("given up",)]
    if not any(_has_own_kernels(each, plan) for each in plan.setups):
        del found[("kernels",)]
    if not _shows_cpu(plan):
        del found[("CPU", "GiB")]
    if not accumulates:
        del found[("accum.",)]
    return found


def _shows_cpu(plan: Plan) -> bool:
    """Whether CPU RAM is worth a column: it is limited, or what is offloaded lies there."""
    offloads = any(offload_label(each.setup) for each in plan.setups)
    return offloads or plan.goal.node_memory_bytes is not None


def _fastest(plan: Plan) -> float:
    return max((each.total_speed for each in plan.setups), default=1.0)


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
            f"  {gpus_label(each.setup)}, {setup_label(each.setup)}: {_host_text(each, named)}"
            for each in least.values()
        ),
    ]


def _host_text(each: "Estimate", named: int | None) -> str:
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


def footnotes(plan: Plan) -> list[str]:
    """What the figures mean."""
    goal = plan.goal
    kept = ""
    if goal.headroom:
        kept = f", and {100 * goal.headroom:g} % of the GPU stay free besides"
    fits = f"Fits: what it needs, by a replay of its run{kept}"
    if plan.setups:
        order = (
            f"{_OBJECTIVES[goal.objective]}, each with its "
            f"{_LARGEST.get(goal.objective, 'largest micro-batch')}; among equals (2 %) the simplest. "
            f"{fits}; left: what that leaves"
        )
        order += "; CPU: RAM of a node." if _shows_cpu(plan) else "."
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
