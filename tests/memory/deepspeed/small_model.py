"""A small model under any setup."""

from typing import Any

from memplan.estimator.recording import record_and_walk, tape_options
from memplan.memory.rank import RankInput
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

SMALL = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 700, "vocab_size": 1003,
}  # fmt: skip
TIED = {**SMALL, "tie_word_embeddings": True}


def given_for(config: dict[str, Any], *, task: str = "causal-lm", **fields: Any) -> RankInput:
    """The small model on the tape, under this setup."""
    defaults: dict[str, Any] = {
        "engine": "deepspeed", "num_gpus": 4, "seq_len": 64, "zero_stage": 2,
        "kernel_scratch": False,
    }  # fmt: skip
    setup = TrainingSetup(**{**defaults, **fields}).resolve()
    tape, passes = record_and_walk(load_model(config, task), tape_options(setup, None))
    return RankInput(tape=tape, passes=passes, setup=setup)
