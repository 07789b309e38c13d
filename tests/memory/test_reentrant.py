"""Reentrant checkpoints under FSDP1: hooks of frozen units, and nothing gathered ahead.

Held by fms-acceleration's runs on A100s (``tests/data/published_memory.jsonl``), transformers 4.45 to 4.48: with it
39 runs of adapters on 2 and 4 GPUs are within 3 %, without it up to 30 % low; and fully trained ones within 1 %.
"""

from typing import Any

from memplan.memory.account import RankAccount
from memplan.memory.accounts import rank_account
from memplan.memory.rank import RankInput
from tests.memory.test_tally import LLAMA, given_for, played

LAYERS = LLAMA["num_hidden_layers"]
INPUT_BYTES = 4096 * 256 * 4
"""Of a layer, in fp32."""


def given(*, frozen: bool, reentrant: bool, **fields: Any) -> RankInput:
    adapter = {"adapter": {"lora": {"rank": 4, "targets": ["q_proj"]}}} if frozen else {}
    asked = {
        "engine": "fsdp1", "num_gpus": 2, "precision": "fp32", "checkpointing": "full",
        "seq_len": 4096, "loss": "cut", "engine_options": {"reentrant_checkpointing": reentrant},
    }  # fmt: skip
    return given_for("llama", {**asked, **adapter, **fields})


def account(**settings: Any) -> RankAccount:
    return rank_account(given(**settings), rank=0)


def backward(made: RankAccount) -> dict[str, int]:
    (phase,) = (each for each in made.phases if each.name == "backward")
    return dict(phase.components)


def test_what_hooks_hold_is_there_when_the_first_layer_runs_again() -> None:
    """All inputs, and the gradients of all but the first two, beside the layer itself.

    Without them the fullest moment is the last layer's, where all inputs are there too.
    """
    reentrant = backward(account(frozen=True, reentrant=True))
    plain = backward(account(frozen=True, reentrant=False))
    gradients = (LAYERS - 2) * INPUT_BYTES
    assert reentrant["temporaries"] - plain["temporaries"] == gradients
    assert sum(reentrant.values()) - sum(plain.values()) > gradients - INPUT_BYTES


def test_what_is_trained_has_no_such_hook() -> None:
    """But no unit is gathered ahead of its turn, so that less may be there at once."""
    reentrant = backward(account(frozen=False, reentrant=True))
    plain = backward(account(frozen=False, reentrant=False))
    assert sum(reentrant.values()) <= sum(plain.values())


def test_both_ledgers_and_every_batch() -> None:
    """Added up as played out, one batch after another."""
    for length in (512, 96, 200):
        for frozen in (True, False):
            asked = given(frozen=frozen, reentrant=True, seq_len=length)
            made = rank_account(asked, rank=0)
            expected = played(asked, 0)
            peaks = {phase.name: phase.peak_bytes for phase in made.phases if phase.name != "save"}
            expected.pop("first step", None)
            assert {name: expected[name] for name in peaks} == peaks, (length, frozen)
