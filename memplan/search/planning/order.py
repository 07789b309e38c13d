"""Which of two setups of a plan comes first, and how far one is from another."""

from math import floor, log

from memplan.search.planning.concessions import order_of
from memplan.search.planning.degrees import degrees_of
from memplan.search.planning.goal import Goal, Objective, PlannedSetup
from memplan.search.planning.space import Candidate, saving
from memplan.training.choices_of_kernels.kernels import KernelPreset
from memplan.training.setup import TrainingSetup

EQUAL_SPEED = 0.02
"""Setups whose speeds differ by less are equals, and the simplest of them comes first."""


def rank_of(
    goal: Goal,
    candidate: Candidate | PlannedSetup,
    setup: TrainingSetup,
    per_gpu: float,
    num_layers: int,
) -> tuple[float, ...]:
    """A setup's place among those of a plan, the smallest first.

    ``per_gpu`` is its speed; where that is the most it can be, so is the place the best it can have.
    """
    objective = goal.objective
    lost = lost_of(goal, candidate)
    flushes = isinstance(candidate, PlannedSetup) and candidate.flushes
    batch = setup.micro_batch_size * setup.data_parallel
    simple = (
        degrees_of(setup).size, candidate.simplicity, setup.kernels is KernelPreset.LIGER,
        saving(setup.checkpointing),
        -setup.micro_batch_size,
    )  # fmt: skip
    total = bucket(per_gpu * setup.num_gpus)
    if objective is Objective.COST:
        return (*lost, flushes, bucket(per_gpu), setup.num_gpus, *simple)
    if objective is Objective.GPUS:
        return (*lost, setup.num_gpus, flushes, bucket(per_gpu), *simple)
    if objective is Objective.BATCH:
        return (*lost, -batch, total, *simple)
    if objective is Objective.SEQ_LEN:
        return (*lost, -(setup.seq_len or 0), total, *simple)
    if objective is Objective.LAYERS:
        return (*lost, -num_layers, total, *simple)
    return (*lost, flushes, total, setup.num_gpus, *simple)


def lost_of(goal: Goal, candidate: Candidate | PlannedSetup) -> tuple[int, int, int]:
    """What is given up for it to fit, the least first.

    Where something may be given up, that comes before sending states over the host's link in every step: who allows QLoRA
    has no use for a step of minutes.
    """
    offloads = (
        candidate.variant.offloads if isinstance(candidate, Candidate) else candidate.offloads
    )
    waits = int(offloads and bool(goal.allow))
    return waits, order_of(candidate.given_up), candidate.tier


def bucket(speed: float) -> float:
    """Speeds as steps of ``EQUAL_SPEED``, fastest first."""
    return -floor(log(speed) / log(1 + EQUAL_SPEED))


def distance(candidate: Candidate, fitting: PlannedSetup) -> tuple[float, ...]:
    """How far a setup that fits is from one that does not; the fewest and cheapest changes first."""
    one, other = candidate.setup, fitting.setup
    split, as_split = degrees_of(one), degrees_of(other)
    changes = (
        1.0 * (one.checkpointing != other.checkpointing)
        + 2.0 * (one.chosen_engine is not other.chosen_engine)
        + 1.0 * (one.zero_stage is not other.zero_stage)
        + 1.0 * (one.fsdp_strategy is not other.fsdp_strategy)
        + 2.0 * (one.offload_optimizer is not other.offload_optimizer)
        + 2.0 * (one.offload_param is not other.offload_param)
        + 3.0 * (candidate.tier != fitting.tier)
        + 3.0 * abs(order_of(candidate.given_up) - order_of(fitting.given_up))
        + 2.0 * sum(mine != theirs for mine, theirs in zip(split, as_split, strict=True))
        + 4.0 * (one.num_gpus != other.num_gpus)
    )
    return (changes, other.num_gpus, fitting.simplicity)
