"""Plans as scripts read them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memplan.search.planning.goal import Plan

if TYPE_CHECKING:
    from memplan.estimator.time.run_cost import TimeQuestion

from memplan.report.plans.table import fastest

MARKDOWN_COLUMNS = (
    "rank", "given_up", "num_gpus", "engine", "zero_stage", "fsdp_strategy", "offload_optimizer",
    "offload_param", "precision", "checkpointing", "other_settings", "micro_batch_size",
    "gradient_accumulation_steps", "seq_len", "gpu", "peak_bytes", "headroom_bytes",
    "relative_speed", "verdict",
)  # fmt: skip
"""What a Markdown table shows of a row."""


def markdown_columns(question: "TimeQuestion | None") -> tuple[str, ...]:
    """What a Markdown table shows of a row; times where they are known."""
    if question is None:
        return MARKDOWN_COLUMNS
    from memplan.report.estimates.times import time_keys  # which most are not asked for

    return (*MARKDOWN_COLUMNS, *time_keys(question))


def plan_rows(plan: Plan, question: "TimeQuestion | None" = None) -> Iterator[dict[str, object]]:
    """Flat rows for scripts: the columns of an estimate, what the plan adds, and times if asked for."""
    if question is not None:
        from memplan.report.estimates.times import time_row  # which most are not asked for

        for row, each in zip(plan_rows(plan), plan.setups, strict=True):
            yield row | time_row(each.estimate, question) | {"on_front": each in plan.front}
        return
    best = fastest(plan)
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
