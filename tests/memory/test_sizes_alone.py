"""A number that is a size alone changes sizes alone, whatever is trained and however it is spread.

Two ranks run the program that four run, a batch of two the one of a batch of three: the same operations, and the same blocks
that come and go in the same order. A tensor of the batch is a multiple of it, and what is cut or joined is as large as its parts.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from memplan.dtypes import DType
from memplan.estimator.job import Job
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Operation
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.graph.counts import total_parameters
from memplan.graph.model import record_model
from memplan.memory.programs import program_of
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger
from memplan.sources.models import load_model
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import LossKernel
from memplan.training.setup import TrainingSetup
from tests.memory.test_features_on_both_ledgers import JOBS
from tests.memory.test_megatron import DEEPSEEK, LLAMA
from tests.memory.test_orders import DATA as ORDERS
from tests.memory.test_tally import ENGINES, MODELS

LOSSES = [each.value for each in LossKernel]
ADAPTER = {"lora": {"rank": 4, "targets": ["q_proj", "o_proj"]}}
WAYS: dict[str, dict[str, Any]] = {
    **{each: {"job": each} for each in JOBS},
    **{each: {"loss": each} for each in LOSSES if "tiled" not in each},
    **{each: {"loss": each, "precision": "bf16"} for each in LOSSES if "tiled" in each},
    **{each: {"kernels": each} for each in ("liger", "unsloth", "torchtitan", "megatron")},
    "layers compiled": {"compile": "layer"},
    "pieces compiled": {"compile": "layer", "loss": "torchtune", "micro_batch_size": 2},
    "checkpoints": {"checkpointing": "full", "gradient_accumulation_steps": 2},
    "selective": {"checkpointing": "selective"},
    "LoRA": {"adapter": {"lora": {"rank": 4, "targets": "all-linear"}}},
    "DoRA": {
        "adapter": {"lora": {"rank": 4, "dora": True, "targets": ["q_proj", "o_proj"]}},
        "quantize": "nf4",
    },
    "prompt": {"adapter": {"prompt": 8}},
    **{each.value: {"fp8": each.value} for each in Fp8Recipe},
    **{each: {"quantize": each, "adapter": ADAPTER} for each in ("nf4", "int8", "gptq", "awq")},
    "evaluation": {"evaluation": "4:batches_kept=3"},
    "fp32": {"precision": "fp32", "dropout": 0.1},
}
NARROW = {**MODELS["llama"][0], "vocab_size": 4096, "intermediate_size": 1024}
WIDTHS = ({"vocab_size": 8192}, {"intermediate_size": 2048}, {"hidden_size": 512, "head_dim": 128})
ROW_BY_ROW = ("dpo", "orpo", "kto", "grpo:reference=same", "ppo")
"""TRL takes log-probabilities of one sequence after the other (``selective_log_softmax``)."""
CUT = ("fused_linear", "liger")
"""Their loss takes so many rows at once as make as much of the logits as the hidden states have."""
SORTED = ("dpo:log_probabilities=fused", "reward")
"""Which rows of an embedding's gradient are summed up first goes by how many there are."""
DIVISIBLE = {**LLAMA, "num_key_value_heads": 8, "vocab_size": 32768}
SPREAD: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "megatron, tensors": (
        DIVISIBLE,
        {"engine": "megatron", "num_gpus": 2, "tensor_parallel": 2},
        {"num_gpus": 4, "tensor_parallel": 4},
    ),
    "megatron, tokens too": (
        DIVISIBLE,
        {"engine": "megatron", "num_gpus": 2, "tensor_parallel": 2, "sequence_parallel": True},
        {"num_gpus": 4, "tensor_parallel": 4},
    ),
    "megatron, latent": (
        DEEPSEEK,
        {"engine": "megatron", "num_gpus": 8, "tensor_parallel": 2, "sequence_parallel": True},
        {"num_gpus": 16, "tensor_parallel": 4},
    ),
    "tensors": (
        DIVISIBLE, {"engine": "fsdp", "num_gpus": 2, "tensor_parallel": 2},
        {"num_gpus": 4, "tensor_parallel": 4},
    ),
    "tokens too": (
        DIVISIBLE, {"engine": "ddp", "num_gpus": 2, "tensor_parallel": 2, "sequence_parallel": True},
        {"num_gpus": 4, "tensor_parallel": 4},
    ),
    "tensors of ZeRO": (
        DIVISIBLE, {"engine": "deepspeed", "zero_stage": 1, "num_gpus": 2, "tensor_parallel": 2},
        {"num_gpus": 4, "tensor_parallel": 4},
    ),
    "a ring": (
        DIVISIBLE, {"engine": "fsdp", "num_gpus": 2, "context_parallel": 2, "seq_len": 256},
        {"num_gpus": 4, "context_parallel": 4},
    ),
    "heads exchanged": (
        DIVISIBLE, {"engine": "deepspeed", "zero_stage": 3, "num_gpus": 2, "context_parallel": 2},
        {"num_gpus": 4, "context_parallel": 4},
    ),
    "experts": (
        {**MODELS["mixtral"][0], "num_local_experts": 8},
        {"engine": "fsdp", "num_gpus": 2, "expert_parallel": 2}, {"num_gpus": 4, "expert_parallel": 4},
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
BY_PLACE = (
    "a ring",
    "zero1",
    "zero2",
    "megatron, tensors",
    "megatron, tokens too",
    "megatron, latent",
)
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


def kinds(tape: Tape) -> list[tuple[OperationKind, int]]:
    return [(each.kind, len(each.saved)) for each in operations(tape)]


def check_same_program(one: RankInput, other: RankInput, *, blocks: bool = True) -> None:
    assert kinds(one.tape) == kinds(other.tape)
    if blocks:
        assert turns(one) == turns(other)


def check_conserved(tape: Tape) -> None:
    """What is cut is as large as its parts, what is joined as what went in, once or often, and a sum as its summands."""
    for each in operations(tape):
        inputs, outputs = (sum(x.numel for x in of) for of in (each.inputs, each.outputs))
        if each.kind is OperationKind.SPLIT:
            assert inputs == outputs, each
        if each.kind is OperationKind.CAT:
            assert outputs % inputs == 0, each
        if each.kind is OperationKind.ADD and each.inputs:
            assert outputs % max(x.numel for x in each.inputs) == 0, each


def check_multiples(
    one: Tape, other: Tape, times: tuple[int, int], *, cut: bool = False, is_square: bool = False
) -> None:
    """Whatever has a size has the same one, or as much for each: tensors, gradients, products, what is sent and, but for
    rounding, temporaries. How many pieces a loss is ``cut`` into goes by sizes."""
    powers = [(times[0] ** each, times[1] ** each) for each in range(3 if is_square else 2)]
    for ours, theirs in zip(operations(one), operations(other), strict=True):
        for few, many in zip(sizes(ours), sizes(theirs), strict=True):
            assert any(few * b == many * a for a, b in powers), (ours.kind, few, many)
        if (
            cut or ours.kind is OperationKind.INDEX
        ):  # a short table is sorted otherwise than a long one
            continue
        for few, many in zip(temporaries(ours), temporaries(theirs), strict=True):
            off = min(abs(few * b - many * a) for a, b in powers)
            assert off <= max(times) * ALLOCATION_ROUNDING, (ours.kind, few, many)


def sizes(operation: Operation) -> list[int]:
    sends = (*operation.sends.forward, *operation.sends.backward)
    gradients = [each for each in operation.gradients if each <= 0]
    return [
        operation.flops, *(each.numel for each in operation.outputs), *gradients,
        *(each.num_bytes for each in sends),
    ]  # fmt: skip


def temporaries(operation: Operation) -> list[int]:
    gradients = [each for each in operation.gradients if each > 0]
    return [*operation.forward_scratch, *operation.backward_scratch, *gradients]


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_a_size(way: str) -> None:
    batches = 2, 3
    for model in ("llama", "mixtral"):
        fields = {"seq_len": 256, **WAYS[way]}
        one, other = (
            given_for(MODELS[model][0], {**fields, "micro_batch_size": each}) for each in batches
        )
        check_conserved(one.tape)
        if way not in ROW_BY_ROW:
            check_same_program(one, other, blocks=way not in SORTED)
            check_multiples(one.tape, other.tape, batches, cut=way in CUT)


@pytest.mark.parametrize("record", ORDERS["records"], ids=lambda record: str(record["name"]))
def test_a_batch_is_a_size_to_every_kind_of_layer(record: dict[str, Any]) -> None:
    model = load_model(record["config"], record["task"])
    one, other = (
        record_model(model, TapeOptions(batch_size=each, seq_len=64, compute=DType.BF16))
        for each in (2, 3)
    )
    assert kinds(one) == kinds(other)
    check_multiples(one, other, (2, 3))
    check_conserved(one)


@pytest.mark.parametrize("way", WAYS)
def test_widths_are_sizes(way: str) -> None:
    """Of words, of a network and of the hidden states, two of which make a matrix."""
    narrow = given_for(NARROW, WAYS[way])
    for width in WIDTHS:
        wide = given_for({**NARROW, **width}, WAYS[way])
        check_same_program(narrow, wide)
        is_square = "hidden_size" in width
        check_multiples(narrow.tape, wide.tape, (1, 2), cut=way in CUT, is_square=is_square)


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
    assert total_parameters(one.tape) == total_parameters(other.tape)
    if "ring" not in name:
        check_multiples(other.tape, one.tape, (1, 2))
