"""DeepSpeed's programs against real runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.estimator.recording import record_and_walk, shared_options, tape_options
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.memory.deepspeed.job import rounded
from memplan.memory.programs.deepspeed import deepspeed_program
from memplan.memory.programs.deepspeed_stages.zero12 import REDUCE_STREAM, ShardedStatesProgram
from memplan.memory.programs.program import Program
from memplan.memory.programs.weights import Weight
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import EMPTY_CACHE, Block, Ledger
from memplan.memory.runtime import workspace_bytes
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.units import round_up
from tests.memory.capacities import bisected, run_of

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 700, "vocab_size": 4001,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 4001,
    "n_positions": 512,
}  # fmt: skip
MODELS = {"llama": LLAMA, "tied": {**LLAMA, "tie_word_embeddings": True}, "gpt2": GPT2}


def given_for(model: str, **fields: Any) -> RankInput:
    options = {"reduce_bucket_size": 800_000, **fields.pop("engine_options", {})}
    fields |= {"engine": "deepspeed", "seq_len": 128, "engine_options": options}
    setup = TrainingSetup(**fields)
    spec = load_model(MODELS[model], "causal-lm")
    resolved = setup.resolve()
    tape, passes = record_and_walk(spec, shared_options(spec, tape_options(resolved, None)))
    return RankInput(tape=tape, passes=passes, setup=resolved)


def played(program: Program) -> tuple[int, int]:
    """The peaks of loading and of training [bytes]."""
    events = program.ledger.events
    load, loaded = program.load, []

    def and_note() -> None:
        load()
        loaded.append(len(events))

    program.load = and_note  # type: ignore[method-assign]
    program.run()
    live = 0
    highest = [0, 0]
    for number, event in enumerate(events):
        size = events[~event] if event < 0 else event
        live += round_up(size, ALLOCATION_ROUNDING) * (-1 if event < 0 else 1)
        trains = number >= loaded[0]
        highest[trains] = max(highest[trains], live)
    return highest[0], highest[1]


def test_every_block_is_freed_once() -> None:
    for stage in range(4):
        ledger = Ledger()
        deepspeed_program(given_for("llama", zero_stage=stage, num_gpus=4), ledger).run()
        freed = [~event for event in ledger.events if event < 0]
        assert len(freed) == len(set(freed))
        assert all(ledger.events[block] > 0 for block in freed)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_ranks_gradients_are_of_the_stream_that_reduces(*, overlap: bool) -> None:
    """``reduce_ipg_grads`` copies them out of the bucket on it (stage_1_and_2.py, DeepSpeed 0.19.8)."""
    given = given_for("llama", zero_stage=2, num_gpus=4, engine_options={"overlap_comm": overlap})
    ledger = Ledger()
    program = deepspeed_program(given, ledger)
    assert isinstance(program, ShardedStatesProgram)
    program.run()
    whole = 2 * program.partition.whole_numel
    owned = [block for block, event in enumerate(ledger.events) if event == rounded(whole)]
    assert owned
    assert all((ledger.streams.get(block, 0) == REDUCE_STREAM) is overlap for block in owned)


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("stage", [1, 2])
def test_flattening_without_room_goes_by_the_cpu(stage: int, offload: str) -> None:
    """The weights leave the GPU before their flat copy comes; every rank loads alike, and what comes then is the same."""
    given = given_for(
        "llama", zero_stage=stage, num_gpus=16, num_nodes=2, offload_optimizer=offload
    )
    runs = [(0, None), (0, 1 << 20), (5, None), (5, 1 << 20)]
    programs = [
        deepspeed_program(given, Ledger(), rank=rank, capacity_bytes=room) for rank, room in runs
    ]
    loads = [played(program)[0] for program in programs]
    assert loads[0] == loads[2] > loads[1] == loads[3]
    flushes = [program.ledger.events.count(EMPTY_CACHE) for program in programs]
    assert flushes[1] == flushes[0] + 1  # what the weights leave goes back to the driver
    trained = [_sizes_after_loading(program) for program in programs]
    assert trained[0] == trained[1] != trained[2] == trained[3]


def _sizes_after_loading(program: Program) -> list[int]:
    """What is asked for and, negative, given back."""
    events = program.ledger.events[program.ledger.steps[0] :]
    return [-program.ledger.events[~event] if event < 0 else event for event in events]


RUNS = json.loads((Path(__file__).parents[1] / "data" / "allocator.json").read_text())


def _real_runs() -> list[Any]:
    runs = [run for run in RUNS["runs"] if run["settings"].get("engine") == "deepspeed"]
    return [
        pytest.param(run, id=f"zero{run['settings']['stage']}-{number}")
        for number, run in enumerate(runs)
        if run["model"] in RUNS["models"]
    ]


def _program(run: dict[str, Any]) -> Program:
    settings = run["settings"]
    zero = dict(settings.get("ds", {}).get("zero_optimization", {}))
    gpus = {"h100": "h100-sxm-80gb", "a100": "a100-80gb"}
    gpu = load_gpu(gpus[settings["gpu"]])
    fields: dict[str, Any] = {
        "engine": "deepspeed",
        "zero_stage": settings["stage"],
        "micro_batch_size": settings["b"],
        "seq_len": settings["s"],
        "num_gpus": settings["world"],
        "num_nodes": max(1, settings["world"] // 8),
        "checkpointing": "full" if settings.get("ckpt") else "none",
        "gradient_accumulation_steps": settings.get("ga", 1),
        "precision": f"{settings.get('prec', 'bf16')}-master",
        "engine_options": {"zero_init": False, **zero},
    }
    setup = TrainingSetup(**fields)
    spec = load_model(RUNS["models"][run["model"]], f"{run['task']}-lm")
    resolved = setup.resolve()
    tape, passes = record_and_walk(spec, shared_options(spec, tape_options(resolved, gpu)))
    given = RankInput(tape=tape, passes=passes, setup=resolved)
    workspace = workspace_bytes(gpu.compute_capability) // 2
    return deepspeed_program(given, Ledger(), workspace_bytes=workspace)


def _loads_in_fp32(program: Program) -> None:
    """These runs built the model in fp32 on the GPU, and cast it weight by weight."""
    ledger = program.ledger

    def load_model() -> dict[Weight, Block]:
        full = {weight: ledger.allocate(weight[0].numel * 4) for weight in program.weights}
        cast: dict[Weight, Block] = {}
        for weight in program.weights:
            cast[weight] = ledger.allocate(weight[0].storage.num_bytes)
            ledger.free(full[weight])
        program.tables.load_all()
        return cast

    program.load_model = load_model  # type: ignore[method-assign]


@pytest.mark.parametrize("run", _real_runs())
def test_as_the_real_run(run: dict[str, Any]) -> None:
    program = _program(run)
    _loads_in_fp32(program)
    steps = run["settings"].get("ga", 1)
    # Four of its micro-batches were run.
    program.num_steps = 1 if steps == 4 else 3
    _, train = played(program)
    peaks = run_of(program.ledger).on_card(None)
    least = bisected(run_of(program.ledger).on_card)
    assert train == pytest.approx(run["requested_peak"], rel=2e-5)
    assert peaks.reserved_bytes == run["reserved_peak"]
    assert least == run["least_capacity"]
    assert peaks.num_mallocs == run["mallocs"]


@pytest.mark.parametrize("loss", ["tiled", "tiled_gradients"])
def test_a_bucket_comes_with_the_first_gradient(loss: str) -> None:
    """``setup_buckets`` in the first hook (stage_1_and_2.py, DeepSpeed 0.19.8): that of the head, whose tiles run backward
    within the forward pass or behind it."""
    given = given_for("llama", zero_stage=2, num_gpus=4, loss=loss, loss_tiles=4)
    program = deepspeed_program(given, Ledger())
    assert isinstance(program, ShardedStatesProgram)
    segments, come = given.tape.segments, []
    for segment in segments:
        program.before_forward(segment, 0)
        come.append(bool(program.buckets))
    assert come == [False] * (len(segments) - 1) + [loss == "tiled_gradients"]
    for segment in segments[:-1]:
        program.before_backward(segment, 0)
        assert bool(program.buckets) is come[-1]
    program.before_backward(segments[-1], 0)
    assert program.buckets
