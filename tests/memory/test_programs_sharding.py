"""FSDP1, FSDP2 and DDP as programs over the ledger, against real runs."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.estimator.named_run import named_run
from memplan.estimator.recording import record_and_walk, shared_options, tape_options
from memplan.memory.account import ComponentKind
from memplan.memory.programs import program_of
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger, Part
from memplan.memory.replaying.replay import AllocatorPeaks
from memplan.memory.runtime import workspace_bytes
from memplan.sources.about_models.registry import builtin_config
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.accuracy.allocator_records import GPUS, TASKS, load_empty, setup_of
from tests.memory.capacities import bisected, in_steps

DATA = Path(__file__).parent.parent / "data"
RUNS: dict[str, Any] = json.loads((DATA / "sharded_runs.json").read_text())
RECORDS: dict[str, Any] = json.loads((DATA / "allocator.json").read_text())


def play(
    config: dict[str, Any],
    setup: TrainingSetup,
    gpu_name: str,
    *,
    task: str = "causal-lm",
    num_steps: int | None = None,
) -> tuple[AllocatorPeaks, Ledger]:
    """Play a run; what it reaches on a card with room."""
    model, gpu = load_model(config, task), load_gpu(gpu_name)
    resolved = setup.resolve(model.context_length)
    tape, passes = record_and_walk(model, shared_options(model, tape_options(resolved, gpu)))
    ledger = Ledger()
    given = RankInput(tape=tape, passes=passes, setup=resolved)
    # Each of the two threads has a workspace of its own.
    each = workspace_bytes(gpu.compute_capability) // 2
    program = program_of(given, ledger, workspace_bytes=each)
    assert program is not None
    if dict(setup.engine_options).get("init_device") == "meta":
        program.load = partial(load_empty, program)  # type: ignore[method-assign]
    program.run(num_steps=num_steps)
    return in_steps(ledger, num_steps or NUM_STEPS)(None), ledger


NUM_STEPS = 4
"""Of a record that does not say how many it ran."""


def name_of(run: dict[str, Any]) -> str:
    setup = run["setup"]
    return f"{setup['engine']} {run['model']} x{setup['num_gpus']}"


LEAST_CAPACITY_BAR = 0.01
"""A run near its least capacity turns on a single block's place: the furthest of 42 is 0.3 % off."""


@pytest.mark.parametrize("run", [pytest.param(each, id=name_of(each)) for each in RUNS["runs"]])
def test_as_the_real_run(run: dict[str, Any]) -> None:
    setup = TrainingSetup(**run["setup"])
    peaks, ledger = play(
        RUNS["models"][run["model"]], setup, run["gpu"], num_steps=run["num_steps"]
    )
    assert peaks.requested_bytes == pytest.approx(run["requested_bytes"], rel=4e-5)
    assert peaks.reserved_bytes == pytest.approx(run["reserved_bytes"], rel=0.005)
    least = bisected(in_steps(ledger, run["num_steps"]))
    assert least == pytest.approx(run["least_capacity_bytes"], rel=LEAST_CAPACITY_BAR)


def sharded_records() -> list[dict[str, Any]]:
    """Those of DDP and FSDP2 whose model is built in or the file's own."""
    found = []
    for run in RECORDS["runs"]:
        if run["settings"].get("engine") not in ("ddp", "fsdp2"):
            continue
        builtin = builtin_config(run["model"])
        config = RECORDS["models"].get(run["model"]) or (builtin and dict(builtin[1]))
        if config:
            found.append({**run, "config": config})
    return found


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(each, id=f"{each['settings']['engine']} {each['model']} {index}")
        for index, each in enumerate(sharded_records())
    ],
)
def test_as_the_record(run: dict[str, Any]) -> None:
    settings = run["settings"]
    setup = setup_of(settings)
    if settings["engine"] == "fsdp2":
        options = {**dict(setup.engine_options), "init_device": "meta"}
        setup = replace(setup, engine_options=options)
    gpu, task = GPUS[settings["gpu"]], TASKS[run["task"]]
    peaks, ledger = play(run["config"], setup, gpu, task=task)
    assert peaks.requested_bytes == pytest.approx(run["requested_peak"], rel=8e-5)
    assert peaks.reserved_bytes == pytest.approx(run["reserved_peak"], rel=10e-5)
    least = bisected(in_steps(ledger, NUM_STEPS))
    assert least == pytest.approx(run["least_capacity"], rel=3e-4)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp"])
def test_states_that_an_optimizer_is_made_with_are_there_when_it_is_loaded(engine: str) -> None:
    """Adagrad's constructor fills its sums, a sharded engine's of the shards (torch 2.13, adagrad.py)."""
    setup = TrainingSetup(
        engine=engine,  # type: ignore[arg-type]
        num_gpus=2,
        optimizer="adagrad",
        precision="bf16-mixed",
        seq_len=128,
    )
    run = named_run(estimate(load_model("gpt2"), setup, None, rank=0))
    states = [
        (run.ledger.events[block], label.part)
        for block, label in run.labels.items()
        if label.kind is ComponentKind.OPTIMIZER_STATES
    ]
    assert {part for _, part in states} == {Part.LOAD}
    # One fp32 number for each weight of this rank's half.
    assert sum(size for size, _ in states) == pytest.approx(124_439_808 * 4 / 2, rel=2e-5)


def test_micro_batches_that_reduce_nothing_are_resharded_before_gradients_are_cast() -> None:
    """Ten steps of an XGLM on the two ranks of PyTorch 2.13's CUDA build, A100: they die with a granule less.

    (``_fsdp_param_group.py``, ``post_backward``: gradients in the order of the unit's parameters.)
    """
    config = {
        "model_type": "xglm", "d_model": 2048, "ffn_dim": 8192, "num_layers": 5, "attention_heads": 16,
        "vocab_size": 256008, "max_position_embeddings": 2048, "scale_embedding": True,
    }  # fmt: skip
    setup = TrainingSetup(
        engine="fsdp", num_gpus=2, gradient_accumulation_steps=2, optimizer="sgd", attention="eager",
        micro_batch_size=2, seq_len=1024,
    )  # type: ignore[arg-type]  # fmt: skip
    found = estimate(load_model(config, "causal-lm"), setup, load_gpu("a100-sxm4-80gb"))
    assert found.required_bytes == 16_122_904_576


BUFFERED = {
    "model_type": "gpt_neo", "hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 512, "attention_types": [[["global", "local"], 1]], "window_size": 256,
}  # fmt: skip


def sent_in_flat(**changed: Any) -> list[tuple[Part, int]]:
    """What is flattened to be sent to all ranks in three steps, and in which part of the run [bytes]."""
    setup = TrainingSetup(
        engine="ddp", num_gpus=2, gradient_accumulation_steps=2, seq_len=128, attention="eager", **changed
    )  # type: ignore[arg-type]  # fmt: skip
    run = named_run(estimate(load_model(BUFFERED, "causal-lm"), setup, None, rank=0))
    return [
        (label.part, run.ledger.events[block])
        for block, label in run.labels.items()
        if label.name == "parameters sent to all ranks"
    ]


def test_ddp_sends_buffers_in_a_flat_tensor() -> None:
    """PyTorch 2.13's CUDA build: GPT-Neo's masks, a byte a pair of positions, once when it is made and before the
    first micro-batch of each step (``distributed.py``, ``_sync_module_states``, ``_sync_buffers``)."""
    masks = 2 * 512 * 512
    sent = sent_in_flat()
    assert [part for part, size in sent if size == masks] == [Part.LOAD, *[Part.FORWARD] * 3]
    each = [
        part
        for part, size in sent_in_flat(engine_options={"sync_each_batch": True})
        if size == masks
    ]
    assert each == [Part.LOAD, *[Part.FORWARD] * 6]
    alone = sent_in_flat(engine_options={"broadcast_buffers": False})
    assert [part for part, _ in alone] == [Part.LOAD]


def test_fsdp1_moves_outer_modules_first() -> None:
    """A queue of modules: BERT's feed-forward lies a level above its attention (``_move_module_to_device``)."""
    setup = TrainingSetup(engine="fsdp1", num_gpus=2, seq_len=64)  # type: ignore[arg-type]
    run = named_run(estimate(load_model("bert-base-uncased", "masked-lm"), setup, None, rank=0))
    loaded = [
        label.name
        for label in run.labels.values()
        if label.part is Part.LOAD and label.kind is ComponentKind.GATHERED_PARAMETERS
    ]
    first = loaded.index("intermediate.dense.weight")
    assert first < loaded.index("attention.self.query.weight")
