"""transformers 4: experts that are modules of their own, and GPT-BigCode's cache under checkpointing.

Held by fms-acceleration's runs (``tests/data/published_memory.jsonl``): santacoder within 1 %, Mixtral's adapters
within 1.3 %.
"""

from typing import Any

import pytest

from memplan.memory.accounts import rank_account
from memplan.memory.rank import RankInput
from tests.memory.test_tally import MODELS, given_for, played

BIGCODE = {
    "model_type": "gpt_bigcode", "n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 4001,
    "n_positions": 2048, "multi_query": True,
}  # fmt: skip
MODELS.setdefault("gpt_bigcode", (BIGCODE, "causal-lm"))
CACHED_BYTES = 5 * 512 * (256 + 2 * 64) * 4
"""What c_attn made of 512 tokens, of which keys and values are a view, in five layers beside the last."""


def given(model: str, **fields: Any) -> RankInput:
    asked = {"engine": "ddp", "precision": "fp32", "checkpointing": "full", "kernels": "hf4"}
    return given_for(model, {**asked, **fields})


def forward(made: RankInput) -> int:
    (phase,) = (each for each in rank_account(made, rank=0).phases if each.name == "forward")
    return phase.peak_bytes


def test_the_cache_is_there_until_the_end_of_forward() -> None:
    """Of all layers beside the logits; where nothing is checkpointed there is no cache to speak of."""
    fields = {"seq_len": 512, "loss": "cut"}
    more = forward(given("gpt_bigcode", **fields)) - forward(
        given("gpt_bigcode", kernels="hf", **fields)
    )
    assert more == CACHED_BYTES
    backward = [
        {phase.name: phase.peak_bytes for phase in rank_account(made, rank=0).phases}["backward"]
        for made in (given("gpt_bigcode", **fields), given("gpt_bigcode", kernels="hf", **fields))
    ]
    assert backward[0] == backward[1]


@pytest.mark.parametrize("model", ["gpt_bigcode", "mixtral"])
@pytest.mark.parametrize("checkpointing", ["none", "full", 0.5])
def test_both_ledgers(model: str, checkpointing: object) -> None:
    made = given(model, checkpointing=checkpointing, gradient_accumulation_steps=2)
    peaks = {phase.name: phase.peak_bytes for phase in rank_account(made, rank=0).phases}
    expected = played(made, 0)
    assert {name: expected[name] for name in ("forward", "backward", "step")} == {
        name: peaks[name] for name in ("forward", "backward", "step")
    }


def test_modules_have_the_parameters_of_grouped_experts() -> None:
    modules, grouped = (
        dict(rank_account(given("mixtral", kernels=kernels), rank=0).phases[0].components)
        for kernels in ("hf4", "hf")
    )
    assert modules["parameters"] == grouped["parameters"]
