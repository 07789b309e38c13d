"""Pipeline schedules: their orders, what is in flight, what is refused."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.training.splitting.parallelism import PipelineRuntime, PipelineSchedule
from memplan.training.splitting.schedules import PassKind, most_in_flight, rank_passes, rank_stages
from memplan.training.splitting.stages import divide_layers, read_layers_per_stage


@pytest.fixture
def records(checkout: Path) -> dict[str, Any]:
    """Orders of torch's schedule objects, and counts of them."""
    found: dict[str, Any] = json.loads((checkout / "tests" / "data" / "pipeline.json").read_text())
    return found


def test_orders_are_torch_s(records: dict[str, Any]) -> None:
    for record in records["orders"]:
        passes = rank_passes(
            PipelineSchedule(record["schedule"]),
            num_ranks=record["ranks"],
            num_virtual=record["virtual"],
            num_micro_batches=record["micro_batches"],
            rank=record["rank"],
        )
        words = " ".join(f"{each.kind.value}{each.stage}.{each.micro_batch}" for each in passes)
        assert words == record["passes"], record


def test_counts_are_torch_s(records: dict[str, Any]) -> None:
    for name, num_ranks, count, num_virtual, rank, *counts in records["in_flight"]:
        passes = rank_passes(
            PipelineSchedule(name),
            num_ranks=num_ranks,
            num_virtual=num_virtual,
            num_micro_batches=count,
            rank=rank,
        )
        found = most_in_flight(passes)
        assert [found.until_input, found.until_weight, found.waiting] == counts, (name, rank)


@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_every_micro_batch_passes_every_stage_once_and_in_order(schedule: PipelineSchedule) -> None:
    for num_ranks, factor in product((2, 3, 5), (2, 3)):
        count = num_ranks * factor
        num_virtual = schedule.usual_virtual_stages
        for rank in range(num_ranks):
            where = {"num_ranks": num_ranks, "num_virtual": num_virtual, "rank": rank}
            passes = rank_passes(schedule, num_micro_batches=count, **where)
            when = {each: position for position, each in enumerate(passes)}
            assert len(when) == len(passes)
            for stage, batch in product(rank_stages(schedule, **where), range(count)):
                own = [kind for kind in PassKind if (kind, stage, batch) in when]
                times = [when[kind, stage, batch] for kind in own]  # type: ignore[index]
                assert times == sorted(times)
                assert [kind.value for kind in own] in (["F", "B"], ["F", "I", "W"])


@pytest.mark.parametrize(
    ("schedule", "num_virtual", "count", "words"),
    [
        ("1f1b", 1, 3, "3 < 4"),
        ("1f1b", 2, 8, "one stage a rank"),
        ("zbv", 3, 8, "exactly 2 stages"),
        ("dualpipev", 2, 7, "7 < 8"),
        ("interleaved-1f1b", 2, 9, "9 is not divisible by 2; 8 is"),
        ("interleaved-zero-bubble", 2, 14, "14 is not divisible by 3; 12 is"),
    ],
)
def test_what_torch_refuses(schedule: str, num_virtual: int, count: int, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        rank_passes(
            PipelineSchedule(schedule),
            num_ranks=4,
            num_virtual=num_virtual,
            num_micro_batches=count,
            rank=0,
        )


def test_layers_are_divided() -> None:
    assert divide_layers(32, 8) == (4,) * 8
    # torchtitan's rule: embedding and head count as a layer each.
    assert divide_layers(126, 16) == (7, *(8,) * 14, 7)
    assert divide_layers(10, 4) == (2, 3, 3, 2)
    assert divide_layers(6, 3, explicit=(3, 2, 1)) == (3, 2, 1)
    for layers, stages, runtime, explicit, words in (
        (10, 4, PipelineRuntime.MEGATRON, None, "10 = 4 x 2"),
        (1, 4, PipelineRuntime.TORCH, None, "too few"),
        (6, 3, PipelineRuntime.TORCH, (3, 3), "of 2 stages, and there are 3"),
        (6, 3, PipelineRuntime.TORCH, (3, 2, 2), r"3 \+ 2 \+ 2 = 7"),
        (6, 3, PipelineRuntime.TORCH, (3, 0, 3), "may have no layer"),
    ):
        with pytest.raises(SetupError, match=words):
            divide_layers(layers, stages, runtime=runtime, explicit=explicit)
    with pytest.raises(SetupError, match="8,8,7,9"):
        read_layers_per_stage("8,x")
