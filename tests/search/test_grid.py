from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.search.grid import Grid, Impossible, with_global_batch
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup


def engines(grid: Grid) -> list[tuple[str, int | None, str | None]]:
    return [
        (
            setup.chosen_engine.value,
            setup.zero_stage.value if setup.zero_stage is not None else None,
            setup.fsdp_strategy.value if setup.fsdp_strategy is not None else None,
        )
        for setup in grid.setups()
    ]


def test_each_engine_varies_in_its_own_axes_alone() -> None:
    grid = Grid(
        axes={
            "num_gpus": 8,
            "engine": ["deepspeed", "fsdp", "ddp"],
            "zero_stage": [2, 3],
            "fsdp_strategy": ["full_shard", "shard_grad_op"],
        }
    )
    assert engines(grid) == [
        ("deepspeed", 2, None),
        ("deepspeed", 3, None),
        ("fsdp", None, "full_shard"),
        ("fsdp", None, "shard_grad_op"),
        ("ddp", None, None),
    ]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        pytest.param({"num_gpus": [1, 8]}, ["ddp", "deepspeed"], id="default"),
        pytest.param({"num_gpus": [1, 8], "zero_stage": 1}, ["deepspeed"] * 2, id="stage"),
        pytest.param({"num_gpus": 8, "fsdp_strategy": "full_shard"}, ["fsdp"], id="strategy"),
        pytest.param({"offload_optimizer": "cpu"}, ["deepspeed"], id="offload"),
        pytest.param({"offload_optimizer": "none"}, ["ddp"], id="no offload"),
        pytest.param({"num_gpus": 8, "precision": "fp16-mixed"}, ["fsdp"], id="precision"),
        pytest.param(
            {"num_gpus": 8, "precision": ["bf16-amp", "bf16-master"]},
            ["ddp", "deepspeed"],
            id="two precisions",
        ),
    ],
)
def test_the_engine_follows_from_what_is_named(axes: dict[str, Any], expected: list[str]) -> None:
    assert [setup.chosen_engine.value for setup in Grid(axes=axes).setups()] == expected


def test_what_changes_activations_is_outermost_whatever_the_order_given() -> None:
    axes = {"zero_stage": [2, 3], "num_gpus": [8, 16], "micro_batch_size": [1, 2], "seq_len": [64]}
    backwards = dict(reversed(axes.items()))
    order = [
        (setup.micro_batch_size, setup.num_gpus, setup.zero_stage)
        for setup in Grid(axes=axes).setups()
    ]
    assert order == sorted(order)
    assert list(Grid(axes=axes).setups()) == list(Grid(axes=backwards).setups())


def test_equal_values_are_one_however_they_are_written() -> None:
    grid = Grid(axes={"engine": ["ddp", Engine.DDP], "checkpointing": ["0.5", 0.5]})
    assert grid.num_combinations == 1


def test_contradictions_are_counted_and_not_raised() -> None:
    grid = Grid(
        axes={"num_gpus": 8, "zero_stage": [0, 1, 3], "offload_param": ["none", "cpu"]},
    )
    found = list(grid.combinations())
    assert sum(isinstance(each, TrainingSetup) for each in found) == 4
    reasons = [each.reason for each in found if isinstance(each, Impossible)]
    assert len(reasons) == 2
    assert all("stage 3" in reason for reason in reasons)


def test_the_global_batch_fixes_the_accumulation() -> None:
    grid = Grid(axes={"num_gpus": [8, 16], "micro_batch_size": [2, 4, 3]}, global_batch_size=64)
    steps = [
        (setup.num_gpus, setup.micro_batch_size, setup.gradient_accumulation_steps)
        for setup in grid.setups()
    ]
    assert steps == [(8, 2, 4), (16, 2, 2), (8, 4, 2), (16, 4, 1)]


@pytest.mark.parametrize(
    ("entry", "left"),
    [
        pytest.param({"zero_stage": 3}, 2, id="one value"),
        pytest.param({"zero_stage": [2, 3]}, 0, id="a list"),
        pytest.param({"zero_stage": 3, "num_gpus": 8}, 3, id="all have to match"),
        pytest.param({"engine": "deepspeed"}, 0, id="a default"),
        pytest.param({"precision": "bf16-master", "num_gpus": 16}, 2, id="an engine's default"),
        pytest.param({"num_nodes": 2}, 2, id="nodes"),
    ],
)
def test_exclusions(entry: dict[str, Any], left: int) -> None:
    grid = Grid(axes={"num_gpus": [8, 16], "zero_stage": [2, 3]}, exclude=(entry,))
    assert sum(1 for _ in grid.setups()) == left


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param({"axes": {"zero_stag": 2}}, "Did you mean 'zero_stage'", id="axis"),
        pytest.param({"axes": {"zero_stage": 7}}, "not one of 0, 1, 2, 3", id="value"),
        pytest.param({"axes": {"micro_batch_size": []}}, "no values", id="empty"),
        pytest.param({"exclude": ({"zero_stag": 2},)}, "Did you mean 'zero_stage'", id="exclusion"),
        pytest.param({"exclude": ({},)}, "leave out everything", id="empty exclusion"),
        pytest.param({"global_batch_size": 0}, "at least 1", id="batch"),
        pytest.param({"global_batch_size": "8"}, "whole number", id="batch of text"),
        pytest.param(
            {"global_batch_size": 8, "axes": {"gradient_accumulation_steps": [1]}},
            "not both",
            id="batch and accumulation",
        ),
    ],
)
def test_a_bad_grid_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        Grid(**given)


def test_a_global_batch_that_does_not_divide_says_so() -> None:
    with pytest.raises(SetupError, match="not a multiple of micro_batch_size"):
        with_global_batch(TrainingSetup(num_gpus=8, micro_batch_size=3), 64)


def test_options_of_the_engine_may_be_an_axis() -> None:
    options = [{"overlap_comm": True}, {"overlap_comm": False}]
    grid = Grid(axes={"num_gpus": 8, "engine_options": options})
    assert [dict(setup.engine_options) for setup in grid.setups()] == options
