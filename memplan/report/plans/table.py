"""A plan's setups, a line each."""

from typing import TYPE_CHECKING

from memplan.report.estimates.changes import (
    checkpointing_label,
    kernels_label,
    offload_label,
    setup_label,
)
from memplan.report.terminal.blocks import Column, print_blocks
from memplan.search.planning.concessions import CONCESSIONS
from memplan.search.planning.goal import Objective, Plan, PlannedSetup
from memplan.units import GIB, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.report.terminal.console import Text

from memplan.report.plans.answer import has_own_kernels

_STRETCHED: "Mapping[Objective, Mapping[tuple[str, ...], Callable[[PlannedSetup], str]]]" = {
    Objective.SEQ_LEN: {("tokens",): lambda each: f"{each.setup.seq_len:,}"},
    Objective.LAYERS: {
        ("layers",): lambda each: f"{each.estimate.model.num_layers:,}",
        ("params",): lambda each: format_count(each.estimate.num_params),
    },
}
"""What is looked for where it is no micro-batch: columns and what stands in them."""


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
        from memplan.report.estimates.times import time_columns  # which most are not asked for

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
    best = fastest(plan)
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
    if not any(has_own_kernels(each, plan) for each in plan.setups):
        del found[("kernels",)]
    if not shows_cpu(plan):
        del found[("CPU", "GiB")]
    if not accumulates:
        del found[("accum.",)]
    return found


def shows_cpu(plan: Plan) -> bool:
    """Whether CPU RAM is worth a column: it is limited, or what is offloaded lies there."""
    offloads = any(offload_label(each.setup) for each in plan.setups)
    return offloads or plan.goal.node_memory_bytes is not None


def fastest(plan: Plan) -> float:
    """Tokens a second of the fastest."""
    return max((each.total_speed for each in plan.setups), default=1.0)
