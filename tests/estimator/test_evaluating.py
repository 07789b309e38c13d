"""What evaluations, checkpoints and loaders take of a run, against steps that are told apart."""

import pytest

import memplan
from memplan.errors import InputError
from memplan.estimator.job import Job
from memplan.estimator.time.evaluating import Evaluations, evaluation_seconds
from memplan.estimator.time.run_cost import TimeQuestion
from memplan.estimator.time.site import USUAL_SITE, Site
from memplan.estimator.time.step_time import time_of
from memplan.estimator.time.timer import DATA
from memplan.report.estimates.times import timed

CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4,
    "num_attention_heads": 32, "vocab_size": 8192, "max_position_embeddings": 8192,
}  # fmt: skip
SETUP = {"seq_len": 2048, "num_gpus": 8, "engine": "fsdp", "micro_batch_size": 4}
MODEL = memplan.load_model(CONFIG, "causal-lm")


def estimate(**changes: object) -> memplan.Estimate:
    return memplan.estimate(MODEL, memplan.TrainingSetup(**SETUP | changes), gpu="h100")


def test_an_evaluation_is_forward_passes_alone() -> None:
    """A third of a step for each of its micro-batches, in batches of its own, and no less for what checkpointing lets go."""
    answer = estimate(gradient_accumulation_steps=8)
    step_s = time_of(Job.of(MODEL, answer.setup, answer.gpu)).expected_s
    once, twice = (
        evaluation_seconds(answer, Evaluations(every_steps=100, examples=each), USUAL_SITE)
        for each in (32, 64)
    )
    assert twice == 2 * once
    # Kernels' starts and the optimizer's share are no third of a step: 1.2 % here.
    assert once == pytest.approx(step_s / 8 / 3, rel=0.03)
    again = estimate(gradient_accumulation_steps=8, checkpointing="full")
    assert evaluation_seconds(again, Evaluations(every_steps=1, examples=32), USUAL_SITE) == once
    short = estimate(evaluation={"batch_size": 8, "seq_len": 1024})
    assert evaluation_seconds(short, Evaluations(every_steps=1, examples=64), USUAL_SITE) < twice


def test_a_pipeline_runs_empty_after_each_steps_worth() -> None:
    setup = {"num_gpus": 4, "engine": "megatron", "micro_batch_size": 1, "pipeline_parallel": 4}
    answer = estimate(**setup, gradient_accumulation_steps=8)
    one, eight, sixteen = (
        evaluation_seconds(answer, Evaluations(every_steps=1, examples=each), USUAL_SITE)
        for each in (1, 8, 16)
    )
    assert eight / one == pytest.approx((8 + 3) / (1 + 3))
    assert sixteen == 2 * eight


def test_shares_of_a_runs_days() -> None:
    """What evaluations and checkpoints take is in the days, and of them."""
    answer = estimate()
    plain = timed(answer, TimeQuestion(tokens=10**12))
    evaluations = Evaluations(every_steps=100, examples=3200)
    asked = timed(answer, TimeQuestion(tokens=10**12, evaluations=evaluations, save_every_s=60.0))
    assert plain.time is not None
    assert plain.goodput is not None
    assert asked.goodput is not None
    taken_s = evaluation_seconds(answer, evaluations, USUAL_SITE)
    ratio = asked.goodput.evaluating_share / asked.goodput.share
    assert ratio == pytest.approx(taken_s / (100 * plain.time.expected_s))
    assert asked.goodput.saving_share == pytest.approx(
        asked.goodput.share * asked.goodput.save_s / 60
    )
    assert plain.goodput.evaluating_share == 0
    assert plain.goodput.save_every_s == plain.goodput.best_every_s == asked.goodput.best_every_s
    assert asked.goodput.share < plain.goodput.share
    failing = timed(answer, TimeQuestion(tokens=10**12, failures_per_gpu_day=1.0)).goodput
    assert failing is not None
    assert failing.failure_every_s == 86_400 / answer.setup.num_gpus
    assert failing.low_share < failing.share < failing.high_share < plain.goodput.low_share
    with pytest.raises(InputError, match="failures_per_gpu_day: must be above 0"):
        TimeQuestion(failures_per_gpu_day=0.0)
    with pytest.raises(InputError, match="every_steps: must be at least 1"):
        Evaluations(every_steps=0, examples=1)


def test_loaders_are_a_floor() -> None:
    """Where a node's samples take longer than the step, the step takes as long, and its parts say so; elsewhere they are not seen."""
    job = Job.of(MODEL, memplan.TrainingSetup(**SETUP), memplan.load_gpu("h100"))
    plain = time_of(job)
    assert time_of(job, site=Site(loaded_per_s=1e6)).expected_s == plain.expected_s
    slow = time_of(job, site=Site(loaded_per_s=8 * 4 / 10))
    assert slow.low_s == slow.expected_s == slow.high_s == pytest.approx(10.0)
    shares = {each.words: each.seconds for each in slow.shares}
    assert shares[DATA] == pytest.approx(10.0 - plain.expected_s)
    assert sum(shares.values()) == pytest.approx(10.0)
    assert sum(each.stop_s - each.start_s for each in slow.path) == pytest.approx(10.0)
    with pytest.raises(InputError, match="loader"):
        Site(loaded_per_s=0)
