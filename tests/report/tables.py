"""A comparison and a plan, for tests of what tables say."""

from functools import cache

import memplan
from memplan.estimator import Estimate
from memplan.report.estimates.printed import comparison_columns
from memplan.report.terminal.blocks import Column
from memplan.search.planning.goal import Plan


@cache
def answers() -> tuple[Estimate, ...]:
    """One setup on two cards."""
    model = memplan.load_model("gpt2")
    setup = memplan.TrainingSetup(
        num_gpus=8, engine="deepspeed", zero_stage=3, offload_optimizer="cpu"
    )
    return tuple(memplan.estimate(model, setup, gpu=name) for name in ("v100-32gb", "h100-80gb"))


def comparison() -> list[Column]:
    """The columns of two cards."""
    return comparison_columns([list(answers())])


@cache
def plan() -> Plan:
    """A small one."""
    goal = memplan.Goal(
        num_gpus=(2,), engines=("deepspeed",), checkpointing=("none",), allow=("lora",)
    )
    return memplan.plan(memplan.load_model("gpt2"), goal, gpu="t4")
