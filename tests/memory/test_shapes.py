"""Runs of one shape are played once: with each one's own sizes they are what would have been played."""

import random
from typing import Any

import pytest

from memplan.estimator import estimate
from memplan.fast_dataclass import replace
from memplan.memory.programs import program_of
from memplan.memory.replaying.ledger import Ledger, with_sizes
from memplan.memory.replaying.replay import Replayer
from memplan.memory.required import RunSource
from memplan.memory.shapes import numbered, shape_of
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.adapters import Lora
from memplan.training.setup import TrainingSetup
from tests.forgetting import forget_everything

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
    (
        "llama-3.2-1b",
        {"engine": "megatron", "num_gpus": 4, "tensor_parallel": 4, "sequence_parallel": True},
    ),
]
PLACES = [
    (1, "h100", 128), (2, "h100", 128), (2, "a100", 96), (3, "a100", 128), (5, "a100", 96), (8, "v100", 256),
]  # fmt: skip
"""Sequences, a card, tokens of each."""


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
    model, num_shared = load_model(name), 0
    known: dict[object, Ledger] = {}
    for size, gpu, length in PLACES:
        lengths = {} if name == "vit-base" else {"seq_len": length}
        setup = TrainingSetup(micro_batch_size=size, **lengths, **fields)
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
        assert with_sizes(shared.events, sizes) == own.events, (size, gpu, length)
        assert (shared.streams, shared.cycle) == (own.streams, own.cycle), (size, gpu, length)
        asked = Replayer(shared.events, shared.streams, shared.cycle, sizes=sizes)
        alone = Replayer(own.events, own.streams, own.cycle)
        room = alone.on_card(None)
        assert asked.on_card(None) == room
        less = room.reserved_bytes * 15 // 16
        assert asked.on_card(less) == alone.on_card(less)
    assert num_shared


SMALL = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 704, "vocab_size": 4096,
}  # fmt: skip
WAYS: list[dict[str, Any]] = [
    {"engine": "megatron", "num_gpus": 4, "tensor_parallel": 4, "sequence_parallel": True},
    {"engine": "megatron", "num_gpus": 8, "tensor_parallel": 2, "sequence_parallel": True,
     "checkpointing": "full"},
    {"engine": "fsdp", "num_gpus": 4, "tensor_parallel": 2, "checkpointing": "full"},
    {"engine": "deepspeed", "zero_stage": 3, "num_gpus": 4},
    {"engine": "ddp", "allocator": "expandable"},
    {"engine": "fsdp1", "num_gpus": 4, "checkpointing": "full"},
]  # fmt: skip


@pytest.mark.parametrize("fields", WAYS, ids=lambda each: each["engine"])
def test_no_figure_depends_on_what_was_asked_before(fields: dict[str, Any]) -> None:
    dice, model = random.Random(str(fields)), load_model(SMALL)
    places = [
        (dice.randint(1, 40), dice.choice((384, 512)), dice.choice(("h100", "a100")))
        for _ in range(6)
    ]

    def figures(size: int, length: int, gpu: str) -> tuple[int, ...]:
        answer = estimate(
            model, TrainingSetup(micro_batch_size=size, seq_len=length, **fields), load_gpu(gpu)
        )
        return answer.peak_bytes, answer.reserved_bytes, answer.required_bytes

    alone = []
    for place in places:
        forget_everything()
        alone.append(figures(*place))
    asked = [*range(len(places))]
    dice.shuffle(asked)
    assert [figures(*places[each]) for each in asked] == [alone[each] for each in asked]


def test_kernels_whose_loops_reduce_otherwise_are_told_apart() -> None:
    """The preset says whose loop it is, which the operations do not show."""
    model, setup = load_model(SMALL), TrainingSetup(
        engine="fsdp", num_gpus=2, micro_batch_size=1, seq_len=256, gradient_accumulation_steps=4,
        precision="bf16", compile="layer",
    )  # fmt: skip
    presets = ("hf", "torchtitan")
    alone = []
    for preset in presets:
        forget_everything()
        alone.append(estimate(model, replace(setup, kernels=preset), load_gpu("h100")).phases)
    forget_everything()
    both = [
        estimate(model, replace(setup, kernels=each), load_gpu("h100")).phases for each in presets
    ]
    assert both == alone
    assert both[0] != both[1]
