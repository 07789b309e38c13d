"""Blocks of Liger's kernels, against the events of PyTorch's CUDA build with liger-kernel 0.8.5."""

from dataclasses import replace
from typing import Any

import pytest

from memplan.estimator.job import prepared
from memplan.memory.programs import program_of
from memplan.memory.replaying.ledger import Ledger
from memplan.memory.replaying.replay import Replayer
from memplan.memory.required import PlayedRun
from memplan.memory.runtime import NUM_HANDLES, workspace_bytes
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 128256,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA2: dict[str, Any] = {
    "model_type": "gemma2", "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 2816, "vocab_size": 128000,
    "max_position_embeddings": 4096, "sliding_window": 1024, "query_pre_attn_scalar": 128,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
MIB = 2**20


def ledger_of(config: dict[str, Any], gpu: str, precision: str) -> Ledger:
    model, card = load_model(config), load_gpu(gpu)
    setup = TrainingSetup(
        micro_batch_size=2, seq_len=1024, kernels="liger", precision=precision,  # type: ignore[arg-type]
        attention="eager" if config is GEMMA2 else "sdpa",  # type: ignore[arg-type]
    ).resolve(model.context_length, has_bf16=True, family=model.family)  # fmt: skip
    ledger = Ledger()
    workspace = workspace_bytes(card.compute_capability) // NUM_HANDLES
    given = prepared(model, setup, card).rank_input
    program_of(given, ledger, workspace_bytes=workspace).run(num_steps=3)
    return ledger


@pytest.mark.parametrize(
    ("config", "gpu", "precision", "requested", "reserved", "least"),
    [
        pytest.param(LLAMA, "h100", "bf16", 2361451100, 2572, 2572, id="bf16"),
        pytest.param(LLAMA, "h100", "bf16-amp", 4804754052, 4912, 4654, id="autocast"),
        pytest.param(LLAMA, "h100", "fp32", 5002558052, 5122, 4928, id="fp32"),
        pytest.param(LLAMA, "v100-32gb", "bf16-amp", 5447596644, 5578, 5576, id="before Ampere"),
        pytest.param(GEMMA2, "h100", "bf16", 1815206506, 2116, 1914, id="Gemma 2"),
    ],
)
def test_what_a_run_needs(
    config: dict[str, Any], gpu: str, precision: str, requested: int, reserved: int, least: int
) -> None:
    ledger = ledger_of(config, gpu, precision)
    run = PlayedRun(lambda: Replayer(ledger.events, ledger.streams, ledger.cycle, expandable=False))
    assert run.peaks.requested_bytes == pytest.approx(requested, rel=5e-5)
    assert run.peaks.reserved_bytes // MIB == reserved
    # The record's three steps alone; what is needed is needed by all later ones too.
    assert least <= run.required_bytes // MIB <= least + 4


def test_what_the_forward_pass_made_is_handed_over_as_it_lies() -> None:
    """Between forward and step nothing as large as the head comes but its gradient."""
    events = ledger_of(LLAMA, "h100", "bf16").events
    head = 2 * 128256 * 1024
    _, _, gradient, *later = [number for number, event in enumerate(events) if event == head]
    assert events.index(~gradient) > later[1], "AdamW's two states come before it goes"


def test_cards_before_ampere_have_a_tape_of_their_own() -> None:
    model = load_model(LLAMA)
    setup = TrainingSetup(seq_len=256, kernels="liger", precision="fp16-amp")  # type: ignore[arg-type]
    resolved = replace(setup, attention="eager").resolve(model.context_length)  # type: ignore[arg-type]
    t4, a100, v100 = (
        prepared(model, resolved, load_gpu(gpu)).walked for gpu in ("t4", "a100-80gb", "v100-32gb")
    )
    assert not t4.options.is_ampere
    assert not v100.options.is_ampere
    assert a100.options.is_ampere
