"""The nearest change is found whenever there is one: beside a search of every change of one thing.

Jobs are drawn at random, always the same ones; 200 with ``make fuzz``.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import memplan
from memplan.errors import SetupError
from memplan.report.estimates.changes import change_flags
from memplan.search.advice import advise
from memplan.search.node_ram import overfills_usual_node
from tests.cli.test_hints import rows_of

NUM_IN_CI, NUM_JOBS = 3, 200
MODELS = (
    "gpt2",
    "gpt2-xl",
    "t5-small",
    "bert-large-uncased",
    "qwen2.5-0.5b",
    "llama-3.2-1b",
    "llama-3.2-3b",
)
CARDS = ("t4", "v100-16gb", "a100-40gb", "h100", "4090", "l4", "a10g")
ENGINES: tuple[dict[str, Any], ...] = (
    {"engine": "ddp"}, {"engine": "deepspeed", "zero_stage": 1},
    {"engine": "deepspeed", "zero_stage": 2}, {"engine": "deepspeed", "zero_stage": 3},
    {"engine": "fsdp"}, {"engine": "fsdp", "fsdp_strategy": "shard_grad_op"}, {"engine": "fsdp1"},
)  # fmt: skip
OFFLOADS = ({}, {"offload_optimizer": "cpu"}, {"offload_optimizer": "cpu", "offload_param": "cpu"})
CHEAP = frozenset({"kernels", "loss", "allocator", "micro_batch_size", "checkpointing"})
"""What is tried before anything that is two changes."""


def jobs() -> Iterator[memplan.Estimate]:
    """Estimates that do not fit their card."""
    chance = random.Random(3)
    while True:
        engine = chance.choice(ENGINES)
        try:
            setup = memplan.TrainingSetup(
                num_gpus=chance.choice((1, 2, 8)) if engine["engine"] == "ddp" else chance.choice((2, 8)),
                micro_batch_size=chance.choice((1, 2, 6, 8, 24, 64)),
                seq_len=chance.choice((128, 512)), checkpointing=chance.choice(("none", "full")),
                **engine,
            )  # fmt: skip
            model, card = _model(chance.choice(MODELS)), memplan.load_gpu(chance.choice(CARDS))
            answer = memplan.estimate(model, setup, gpu=card)
        except SetupError:
            continue
        if answer.verdict is not memplan.Verdict.FITS:
            yield answer


@cache
def _model(name: str) -> memplan.ModelSpec:
    return memplan.load_model(name)


def single_changes(setup: memplan.TrainingSetup) -> Iterator[tuple[str, memplan.TrainingSetup]]:
    """Every setup that differs in one thing: the thing, and the setup."""
    fields: list[tuple[str, dict[str, Any]]] = [
        ("checkpointing", {"checkpointing": "full"}),
        ("kernels", {"kernels": "liger"}), ("allocator", {"allocator": "expandable"}),
        ("offload_activations", {"offload_activations": "streamed"}),
    ]  # fmt: skip
    size, steps = setup.micro_batch_size, setup.gradient_accumulation_steps
    for smaller in range(1, size):
        fields.append(("micro_batch_size", {"micro_batch_size": smaller}))
        if size % smaller == 0:
            more = {"gradient_accumulation_steps": steps * size // smaller}
            fields.append(("micro_batch_size", {"micro_batch_size": smaller, **more}))
    plain = {
        "engine": None, "zero_stage": None, "fsdp_strategy": None, "offload_optimizer": "none",
        "offload_param": "none", "engine_options": (), "precision": None,
    }  # fmt: skip
    fields += [("engine", {**plain, **way, **moved}) for way in ENGINES for moved in OFFLOADS]
    fields += [
        ("num_gpus", {"num_gpus": setup.num_gpus * more, "num_nodes": None}) for more in (2, 4, 8)
    ]
    for name, changes in fields:
        try:
            changed = replace(setup, **changes)
        except SetupError:
            continue
        if changed != setup:
            yield name, changed


def fits(answer: memplan.Estimate, setup: memplan.TrainingSetup) -> bool:
    try:
        found = memplan.estimate(answer.model, setup, gpu=answer.gpu)
    except SetupError:
        return False
    return found.verdict is memplan.Verdict.FITS and not overfills_usual_node(found)


def check(answer: memplan.Estimate) -> bool:
    """Whether a single change does; where one does, one is advised, and a cheap one where there is one."""
    fitting = [(name, each) for name, each in single_changes(answer.setup) if fits(answer, each)]
    better = advise(answer.model, answer).better
    if not fitting:
        return False
    assert better is not None, (answer, fitting[0])
    assert better.verdict is memplan.Verdict.FITS, (
        answer,
        change_flags(answer.setup, better.setup),
    )
    assert not overfills_usual_node(better)
    assert fits(answer, better.setup)
    cheap = {name for name, _ in fitting} & CHEAP
    if cheap:
        changed = {
            name for name in CHEAP if getattr(better.setup, name) != getattr(answer.setup, name)
        }
        told = change_flags(answer.setup, better.setup)
        same = better.setup.chosen_engine is answer.setup.chosen_engine
        assert len(changed) == 1 or (not changed and same), (answer, told, cheap)
    return True


@pytest.mark.long
def test_the_nearest_change_is_found() -> None:
    drawn = jobs()
    checked = [check(next(drawn)) for _ in range(NUM_IN_CI)]
    assert any(checked)


@pytest.mark.fuzz
def test_every_nearest_change_is_found() -> None:
    found = [check(answer) for answer, _ in zip(jobs(), range(NUM_JOBS), strict=False)]
    assert sum(found) > NUM_JOBS // 2


@pytest.mark.long
def test_what_a_hint_promises_is_what_estimate_says(run: Any) -> None:
    """The options of a hint, typed behind the command that it was given for."""
    command = ("llama-3.2-1b", "--gpu", "4090", "--seq-len", "1024", "--batch-size", "2")
    for allowed in ((), ("--allow", "lora")):
        done = run("estimate", *command, *allowed, "--format", "json")
        (hint,) = _hints(done)
        (row,) = rows_of(run("estimate", *command, *hint["options"].split(), "--format", "json"))
        assert row["verdict"] == hint["verdict"] == "fits"


def _hints(done: Any) -> list[dict[str, Any]]:
    import json

    found: list[dict[str, Any]] = json.loads(done.stdout)["hints"]
    return found
