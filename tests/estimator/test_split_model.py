"""Setups that split a model over tensor-parallel ranks, and those that cannot."""

from typing import Any

import pytest

import memplan
from memplan.errors import SetupError
from memplan.estimator.job import all_ranks
from memplan.training.setup import TrainingSetup

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
    "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
SPLIT: dict[str, Any] = {"tensor_parallel": 4, "sequence_parallel": True, "loss_parallel": True}

STUBBED = [
    # setup, card, bytes asked for at the peak, reserved, least capacity (found to 1/128 of the peak)
    pytest.param(
        {**SPLIT, "num_gpus": 4, "engine": "ddp", "micro_batch_size": 2, "precision": "bf16"},
        "a100-80gb", 2589692664, 2732589056, 2675965952, id="tp4-sp-lp",
    ),
    pytest.param(
        {"tensor_parallel": 2, "num_gpus": 2, "engine": "ddp", "micro_batch_size": 2,
         "precision": "bf16", "checkpointing": "full"},
        "h100-80gb", 3694932532, 4278190080, 4278190080, id="tp2-checkpointed",
    ),
    pytest.param(
        {**SPLIT, "num_gpus": 16, "engine": "fsdp", "seq_len": 4096,
         "engine_options": {"init_device": "meta"}},
        "a100-80gb", 2222877440, 2606759936, 2399141888, id="fsdp4-x-tp4",
    ),
]  # fmt: skip
"""PyTorch's own CUDA build and caching allocator with DTensor, on a card that is not there."""


@pytest.mark.parametrize(("setup", "gpu", "asked", "reserved", "least"), STUBBED)
def test_pytorchs_own_allocator(
    setup: dict[str, Any], gpu: str, asked: int, reserved: int, least: int
) -> None:
    model = memplan.load_model(LLAMA)
    found = memplan.estimate(model, TrainingSetup(seq_len=2048, **setup) if "seq_len" not in setup
                             else TrainingSetup(**setup), gpu=gpu)  # fmt: skip
    assert found.peak_bytes == pytest.approx(asked, rel=0.0002)
    assert found.reserved_bytes == pytest.approx(reserved, rel=0.006)
    assert found.required_bytes == pytest.approx(least, rel=0.008)
    assert found.num_params == model.num_params
    assert any("tensor parallel over" in each for each in found.assumptions)


def test_flops_are_the_whole_models() -> None:
    whole = memplan.estimate(memplan.load_model(LLAMA), TrainingSetup())
    rank = memplan.estimate(
        memplan.load_model(LLAMA), TrainingSetup(num_gpus=4, engine="ddp", **SPLIT)  # type: ignore[arg-type]
    )  # fmt: skip
    assert rank.flops.total == whole.flops.total


def test_ranks_that_split_layers_hold_the_same() -> None:
    """Neighbours split the layers; 12 x 4 rows of a weight are uneven over 5 shards."""
    model = memplan.load_model({**LLAMA, "num_hidden_layers": 2})
    setup = TrainingSetup(num_gpus=20, num_nodes=1, engine="fsdp", **SPLIT)  # type: ignore[arg-type]
    found = all_ranks(model, setup, None)
    assert sorted(rank for each in found for run in each.ranks for rank in run) == list(range(20))
    assert all(run.start % 4 == 0 and run.stop % 4 == 0 for each in found for run in each.ranks)
    assert len(found) > 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_gpus": 8, "engine": "deepspeed", "tensor_parallel": 2}, "the engine is deepspeed"),
        ({"num_gpus": 8, "engine": "fsdp1", "tensor_parallel": 2}, "the engine is fsdp1"),
        ({"num_gpus": 8, "engine": "ddp", "tensor_parallel": 2}, "name the engine fsdp"),
        ({"num_gpus": 8, "engine": "fsdp", "sequence_parallel": True}, "sequence_parallel: splits"),
        ({"num_gpus": 8, "engine": "fsdp", "loss_parallel": True}, "loss_parallel: splits"),
        ({**SPLIT, "num_gpus": 4, "engine": "ddp", "loss": "liger"}, "loss: liger"),
        ({**SPLIT, "num_gpus": 4, "engine": "ddp", "compile": "layer"}, "compile: is not modelled"),
        ({**SPLIT, "num_gpus": 4, "engine": "ddp", "optimizer": "adafactor"}, "adafactor"),
        ({**SPLIT, "num_gpus": 4, "engine": "ddp", "fp8": "torchao-tensorwise"}, "fp8: is not"),
    ],
)
def test_what_does_not_go_with_it_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        memplan.estimate(memplan.load_model(LLAMA), TrainingSetup(**fields))
