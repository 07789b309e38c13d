"""Runs of one shape are played once: with each one's own sizes they are what would have been played."""

from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.fast_dataclass import replace
from memplan.memory.ledger import Ledger, with_sizes
from memplan.memory.programs import program_of
from memplan.memory.replay import Replayer
from memplan.memory.required import RunSource
from memplan.memory.shapes import numbered, shape_of
from memplan.sources.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.adapters import Lora
from memplan.training.setup import TrainingSetup

JOBS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("gpt2", {"gradient_accumulation_steps": 3, "checkpointing": "full"}),
    ("gpt2", {"offload_activations": "save-on-cpu"}),
    ("t5-small", {"num_gpus": 4, "engine": "ddp"}),
    ("t5-small", {"num_gpus": 4, "zero_stage": 1, "optimizer": "adafactor"}),
    ("llama-3.2-1b", {"num_gpus": 8, "zero_stage": 2, "offload_optimizer": "cpu"}),
    ("llama-3.2-1b", {"num_gpus": 8, "zero_stage": 3, "checkpointing": "full"}),
    ("llama-3.2-1b", {"num_gpus": 8, "engine": "fsdp"}),
    ("llama-3.2-1b", {"num_gpus": 8, "engine": "fsdp1", "checkpointing": "full"}),
    ("llama-3.2-1b", {"num_gpus": 2, "tensor_parallel": 2, "engine": "fsdp"}),
    ("llama-3.2-1b", {"adapter": Lora(rank=8), "quantize": "nf4", "checkpointing": "full"}),
    ("bert-base", {"engine": "ddp", "num_gpus": 2}),
    ("bart-base", {"num_gpus": 2, "zero_stage": 2}),
    ("mixtral-8x7b", {"num_gpus": 64, "engine": "fsdp", "checkpointing": "full"}),
    ("vit-base", {"kernels": "liger"}),
]
PLACES = [(1, "h100"), (2, "h100"), (2, "a100"), (3, "a100"), (8, "v100")]


def played(source: RunSource, *, with_numbers: bool) -> Ledger:
    given = replace(source.record(), setup=source.setup)
    ledger = Ledger()
    program_of(
        numbered(given) if with_numbers else given,
        ledger,
        rank=source.rank,
        workspace_bytes=source.workspace_bytes,
        capacity_bytes=source.capacity_bytes,
    ).run()
    return ledger


@pytest.mark.parametrize(("name", "fields"), JOBS, ids=lambda each: str(each)[:60])
def test_each_has_its_own_sizes(name: str, fields: dict[str, Any]) -> None:
    fields = {"seq_len": 128, **fields} if name != "vit-base" else fields
    model, num_shared = load_model(name), 0
    known: dict[object, Ledger] = {}
    for size, gpu in PLACES:
        setup = TrainingSetup(micro_batch_size=size, **fields)
        source = estimate(model, setup, load_gpu(gpu)).run_source
        assert isinstance(source, RunSource)
        assert source.likeness is not None
        given = replace(source.record(), setup=source.setup)
        shape, sizes = shape_of(given, workspace_bytes=source.workspace_bytes)
        key = (source.likeness, shape, source.rank, source.capacity_bytes, given.device)
        num_shared += key in known
        if key not in known:
            known[key] = played(source, with_numbers=True)
        own = played(source, with_numbers=False)
        shared = known[key]
        assert with_sizes(shared.events, sizes) == own.events, (size, gpu)
        assert (shared.streams, shared.cycle) == (own.streams, own.cycle), (size, gpu)
        asked = Replayer(shared.events, shared.streams, shared.cycle, sizes=sizes)
        alone = Replayer(own.events, own.streams, own.cycle)
        room = alone.on_card(None)
        assert asked.on_card(None) == room
        less = room.reserved_bytes * 15 // 16
        assert asked.on_card(less) == alone.on_card(less)
    assert num_shared
