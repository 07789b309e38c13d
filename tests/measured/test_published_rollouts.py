"""Completions, and steps that wait for them, beside what others measured: vLLM's own benchmark, NeMo RL's steps of GRPO.

``ENGINE_STEP_S`` was taken from what vLLM's benchmark measured on an H200; an H100's and an A100's rows were looked at after that.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import memplan
from memplan.compute.rates import rates_of
from memplan.estimator.job import Job
from memplan.estimator.time.side_passes import generation_seconds
from memplan.estimator.time.step_time import StepTime, time_of
from memplan.hardware.network import network_of
from tests.accuracy.comparison import read_records

ROWS = list(read_records(Path(__file__).parent.parent / "data" / "published_rollouts.jsonl"))
PROMPT = 100
"""Tokens of a prompt of NeMo RL's, which its page does not state."""
GENERATED_WITHIN = 0.12
STEP_MEDIAN, IN_RANGE = 0.35, 5
"""Of NeMo RL's steps the mixtures take twice as long as said: six rows, five in their range."""


def generated_s(row: Mapping[str, Any]) -> float:
    """So many completions at once on GPUs of their own, which hold the weights together."""
    setup = memplan.TrainingSetup(
        num_gpus=row["num_gpus"], seq_len=row["prompt"] + row["completion"],
        micro_batch_size=row["sequences"] // row["num_gpus"],
        engine="fsdp" if row["num_gpus"] > 1 else "ddp",
        job=f"grpo:rollout=server,completion_length={row['completion']}",
    )  # fmt: skip
    job = Job.of(memplan.load_model(row["model"]), setup, memplan.load_gpu(row["gpu"]))
    return generation_seconds(job, network_of(job.gpu, gpus_per_node=8), rates_of(job.gpu))


def step(row: Mapping[str, Any]) -> StepTime:
    """A whole step of GRPO."""
    setup = memplan.TrainingSetup(
        num_gpus=row["num_gpus"], seq_len=row["average_tokens"], engine="fsdp", checkpointing="full",
        gradient_accumulation_steps=row["sequences"] // row["num_gpus"],
        job=f"grpo:rollout=vllm,completion_length={row['average_tokens'] - PROMPT},gpu_memory_utilization=0.6,"
        f"sleep=1,longest_completion={row['longest_tokens'] - PROMPT},reference=same,"
        f"scoring_batch_size={row['scored_at_once']}",
    )  # fmt: skip
    return time_of(Job.of(memplan.load_model(row["model"]), setup, memplan.load_gpu(row["gpu"])))


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row["id"]) for row in ROWS if row["is_generation"]]
)
def test_completions_take_what_vllm_measures(row: Mapping[str, Any]) -> None:
    assert generated_s(row) == pytest.approx(row["measured"], rel=GENERATED_WITHIN)


def test_steps_that_generate(capsys: pytest.CaptureFixture[str]) -> None:
    errors, inside = [], 0
    for row in ROWS:
        if row["is_generation"]:
            continue
        found = step(row)
        errors.append(row["measured"] / found.expected_s - 1)
        inside += found.low_s <= row["measured"] <= found.high_s
        with capsys.disabled():
            sys.stdout.write(
                f"\n{row['id']:36} measured {row['measured']:6.1f} said {found.expected_s:6.1f} "
                f"({found.low_s:.0f}-{found.high_s:.0f}) {errors[-1]:+.0%}"
            )
    assert median(map(abs, errors)) <= STEP_MEDIAN
    assert inside >= IN_RANGE
