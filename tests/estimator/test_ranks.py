"""The worst rank is the worst: against every rank of its job, one by one."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import memplan
from memplan.errors import SetupError
from memplan.estimator.job import Job
from memplan.memory.account import ComponentKind, Entry, Phase
from memplan.memory.deepspeed.partition import FlatBuffer
from memplan.memory.deepspeed.ranks import rank_kinds
from memplan.model.spec import ModelSpec
from memplan.report.estimates.account import deciding_text
from memplan.sources.models import load_model
from memplan.training.choices import Offload
from memplan.training.setup import TrainingSetup


def small(vocab_size: int, num_layers: int) -> ModelSpec:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 172,
        "vocab_size": vocab_size,
    }  # fmt: skip
    return load_model(config, "causal-lm")


MODELS = {
    "small vocabulary": small(503, 9),
    "large vocabulary": small(40_009, 2),
    "encoder-decoder": load_model("t5-small"),
}
OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"reduce_bucket_size": 3000},
    {"reduce_bucket_size": 100_000, "overlap_comm": True},
    {"reduce_bucket_size": 100_000, "round_robin_gradients": True},
    {"reduce_bucket_size": 400_000, "grad_accum_dtype": "fp32"},
)
JOBS = list(product((1, 2), ("none", "cpu"), (1, 3), OPTIONS))


@pytest.mark.parametrize(
    "num_gpus", [2, 3, 13, *(pytest.param(n, marks=pytest.mark.fuzz) for n in (8, 29, 64))]
)
@pytest.mark.parametrize("name", MODELS)
def test_no_rank_is_fuller_than_the_one_reported(name: str, num_gpus: int) -> None:
    """360 jobs of ZeRO-1 and 2; those that are told to be alike are."""
    for stage, offload, steps, options in JOBS:
        setup = TrainingSetup(
            num_gpus=num_gpus, num_nodes=1, engine="deepspeed", zero_stage=stage,
            offload_optimizer=offload, gradient_accumulation_steps=steps, seq_len=16,
            engine_options=options,
        )  # fmt: skip
        reported = memplan.estimate(MODELS[name], setup)
        every = [memplan.estimate(MODELS[name], setup, rank=rank) for rank in range(num_gpus)]
        peaks = [each.peak_bytes for each in every]
        assert reported.peak_bytes == max(peaks) == peaks[reported.account.rank], setup
        for runs in rank_kinds(Job.of(MODELS[name], setup, None).given):
            ranks = [rank for run in runs for rank in run]
            assert len({replace(every[rank].account, rank=0) for rank in ranks}) == 1, (setup, runs)


def test_the_last_rank_of_an_offloaded_zero_2_job() -> None:
    """It owns a piece of the output matrix, whose norm takes 8 bytes for each element."""
    setup = TrainingSetup(
        num_gpus=8, zero_stage=2, offload_optimizer="cpu", seq_len=2048, checkpointing="full"
    )
    answer = memplan.estimate("qwen2.5-7b", setup)
    assert answer.account.rank == 7
    middle = memplan.estimate("qwen2.5-7b", setup, rank=3)
    assert answer.peak_bytes > 1.12 * middle.peak_bytes


SETUPS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0},
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2, "gradient_accumulation_steps": 2},
    "bf16 optimizer": {"zero_stage": 1, "engine_options": {"grad_accum_dtype": "fp32"}},
    "stage 3": {"zero_stage": 3},
    "ddp": {"engine": "ddp"},
    "fsdp": {"engine": "fsdp"},
    "hybrid": {"engine": "fsdp", "fsdp_strategy": "hybrid", "num_nodes": 2},
    "fsdp1": {"engine": "fsdp1"},
    "fsdp1 pieces": {"engine": "fsdp1", "engine_options": {"use_orig_params": True}},
}


@pytest.mark.parametrize("name", SETUPS)
def test_every_rank_is_in_one_account(name: str) -> None:
    setup = TrainingSetup(**{"num_gpus": 14, "num_nodes": 1, "seq_len": 16, **SETUPS[name]})
    answer = memplan.estimate(small(503, 9), setup)
    assert sorted(rank for each in answer.ranks for run in each.ranks for rank in run) == list(
        range(14)
    )
    peaks = [each.peak.peak_bytes for each in answer.ranks]
    assert peaks == sorted(peaks, reverse=True)
    assert len({each.phases for each in answer.ranks}) > 1 or len(answer.ranks) <= 2
    assert peaks[0] == answer.peak_bytes
    assert answer.ranks[0].rank == answer.account.rank
    for each in answer.ranks:
        assert each.num_ranks == sum(map(len, each.ranks))
        for rank in (run[-1] for run in each.ranks):
            own = memplan.estimate(small(503, 9), setup, rank=rank).account
            assert (own.phases, own.held_bytes, own.host) == (
                each.phases, each.held_bytes, each.host,
            )  # fmt: skip


def test_chunks_that_do_not_come_out_even() -> None:
    """503 rows over 14 ranks: 36 each, and 35 on the last one, whose states are smaller."""
    setup = TrainingSetup(num_gpus=14, num_nodes=1, engine="fsdp", seq_len=16)
    first, *_, last = (memplan.estimate(small(503, 1), setup, rank=rank) for rank in (0, 13))
    assert last.peak_bytes < first.peak_bytes
    assert memplan.estimate(small(503, 1), setup).account.rank == 0


@pytest.mark.parametrize("engine", ["ddp", "deepspeed", "fsdp", "fsdp1"])
@pytest.mark.parametrize("rank", [-1, 4, True, "3"])
def test_a_rank_that_is_not_there_is_refused(engine: str, rank: Any) -> None:
    setup = TrainingSetup(num_gpus=4, engine=engine, seq_len=16)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=f"rank: must be from 0 to 3, got {rank!r}"):
        memplan.estimate(MODELS["small vocabulary"], setup, rank=rank)


def test_kinds_of_ranks_are_bounded_by_the_parameters() -> None:
    class Weights:
        numels = [1000, 7, 250, 3, 90_000, 12] * 20
        trainable = [True] * 120

    for num_ranks in (1, 9, 1024, 100_000):
        buffer = FlatBuffer(Weights(), num_ranks=num_ranks, round_robin=False)
        kinds = buffer.every_rank
        assert len(kinds) <= min(num_ranks, 3 * 120 + 1)
        assert sum(len(kind.ranks) for kind in kinds) == num_ranks


def test_ranks_that_only_measure_their_gradients_are_few_kinds() -> None:
    """Norms that take less than the copy of their bucket a moment before tell nobody apart."""
    setup = TrainingSetup(num_gpus=64, num_nodes=1, zero_stage=2, seq_len=16)
    kept, measured = (
        Job.of(small(503, 9), replace(setup, offload_optimizer=where), None).given
        for where in (Offload.NONE, Offload.CPU)
    )
    assert len(rank_kinds(kept)) > 20
    assert len(rank_kinds(measured)) == 2


MIXTRAL: dict[str, Any] = {"num_gpus": 16, "zero_stage": 3, "checkpointing": "full"}


def test_stage_3_loads_under_zero_init_unless_it_is_told_not_to() -> None:
    said = "ZeRO-3 loads under zero.Init (default)"
    answer = memplan.estimate("mixtral-8x7b", TrainingSetup(**MIXTRAL), gpu="h100")
    assert said in answer.assumptions
    assert answer.deciding_phase == "backward"
    assert deciding_text(answer) == ""
    own = TrainingSetup(**MIXTRAL, engine_options={"zero_init": False})
    loaded = memplan.estimate("mixtral-8x7b", own, gpu="h100")
    assert said not in loaded.assumptions
    assert loaded.verdict is memplan.Verdict.OOM
    assert deciding_text(loaded) == "load 87.0"
    row = loaded.to_dict()
    assert row["deciding_phase"] == "load"
    assert row["worst_bytes"] == row["load_peak_bytes"]
    assert row["peak_phase"] == "backward"


@pytest.mark.parametrize("phase", ["load", "save"])
def test_the_verdict_looks_at_loading_and_saving(phase: str) -> None:
    answer = memplan.estimate("llama-3.2-1b", TrainingSetup(num_gpus=8, seq_len=64), gpu="v100")
    assert answer.verdict is memplan.Verdict.FITS
    whole = Entry(ComponentKind.GATHERED_PARAMETERS, 40 * 2**30)
    phases = tuple(
        Phase(each.name, (*each.entries, whole)) if each.name == phase else each
        for each in answer.account.phases
    )
    fuller = replace(answer, account=replace(answer.account, phases=phases))
    assert fuller.peak_bytes == answer.peak_bytes
    assert fuller.worst_bytes == fuller.phases[phase].peak_bytes > 40 * 2**30
    assert fuller.deciding_phase == phase
    assert fuller.verdict is memplan.Verdict.OOM
    assert deciding_text(fuller) == f"{phase} {fuller.worst_bytes / 2**30:,.1f}"
