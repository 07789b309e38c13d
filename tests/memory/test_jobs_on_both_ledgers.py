"""What jobs of several models hold is the same on the ledger that adds up and on the one that plays out."""

from itertools import product
from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.estimator.job import prepared
from memplan.memory.accounts import rank_account
from memplan.memory.likeness import MICRO_BATCHES
from memplan.memory.programs import program_of
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Part
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.memory.test_tally import ENGINES, NOT_FULLER, MarkedLedger, heights

MODEL = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 3000,
    "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip
JOBS = (
    "dpo", "dpo:reference=precomputed", "dpo:log_probabilities=fused", "orpo", "simpo", "cpo", "kto",
    "reward", "distillation", "grpo:reference=same", "grpo:rollout=server", "ppo",
    "sft", "sft:generate_batch_size=4",
)  # fmt: skip
COMPARED = (
    "one GPU", "ddp views", "fsdp", "fsdp1 offloaded", "bf16 optimizer", "zero2", "zero3",
    "zero3 offloaded",
)  # fmt: skip
"""Of the engines, those that differ in how they treat a second model."""
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": "full", "gradient_accumulation_steps": 2, "micro_batch_size": 2},
    {"adapter": {"lora": {"rank": 4, "targets": "all-linear"}}},
    {"ema": "fp32"},
    {"evaluation": "4:batches_kept=3"},
    {"evaluation": "3:batches_kept=9,accumulation_steps=5", "gradient_accumulation_steps": 2},
)


def given_for(fields: dict[str, Any]) -> RankInput:
    """A job, with all that it has beside the model."""
    spec = load_model(MODEL, "causal-lm")
    resolved = TrainingSetup(**{"seq_len": 96, **fields}).resolve()
    return prepared(spec, resolved, None).rank_input


def played(given: RankInput, rank: int) -> dict[str, int]:
    """The highest sum of blocks in each part of the second step [bytes]."""
    ledger = MarkedLedger()
    program = program_of(given, ledger, workspace_bytes=0, rank=rank)
    num_micro_batches = min(given.setup.gradient_accumulation_steps, MICRO_BATCHES)
    program.start()
    for step in range(2):
        program.train(step, num_micro_batches=num_micro_batches)
        program.evaluate(step)
    return heights(ledger)


@pytest.mark.parametrize("engine", COMPARED)
@pytest.mark.parametrize("job", JOBS)
def test_what_is_added_up_is_what_is_played_out(job: str, engine: str) -> None:
    num_compared = 0
    for way, last in product(WAYS, (True,)):
        try:
            given = given_for({**ENGINES[engine], **way, "job": job})
            rank = given.setup.num_gpus - 1 if last else 0
            account = rank_account(given, rank=rank)
        except SetupError:
            continue
        inputs = sum(given.tape.inputs) or 512
        found = played(given, rank)
        assert account.held_bytes == found.pop("held"), (way, rank)
        first = found.pop(Part.FIRST_STEP.value)
        phases = {phase.name: phase.peak_bytes for phase in account.phases if phase.name != "save"}
        shown = phases.pop(Part.FIRST_STEP.value, None)
        assert phases == found, (way, rank, inputs)
        assert shown is None or shown <= first * NOT_FULLER
        num_compared += 1
    assert num_compared


@pytest.mark.parametrize("job", ["dpo", "orpo", "grpo:rollout=server"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_logits_that_leave_a_compiled_graph_stay_the_heads(job: str, engine: str) -> None:
    """They count there until the log-probabilities' backward pass lets them go, so nothing falls below 0."""
    given = given_for(
        {"job": job, "compile": "model", "precision": "fp32", "num_gpus": 2, "engine": engine}
    )
    account = rank_account(given, rank=0)
    assert all(entry.num_bytes >= 0 for phase in account.phases for entry in phase.entries)
