"""A number that is a size alone changes sizes alone, whatever is trained and however it is spread.

Two ranks run the program that four run, a batch of two the one of a batch of three: the same operations, and the same blocks
that come and go in the same order. A tensor of the batch is a multiple of it, and what is cut or joined is as large as its parts.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from memplan.estimator.job import Job
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Operation
from memplan.graph.core.tape import Tape
from memplan.memory.programs import program_of
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.memory.test_features_on_both_ledgers import JOBS
from tests.memory.test_megatron import DEEPSEEK, LLAMA
from tests.memory.test_tally import ENGINES, MODELS

LOSSES = ("fused_linear", "cut", "chunked", "trl", "torchtune", "flash_attn")
WAYS: dict[str, dict[str, Any]] = {
    **{each: {"job": each} for each in JOBS},
    **{each: {"loss": each} for each in LOSSES},
    **{each: {"kernels": each} for each in ("liger", "unsloth", "torchtitan", "megatron")},
    "layers compiled": {"compile": "layer"},
    "checkpoints": {"checkpointing": "full", "gradient_accumulation_steps": 2},
    "selective": {"checkpointing": "selective"},
    "LoRA": {"adapter": {"lora": {"rank": 4, "targets": "all-linear"}}},
    "DoRA": {
        "adapter": {"lora": {"rank": 4, "dora": True, "targets": ["q_proj", "o_proj"]}},
        "quantize": "nf4",
    },
    "prompt": {"adapter": {"prompt": 8}},
    "fp8": {"fp8": "te-delayed"},
    "evaluation": {"evaluation": "4:batches_kept=3"},
    "fp32": {"precision": "fp32", "dropout": 0.1},
}
ROW_BY_ROW = ("dpo", "orpo", "kto", "grpo:reference=same", "ppo")
"""TRL takes log-probabilities of one sequence after the other (``selective_log_softmax``)."""
SPREAD: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "megatron, tensors": (
        {**LLAMA, "num_key_value_heads": 8},
        {"engine": "megatron", "num_gpus": 2, "tensor_parallel": 2},
        {"num_gpus": 4, "tensor_parallel": 4},
    ),
    "megatron, tokens too": (
        {**LLAMA, "num_key_value_heads": 8},
        {"engine": "megatron", "num_gpus": 2, "tensor_parallel": 2, "sequence_parallel": True},
        {"num_gpus": 4, "tensor_parallel": 4},
    ),
    "megatron, latent": (
        DEEPSEEK,
        {"engine": "megatron", "num_gpus": 8, "tensor_parallel": 2, "sequence_parallel": True},
        {"num_gpus": 16, "tensor_parallel": 4},
    ),
    "megatron, a ring": (
        LLAMA, {"engine": "megatron", "num_gpus": 2, "context_parallel": 2},
        {"num_gpus": 4, "context_parallel": 4},
    ),
    "megatron, experts": (
        DEEPSEEK,
        {"engine": "megatron", "num_gpus": 4, "expert_parallel": 2},
        {"num_gpus": 8, "expert_parallel": 4},
    ),
}  # fmt: skip
AS_LARGE = {OperationKind.ADD, OperationKind.TO, OperationKind.CLONE}
"""Operations whose result is as large as one of what they read."""
BY_PLACE = ("zero1", "zero2", "megatron, tensors", "megatron, tokens too", "megatron, latent")
"""How these names begin: of how many parameters a rank has a share goes by how many ranks there are."""


def given_for(config: dict[str, Any], fields: dict[str, Any]) -> RankInput:
    setup = TrainingSetup(**{"seq_len": 96, **fields})
    return Job.of(load_model(config), setup, None).given


def operations(tape: Tape) -> list[Operation]:
    return [each for segment in tape.segments for each in segment.operations]


def turns(given: RankInput) -> list[int]:
    """Blocks as they come, each of one size, and go again, in the last rank's first two steps."""
    ledger = Ledger()
    program = program_of(given, ledger, workspace_bytes=0, rank=given.setup.num_gpus - 1)
    program.start()
    for step in range(2):
        program.train(step, num_micro_batches=min(2, given.setup.gradient_accumulation_steps))
    return [min(each, 1) for each in ledger.events]


def check_same_program(one: RankInput, other: RankInput, *, blocks: bool = True) -> None:
    ours, theirs = (
        [(each.kind, len(each.saved)) for each in operations(given.tape)] for given in (one, other)
    )
    assert ours == theirs
    if blocks:
        assert turns(one) == turns(other)


def check_conserved(tape: Tape) -> None:
    """What is cut is as large as its parts, and what is joined as what went in, once or often."""
    for each in operations(tape):
        inputs, outputs = (sum(x.numel for x in of) for of in (each.inputs, each.outputs))
        if each.kind is OperationKind.SPLIT:
            assert inputs == outputs, each
        if each.kind is OperationKind.CAT:
            assert outputs % inputs == 0, each
        if each.inputs and each.kind in AS_LARGE:
            assert {x.numel for x in each.outputs} <= {x.numel for x in each.inputs}, each


def check_multiples(one: Tape, other: Tape, batches: tuple[int, int]) -> None:
    """Each tensor has as many elements for each sequence, or as many in all."""
    for ours, theirs in zip(operations(one), operations(other), strict=True):
        for few, many in zip(ours.outputs, theirs.outputs, strict=True):
            each_has_as_many = few.numel * batches[1] == many.numel * batches[0]
            assert few.numel == many.numel or each_has_as_many, (ours.kind, few.numel, many.numel)


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_a_size(way: str) -> None:
    batches = 2, 3
    for model in ("llama", "mixtral"):
        config = MODELS[model][0]
        one, other = (given_for(config, {**WAYS[way], "micro_batch_size": n}) for n in batches)
        check_conserved(one.tape)
        if way not in ROW_BY_ROW:
            check_same_program(one, other)
            check_multiples(one.tape, other.tape, batches)


def spread() -> Iterator[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    for name, fields in ENGINES.items():
        if "num_gpus" in fields:
            yield name, MODELS["llama"][0], {**fields, "num_gpus": 2}, {"num_gpus": 4}
    for name, (config, few, more) in SPREAD.items():
        yield name, config, few, more


@pytest.mark.parametrize(
    ("name", "config", "few", "more"), [pytest.param(*each, id=each[0]) for each in spread()]
)
def test_ranks_are_a_size(
    name: str, config: dict[str, Any], few: dict[str, Any], more: dict[str, Any]
) -> None:
    one, other = given_for(config, few), given_for(config, {**few, **more})
    check_same_program(one, other, blocks=not name.startswith(BY_PLACE))
    check_conserved(other.tape)
