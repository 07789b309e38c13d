"""Layers that stage 3 of ZeRO takes in turn are passed over: what is found is what all of them, one by one, show."""

import random
from collections import Counter
from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.estimator.recording import record_and_walk, shared_options, tape_options
from memplan.memory import accounts
from memplan.memory.accounts import rank_account, step_visits
from memplan.memory.programs.deepspeed_stages.zero3 import ShardedParametersProgram
from memplan.memory.rank import RankInput
from memplan.memory.tally import Turns
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

MODELS: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {
            "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 23, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 172, "vocab_size": 503,
        },
        "causal-lm",
    ),
    (
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 17, "n_head": 4, "vocab_size": 503, "n_positions": 512},
        "causal-lm",
    ),
    (
        {
            "model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 172, "num_layers": 12,
            "num_decoder_layers": 15, "num_heads": 4, "vocab_size": 503,
        },
        "seq2seq-lm",
    ),
    (
        {
            "model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 14, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 503, "num_local_experts": 4,
        },
        "causal-lm",
    ),
    (
        {
            "model_type": "albert", "hidden_size": 64, "embedding_size": 32, "num_hidden_layers": 12,
            "num_attention_heads": 4, "intermediate_size": 172, "vocab_size": 503,
        },
        "masked-lm",
    ),
)  # fmt: skip
NUMBERS = (0, 3_000, 20_000, 60_000, 200_000, 1_000_000_000)
CHOICES: dict[str, tuple[object, ...]] = {
    "stage3_prefetch_bucket_size": NUMBERS,
    "stage3_max_live_parameters": NUMBERS,
    "stage3_max_reuse_distance": NUMBERS,
    "stage3_param_persistence_threshold": (0, 100, 5_000),
    "reduce_bucket_size": (3_000, 20_000, 60_000, 500_000_000),
    "overlap_comm": (False, True),
    "contiguous_gradients": (False, True),
    "stage3_allgather_sequential": (False, True),
}
FIELDS: dict[str, tuple[object, ...]] = {
    "num_gpus": (1, 2, 7, 64),
    "gradient_accumulation_steps": (1, 1, 2, 4),
    "checkpointing": ("none", "full", 0.5),
    "offload_optimizer": ("none", "none", "cpu"),
    "offload_param": ("none", "none", "cpu"),
    "precision": ("bf16-master", "fp16-master", "fp32"),
}


def drawn(rng: random.Random) -> RankInput | None:
    """A job at random; None: it cannot be."""
    model = load_model(*rng.choice(MODELS))
    fields: dict[str, Any] = {name: rng.choice(values) for name, values in FIELDS.items()}
    options = {name: rng.choice(values) for name, values in CHOICES.items() if rng.random() < 0.7}
    try:
        resolved = TrainingSetup(
            engine="deepspeed", zero_stage=3, seq_len=16, engine_options=options, **fields
        ).resolve()
        tape, passes = record_and_walk(model, shared_options(model, tape_options(resolved, None)))
    except SetupError:
        return None
    return RankInput(tape=tape, passes=passes, setup=resolved)


@pytest.mark.parametrize("count", [40, pytest.param(1500, marks=pytest.mark.fuzz)])
def test_what_is_passed_over_shows_nothing_new(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, skipped = random.Random(28), Counter[bool]()
    found = Turns.are_over

    def are_over(self: Turns, repetition: int, copy: int) -> bool:
        is_over = found(self, repetition, copy)
        skipped[is_over] += 1
        return is_over

    monkeypatch.setattr(Turns, "are_over", are_over)
    for given in (drawn(rng) for _ in range(count)):
        if given is None:
            continue
        answers = []
        for is_told in (True, False):
            accounts._outlined.cache_clear()
            with monkeypatch.context() as patched:
                if not is_told:
                    patched.setattr(ShardedParametersProgram, "standing_at", lambda *_: None)
                visits = [(each, dict(each.exchanges)) for each in step_visits(given)]
                answers.append((rank_account(given), visits))
        assert answers[0] == answers[1], given.setup
    accounts._outlined.cache_clear()
    # Forward turns of mixtures that are not run again are all played: each layer's gathered experts stay until backward,
    # so that none begins as the one before did.
    assert 0.09 < skipped[True] / skipped[False] < 1
