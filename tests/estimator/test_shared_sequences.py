"""Setups whose ranks share each sequence: what is counted, and what is refused, with what to do."""

from typing import Any

import pytest

import memplan
from memplan.errors import MemplanError, SetupError
from memplan.training.setup import TrainingSetup

SHARED: dict[str, Any] = {
    "num_gpus": 8, "engine": "fsdp", "context_parallel": 8, "seq_len": 131072, "checkpointing": "full",
}  # fmt: skip


def test_every_tensor_of_tokens_is_cut() -> None:
    alone = memplan.estimate("llama-3.1-8b", TrainingSetup(**{**SHARED, "context_parallel": 1}))
    shared = memplan.estimate("llama-3.1-8b", TrainingSetup(**SHARED))
    # Parameters stay sharded over all GPUs; hidden states, logits and their gradients are an eighth.
    parts = [each.phases["backward"].components["logits_and_loss"] for each in (alone, shared)]
    assert parts[0] == pytest.approx(8 * parts[1])
    parts = [each.phases["backward"].components["parameters"] for each in (alone, shared)]
    assert parts[0] == parts[1]
    assert any("shared by 8 ranks" in text for text in shared.assumptions)
    assert shared.setup.data_parallel == 1
    assert shared.setup.gradient_ranks == 8


def test_all_scores_are_counted() -> None:
    alone = memplan.estimate("llama-3.1-8b", TrainingSetup(**{**SHARED, "context_parallel": 1}))
    shared = memplan.estimate("llama-3.1-8b", TrainingSetup(**SHARED))
    assert shared.flops == alone.flops


@pytest.mark.parametrize(
    ("model", "fields", "told"),
    [
        pytest.param("llama-3.1-8b", {"seq_len": 131070}, "131070 = 16 x 8191 + 14", id="length"),
        pytest.param("llama-3.1-8b", {"context_parallel": 3}, "not divisible", id="gpus"),
        pytest.param("gemma-2-9b", {}, "a window alone", id="window"),
        pytest.param("t5-3b", {}, "only decoders", id="encoder-decoder"),
        pytest.param("llama-3.1-8b", {"attention": "eager"}, "attention: eager", id="eager"),
        pytest.param("llama-3.1-8b", {"engine": "fsdp1"}, "engine is fsdp1", id="engine"),
        pytest.param(
            "llama-3.1-8b",
            {"engine": "deepspeed", "context_parallel": 4, "tensor_parallel": 2},
            "AutoTP beside context_parallel", id="Ulysses and TP",
        ),
        pytest.param("llama-3.1-8b", {"job": "dpo"}, "job: is not modelled", id="job"),
        pytest.param(
            "llama-3.1-8b", {"context_parallel": 1, "context_parallel_kind": "ring"},
            "give it too", id="kind alone",
        ),
        pytest.param(
            "llama-3.1-8b", {"engine": "ddp", "context_parallel_kind": "all-to-all"},
            "modelled for deepspeed", id="Ulysses under DDP",
        ),
        pytest.param(
            "qwen2-7b", {"engine": "deepspeed"}, "28 = 8 x 3 + 4", id="heads",
        ),
        pytest.param(
            "llama-3.1-8b", {"context_parallel_kind": "ulysses"}, "'all-to-all'", id="spelling"
        ),
    ],
)  # fmt: skip
def test_refusals(model: str, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(SetupError, match=told.replace("+", r"\+")):
        memplan.estimate(model, TrainingSetup(**{**SHARED, **fields}))


@pytest.mark.parametrize(
    ("model", "refusal"), [("gemma-3-4b", "a window"), ("qwen3.5-9b", "not all")]
)
def test_classes_of_their_own_share_every_layer(model: str, refusal: str) -> None:
    """Windows and recurrent layers are a stack's own classes' business: each rank has its tokens of them."""
    fields = {**SHARED, "context_parallel": 2, "seq_len": 4096, "checkpointing": "none"}
    with pytest.raises(SetupError, match=refusal):
        memplan.estimate(model, TrainingSetup(**fields))
    own = {"engine_options": {"context_parallel_in_classes": True}}
    kept = []
    for degree in (2, 8):
        setup = TrainingSetup(
            **{**fields, **own, "context_parallel": degree, "images_per_sample": 0}
        )
        found = memplan.estimate(model, setup)
        kept.append(found.phases["forward"].components["activations"])
        assert any("by the model's own classes" in text for text in found.assumptions)
    assert kept[0] == pytest.approx(4 * kept[1], rel=1e-3)
    with pytest.raises(SetupError, match="no ranks share sequences"):
        memplan.estimate(model, TrainingSetup(**{**fields, **own, "context_parallel": 1}))


def test_deepspeed_shares_heads() -> None:
    shared = memplan.estimate(
        "llama-3.1-8b", TrainingSetup(**{**SHARED, "engine": "deepspeed", "zero_stage": 3})
    )
    assert any("Ulysses" in text for text in shared.assumptions)
    # Gradients are added up in fp32 where ranks share sequences; a flag for overflow is there from the beginning.
    assert shared.phases["step"].components["communication_buffers"] == 4 * 500_000_000 + 512


def test_deepspeed_reduces_a_rings_gradients_as_any_ranks() -> None:
    """Only of its own Ulysses it knows that sequences are shared, and adds up in fp32 (``seq_parallel_communication_data_type``)."""
    buckets = []
    for kind in ("ring", "all-to-all"):
        setup = TrainingSetup(
            num_gpus=8, engine="deepspeed", zero_stage=2, context_parallel=2, context_parallel_kind=kind, seq_len=4096,
            engine_options={"reduce_bucket_size": 10**9}, checkpointing="full",
        )  # fmt: skip
        found = memplan.estimate("llama-3.2-1b", setup)
        buckets.append(found.phases["backward"].components["communication_buffers"])
    # What is beside the buckets at the fullest moment, 54 MB of 7.8 GB, comes once.
    assert buckets[1] == pytest.approx(2 * buckets[0], rel=0.0075)


def test_a_card_without_such_a_kernel() -> None:
    with pytest.raises(MemplanError, match="goes through math"):
        memplan.estimate("llama-3.1-8b", TrainingSetup(**SHARED, precision="fp16"), gpu="v100")
