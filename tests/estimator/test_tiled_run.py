"""Networks and losses that run in tiles: what they save, what they cost, and what is refused."""

import re
from typing import Any

import pytest

import memplan
from memplan.errors import SetupError
from memplan.training.setup import TrainingSetup

LONG: dict[str, Any] = {
    "num_gpus": 8, "engine": "deepspeed", "zero_stage": 3, "seq_len": 32768, "context_parallel": 4,
    "checkpointing": "full",
}  # fmt: skip


def test_tiles_save_memory_and_take_time() -> None:
    plain = memplan.estimate("llama-3.1-8b", TrainingSetup(**LONG))
    tiled = memplan.estimate("llama-3.1-8b", TrainingSetup(**LONG, mlp_tiles=0, loss="tiled"))
    assert tiled.peak_bytes < plain.peak_bytes - 4 * 2**30
    assert "networks in as many tiles as ALST's recipes have" in tiled.assumptions
    assert tiled.flops.recomputation > plain.flops.recomputation
    assert tiled.flops.forward == plain.flops.forward


def test_more_tiles_need_less() -> None:
    peaks = [
        memplan.estimate(
            "llama-3.1-8b", TrainingSetup(**LONG, loss="tiled", loss_tiles=count)
        ).peak_bytes
        for count in (2, 4, 8)
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


@pytest.mark.parametrize(
    ("model", "fields", "said"),
    [
        pytest.param("llama-3.1-8b", {"engine": "fsdp", "zero_stage": None}, "fsdp", id="fsdp"),
        pytest.param("llama-3.1-8b", {"engine": "ddp", "zero_stage": None}, "ddp", id="ddp"),
        pytest.param("mixtral-8x7b", {}, "plain feed-forward", id="mixture"),
        pytest.param("llama-3.1-8b", {"adapter": {"lora": 8}}, "adapter", id="adapter"),
        pytest.param("llama-3.1-8b", {"mlp_tiles": -1}, "mlp_tiles: must be from 0", id="below"),
        pytest.param("llama-3.1-8b", {"loss_tiles": 4}, "name one of them as loss", id="no loss"),
        pytest.param("qwen3-0.6b", {"loss": "tiled"}, "token table", id="tied"),
    ],
)
def test_what_does_not_run_is_refused(model: str, fields: dict[str, Any], said: str) -> None:
    usual = {"num_gpus": 8, "engine": "deepspeed", "zero_stage": 2, "mlp_tiles": 4}
    with pytest.raises(SetupError, match=re.escape(said)):
        memplan.estimate(model, TrainingSetup(**{**usual, **fields}))
