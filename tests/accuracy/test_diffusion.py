"""Steps of diffusers' own classes, as its training scripts have them: on fake CUDA tensors, on PyTorch's CUDA build
with a card that is not there, and there on one rank of an engine.

Latents, noise, what is wanted and the prompts' embeddings are there before; figures are those of a later
step (diffusers 0.42.1, peft 0.21.2, torch 2.13.0, deepspeed 0.19.8).
"""

import sys
from pathlib import Path
from typing import Any

import pytest

import memplan
from tests.accuracy.comparison import Comparison, read_records, remember

PRECISIONS = {
    "bf16": "bf16", "amp": "bf16-amp", "fp32": "fp32", "autocast": "bf16-autocast",
}  # fmt: skip
BY_TENSORS, BY_BUILD, BY_ENGINES = "fake tensors", "CUDA build", "engines"
OF_ENGINES = {"fsdp": "peak, FSDP2", "deepspeed": "peak, DeepSpeed ZeRO 2-3"}


def setup_of(record: dict[str, Any]) -> memplan.TrainingSetup:
    """The recorded step's: an engine takes its own precision."""
    adapter = None
    if "lora" in record:
        adapter = memplan.Lora(rank=record["lora"]["r"], targets=tuple(record["lora"]["targets"]))
    engine = {"engine": "ddp", "precision": PRECISIONS[record["precision"]]}
    if record["by"] == BY_ENGINES:
        engine = {"engine": record["engine"], "num_gpus": record["world"], "num_nodes": 1}
        if "stage" in record:
            engine["zero_stage"] = record["stage"]
    return memplan.TrainingSetup(
        **engine,
        micro_batch_size=record["batch"],
        seq_len=record["prompt"],
        image_size=record["height"],
        image_width=record["width"],
        num_frames=record.get("frames"),
        adapter=adapter,
        checkpointing="full" if record["checkpointed"] else "none",
        kernel_scratch=record["by"] != BY_TENSORS,
    )


def estimate_of(record: dict[str, Any]) -> memplan.Estimate:
    """What memplan says of it."""
    gpu = None if record["by"] == BY_TENSORS else "a100-80gb"
    rank = 0 if record["by"] == BY_ENGINES else None
    return memplan.estimate(
        memplan.load_model(record["config"]), setup_of(record), gpu=gpu, rank=rank
    )


def predict(record: dict[str, Any]) -> dict[str, int]:
    """The record's figures, as memplan estimates them."""
    found = estimate_of(record)
    if record["by"] == BY_ENGINES:
        return {OF_ENGINES[record["engine"]]: found.peak_bytes}
    if record["by"] == BY_BUILD:
        return {"requested_peak": found.peak_bytes, "reserved_peak": found.reserved_bytes}
    return {
        "params": found.num_params,
        "bytes_before": found.held_bytes,
        "activations": found.activations_bytes,
        "peak_forward": found.phases["forward"].peak_bytes,
        "peak_backward": found.phases["backward"].peak_bytes,
        "peak_step": found.phases["step"].peak_bytes,
        "peak": found.peak_bytes,
    }


BARS = {
    BY_TENSORS: {
        "params": 0.0, "bytes_before": 0.001, "activations": 2e-6, "peak_forward": 0.001,
        "peak_backward": 0.001, "peak_step": 0.001, "peak": 0.001,
    },
    BY_BUILD: {"requested_peak": 0.0002, "reserved_peak": 0.035},
    BY_ENGINES: {"peak, FSDP2": 0.001, "peak, DeepSpeed ZeRO 2-3": 0.0005},
}  # fmt: skip
"""The worst that each figure may be off."""


def engine_row(found: Comparison, name: str) -> dict[str, Any]:
    """Of one engine's records alone."""
    return {**found.row(name), "records": len(found.errors[name]), "of": len(found.errors[name])}


def test_diffusion_transformers(
    checkout: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {by: Comparison() for by in BARS}
    for record in read_records(checkout / "tests" / "data" / "diffusion.jsonl"):
        truth = record["truth"]
        if "engine" in record:
            truth = {OF_ENGINES[record["engine"]]: truth["requested_peak"]}
        found[record["by"]].add(record, truth, predict)
    with capsys.disabled():
        for by, comparison in found.items():
            sys.stdout.write(f"\ndiffusion.jsonl, {by}: {comparison.table()}\n")
    for by, bars in BARS.items():
        assert not found[by].refused
        for figure, bar in bars.items():
            assert found[by].worst(figure)[0] <= bar, (by, figure, found[by].worst(figure))
    assert found[BY_BUILD].quantile("reserved_peak", 0.5) == 0
    tensors, build, engines = (found[by] for by in BARS)
    remember(
        "Diffusion transformers",
        {
            "activations": tensors.row("activations"),
            "peak, fake tensors": tensors.row("peak"),
            "peak, one GPU": build.row("requested_peak"),
            "reserved, one GPU": build.row("reserved_peak"),
            **{name: engine_row(engines, name) for name in OF_ENGINES.values()},
        },
        update=pytestconfig.getoption("--update-accuracy"),
        points=tensors.points("peak"),
        found=found.values(),
    )
