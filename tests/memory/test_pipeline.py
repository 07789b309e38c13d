"""A pipeline's ranks: both ledgers agree to the byte, whatever the schedule."""

from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.estimator.job import Job
from memplan.memory.accounts import rank_account
from memplan.memory.programs import rank_kinds
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Part
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.memory.test_tally import NOT_FULLER, played

MODEL = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 3000,
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
PIPELINES: tuple[dict[str, Any], ...] = (
    {"pipeline_schedule": "1f1b", "gradient_accumulation_steps": 5},
    {"pipeline_schedule": "gpipe", "layers_per_stage": (1, 4, 2)},
    {"pipeline_schedule": "interleaved-1f1b", "gradient_accumulation_steps": 6},
    {"pipeline_schedule": "looped-bfs", "gradient_accumulation_steps": 2},
    {"pipeline_schedule": "interleaved-zero-bubble", "gradient_accumulation_steps": 6},
    {"pipeline_schedule": "zbv", "gradient_accumulation_steps": 4},
    {"pipeline_schedule": "dualpipev", "gradient_accumulation_steps": 6},
)
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": 0.5, "micro_batch_size": 2, "precision": "bf16"},
    {"checkpointing": "full", "engine_options": {"return_outputs": True}, "optimizer": "sgd"},
    {"num_gpus": 6, "tensor_parallel": 2, "sequence_parallel": True, "precision": "bf16"},
    {"num_gpus": 6, "checkpointing": "full"},
    {"num_gpus": 12, "engine": "fsdp", "precision": None, "tensor_parallel": 2},
    {"num_gpus": 6, "engine": "fsdp", "precision": None, "virtual_stages": 2},
)


def given_for(fields: dict[str, Any]) -> RankInput:
    """A pipeline over three ranks."""
    usual = {
        "num_gpus": 3, "pipeline_parallel": 3, "gradient_accumulation_steps": 4, "seq_len": 96,
        "engine": "ddp",
    }  # fmt: skip
    setup = TrainingSetup(**{**usual, **fields})
    return Job.of(load_model(MODEL, "causal-lm"), setup, None).given


OFFLOADED: tuple[dict[str, Any], ...] = (
    {"offload_activations": "chunks", "seq_len": 2048, "micro_batch_size": 2},
    {"offload_activations": "chunks", "offload_activations_ratio": 0.4, "seq_len": 4096},
    {"offload_activations": "save-on-cpu"},
    {"offload_activations": "checkpoints", "checkpointing": "full"},
)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda each: each["pipeline_schedule"])
@pytest.mark.parametrize(
    "way", WAYS, ids=("plain", "half", "outputs", "split", "ddp", "fsdp x tp", "fsdp")
)
def test_what_is_added_up_is_what_is_played_out(
    pipeline: dict[str, Any], way: dict[str, Any]
) -> None:
    try:
        given = given_for({**pipeline, **way})
        rank_account(given)
    except SetupError as error:
        assert "virtual_stages" in str(error) or "DDP's hooks" in str(error)
        return
    for runs in rank_kinds(given):
        rank = runs[0].start
        account = rank_account(given, rank=rank)
        found = played(given, rank)
        assert account.held_bytes == found.pop("held"), rank
        first = found.pop(Part.FIRST_STEP.value)
        phases = {phase.name: phase.peak_bytes for phase in account.phases if phase.name != "save"}
        shown = phases.pop(Part.FIRST_STEP.value, None)
        assert phases == found, rank
        assert shown is None or shown <= first * NOT_FULLER


@pytest.mark.parametrize("way", OFFLOADED, ids=("chunks", "share", "save-on-cpu", "checkpoints"))
def test_so_it_is_where_activations_go_to_cpu_ram(way: dict[str, Any]) -> None:
    for pipeline in (PIPELINES[2], PIPELINES[4]):
        test_what_is_added_up_is_what_is_played_out(pipeline, way)


def test_the_worst_rank_is_the_fullest() -> None:
    for pipeline in PIPELINES:
        given = given_for(pipeline)
        peaks = [
            rank_account(given, rank=runs[0].start).peak.peak_bytes for runs in rank_kinds(given)
        ]
        assert rank_account(given).peak.peak_bytes == max(peaks)


def test_the_share_of_a_pass_that_goes_lowers_what_is_in_flight() -> None:
    """What stays falls in a straight line; what comes back takes a buffer that rises with it."""
    shares = (0.0, 0.5, 1.0)
    fields = {
        "pipeline_schedule": "interleaved-1f1b", "gradient_accumulation_steps": 6, "seq_len": 4096,
        "offload_activations": "chunks",
    }  # fmt: skip
    accounts = [
        rank_account(given_for({**fields, "offload_activations_ratio": share}), rank=0)
        for share in shares
    ]
    peaks = [account.peak.peak_bytes for account in accounts]
    assert peaks[0] > peaks[1] > peaks[2]
    away = [account.host.held_bytes for account in accounts]
    assert away[0] < away[1] < away[2]
    assert 1.9 < (away[2] - away[0]) / (away[1] - away[0]) < 2.1
