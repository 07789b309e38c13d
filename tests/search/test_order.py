"""What decides a plan's order, and in which turn: every objective's list, and what is nearest to a setup that does not fit."""

from collections.abc import Iterable
from itertools import combinations, permutations
from types import SimpleNamespace
from typing import Any

import pytest

from memplan.search.planning import order
from memplan.search.planning.concessions import Concession
from memplan.search.planning.goal import Objective
from memplan.training.choices import Offload, Recomputation, ZeroStage
from memplan.training.choices_of_kernels.kernels import KernelPreset
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup

SIMPLE = ("degrees", "simplicity", "liger", "recomputes", "small")
LOST = ("offloads", "given_up", "tier")
TURNS = {
    Objective.SPEED: (*LOST, "flushes", "slow", "gpus", *SIMPLE),
    Objective.COST: (*LOST, "flushes", "slow", "gpus", *SIMPLE),
    Objective.GPUS: (*LOST, "gpus", "flushes", "slow", *SIMPLE),
    Objective.SEQ_LEN: (*LOST, "short", "slow", *SIMPLE),
    Objective.LAYERS: (*LOST, "shallow", "slow", *SIMPLE),
}
"""What is worse in a setup, what decides first standing first (docs/sweep-and-plan.md)."""


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at of a planned setup stands in for it."""
    monkeypatch.setattr(order, "PlannedSetup", SimpleNamespace)


def place(objective: Objective, worse: set[str]) -> tuple[float, ...]:
    """Of a setup that is worse in these, and in nothing else."""
    num_gpus = 16 if "gpus" in worse else 8
    setup = TrainingSetup(
        num_gpus=num_gpus, engine=Engine.FSDP, tensor_parallel=2 if "degrees" in worse else 1,
        kernels=KernelPreset.LIGER if "liger" in worse else KernelPreset.HF,
        checkpointing=Recomputation.FULL if "recomputes" in worse else Recomputation.NONE,
        micro_batch_size=1 if "small" in worse else 2, seq_len=512 if "short" in worse else 1024,
    )  # fmt: skip
    given_up = Concession.QLORA if "given_up" in worse else Concession.NONE
    candidate: Any = SimpleNamespace(
        offloads="offloads" in worse, given_up=given_up,
        tier=int("tier" in worse), flushes="flushes" in worse, simplicity=int("simplicity" in worse),
    )  # fmt: skip
    speed = 1000.0 / (2 if "slow" in worse else 1)
    per_gpu = speed if objective is Objective.COST else speed / num_gpus
    goal: Any = SimpleNamespace(objective=objective, allow=("qlora",))
    return order.rank_of(goal, candidate, setup, per_gpu, 4 if "shallow" in worse else 8)


@pytest.mark.parametrize("objective", TURNS, ids=str)
def test_what_decides_first_outweighs_all_that_comes_behind(objective: Objective) -> None:
    turns = TURNS[objective]
    for number, each in enumerate(turns):
        assert place(objective, set(turns[number + 1 :])) < place(objective, {each}), each


def test_where_the_batch_is_wanted_the_largest_of_all_gpus_comes_first() -> None:
    """``micro_batch_size`` times the data-parallel ranks: twice as many of them are worth a smaller one."""
    small, large = (place(Objective.BATCH, {"small"} | more) for more in (set(), {"gpus"}))
    assert large == place(Objective.BATCH, {"gpus", "small"}) < small
    assert place(Objective.BATCH, set()) < place(Objective.BATCH, {"degrees"})


def test_sending_states_over_the_link_counts_only_where_something_may_be_given_up() -> None:
    candidate: Any = SimpleNamespace(offloads=True, given_up=Concession.LORA, tier=2)
    for allow, waits in (((), 0), (("qlora",), 1)):
        goal: Any = SimpleNamespace(objective=Objective.SPEED, allow=allow)
        assert order.lost_of(goal, candidate) == (waits, 2, 2)


def test_speeds_within_two_per_cent_are_equal_and_faster_ones_come_first() -> None:
    assert order.bucket(1.02**7 * 1.0001) == order.bucket(1.02**7 * 1.0199) == -7
    assert order.bucket(1.02**8 * 1.0001) == -8


USUAL: dict[str, Any] = {
    "num_gpus": 8, "chosen_engine": Engine.DEEPSPEED, "zero_stage": ZeroStage.PARAMETERS,
    "fsdp_strategy": None, "checkpointing": Recomputation.NONE, "offload_optimizer": Offload.NONE,
    "offload_param": Offload.NONE, "tensor_parallel": 1, "pipeline_parallel": 1,
    "context_parallel": 1, "virtual_stages": 1, "expert_parallel": 1,
}  # fmt: skip
CHANGES: dict[str, tuple[Any, float]] = {
    "checkpointing": (Recomputation.FULL, 1), "chosen_engine": (Engine.FSDP, 2),
    "zero_stage": (ZeroStage.OPTIMIZER, 1), "fsdp_strategy": ("full_shard", 1),
    "offload_optimizer": (Offload.CPU, 2), "offload_param": (Offload.CPU, 2),
    "tensor_parallel": (2, 2), "pipeline_parallel": (2, 2), "num_gpus": (16, 4), "tier": (1, 3),
    "given_up": (Concession.QLORA, 9),
}  # fmt: skip
"""What each change counts: what is given up by its place in that order."""


def candidate_with(changes: Iterable[str]) -> Any:
    found = {**USUAL, "tier": 0, "given_up": Concession.NONE}
    found |= {name: CHANGES[name][0] for name in changes}
    beside = {name: found.pop(name) for name in ("tier", "given_up")}
    return SimpleNamespace(setup=SimpleNamespace(**found), simplicity=5, **beside)


def test_the_nearest_that_fits_changes_least() -> None:
    """Every change alone and every two of them, there and back; then the fewest GPUs, then the simplest."""
    for names in ((), *combinations(CHANGES, 1), *combinations(CHANGES, 2)):
        count = sum(CHANGES[name][1] for name in names)
        for one, other in permutations((candidate_with(()), candidate_with(names))):
            assert order.distance(one, other) == (count, other.setup.num_gpus, 5), names
