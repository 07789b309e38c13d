from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.search.planning.speed import RelativeSpeed, exchanged_elements, relative_speed
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

MODEL = load_model("llama-3.2-1b")


def speed(gpu: str = "h100", **setup: Any) -> RelativeSpeed:
    answer = estimate(MODEL, TrainingSetup(**{"seq_len": 2048, **setup}), load_gpu(gpu))
    return relative_speed(answer, active_params=answer.num_params)


def test_recomputation_costs_a_third() -> None:
    plain, full = speed(micro_batch_size=64), speed(micro_batch_size=64, checkpointing="full")
    assert full.recomputation == pytest.approx(1 / 3)
    assert full.per_gpu / plain.per_gpu == pytest.approx(3 / 4)
    assert speed(checkpointing=0.5).recomputation == pytest.approx(1 / 6)


def test_small_micro_batches_are_slow_and_accumulating_does_not_help() -> None:
    assert speed(micro_batch_size=8).per_gpu > speed(micro_batch_size=1).per_gpu
    slow = speed(micro_batch_size=1, gradient_accumulation_steps=8)
    assert slow.per_gpu < speed(micro_batch_size=8).per_gpu


def test_offloading_costs_more_the_fewer_tokens_share_a_step() -> None:
    setup = {"num_gpus": 8, "zero_stage": 2, "offload_optimizer": "cpu"}
    once, often = speed(**setup), speed(**setup, gradient_accumulation_steps=8)
    assert once.offload > often.offload > 0
    assert speed(num_gpus=8, zero_stage=2).offload == 0


def test_slow_links_show_only_where_computing_does_not_hide_them() -> None:
    setup = {"num_gpus": 8, "zero_stage": 3, "seq_len": 128}
    assert speed("rtx4090", **setup).communication > speed("h100", **setup).communication
    assert speed("h100", num_gpus=8, zero_stage=3, micro_batch_size=8).communication == 0


@pytest.mark.parametrize(
    ("setup", "times"),
    [
        pytest.param({}, 0, id="one GPU"),
        pytest.param(
            {"num_gpus": 8, "engine": "ddp", "gradient_accumulation_steps": 4}, 2, id="DDP"
        ),
        pytest.param({"num_gpus": 8, "zero_stage": 1, "gradient_accumulation_steps": 4}, 3, id="1"),
        pytest.param({"num_gpus": 8, "zero_stage": 2, "gradient_accumulation_steps": 4}, 9, id="2"),
        pytest.param(
            {"num_gpus": 8, "zero_stage": 3, "gradient_accumulation_steps": 4}, 12, id="3"
        ),
        pytest.param({"num_gpus": 8, "engine": "fsdp"}, 3, id="FSDP"),
        pytest.param(
            {"num_gpus": 8, "engine": "fsdp", "fsdp_strategy": "shard_grad_op"}, 2, id="SGO"
        ),
    ],
)
def test_what_crosses_the_links(setup: dict[str, Any], times: int) -> None:
    assert exchanged_elements(TrainingSetup(**setup).resolve()) == times
