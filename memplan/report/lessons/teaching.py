"""What a variant of an operation keeps for the backward pass, seen on a tape that it is recorded on.

What autograd calls what it keeps: torch 2.13 ``tools/autograd/derivatives.yaml``.
"""

from collections.abc import Callable
from math import prod

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Operation
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Storage, Tensor, allocated_bytes
from memplan.memory.step import StepWalk
from memplan.training.choices_of_kernels.kernels import (
    Kernels,
)
from memplan.units import GIB, size_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What a lesson is about; by default one sequence through a layer of Llama-2-7B, in bf16."""

    batch: int = 1
    tokens: int = 2048
    hidden: int = 4096
    width: int = 11008
    """Of the feed-forward network."""
    heads: int = 32
    head_dim: int = 128
    vocabulary: int = 32000
    dtype: DType = DType.BF16
    of_shape: tuple[int, ...] = ()
    """One tensor's, where it was given: it is what every lesson on single tensors is about."""

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: DType) -> "Sizes":
        """Those of one tensor: sequences, tokens and hidden size are its dimensions.

        >>> Sizes.of((512, 1024, 1024), DType.FP16).hidden_numel == 2**29
        True
        """
        *before, tokens, hidden = (1, 1, *shape)
        return cls(batch=prod(before), tokens=tokens, hidden=hidden, dtype=dtype, of_shape=shape)

    @property
    def large(self) -> tuple[int, DType]:
        """Numbers and format of the lessons on large tensors."""
        return (self.hidden_numel, self.dtype) if self.of_shape else (GIB // 4, DType.FP32)

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.tokens

    @property
    def hidden_numel(self) -> int:
        """Numbers of the residual stream."""
        return self.rows * self.hidden

    @property
    def attended_numel(self) -> int:
        """Numbers of the queries, the keys or the values."""
        return self.rows * self.heads * self.head_dim

    @property
    def scores_numel(self) -> int:
        """Numbers of the scores of all heads."""
        return self.batch * self.heads * self.tokens**2

    def __str__(self) -> str:
        if self.of_shape:
            sizes = " x ".join(map(str, self.of_shape))
            size = allocated_bytes(self.hidden_numel, self.dtype)
            return f"tensors of {sizes} in {self.dtype.label}: {size_text(size)}"
        sequences = f"{self.batch} sequences of " if self.batch > 1 else ""
        return (
            f"{sequences}{self.tokens:,} tokens, hidden size {self.hidden:,}, feed-forward {self.width:,}, "
            f"{self.heads} heads, vocabulary {self.vocabulary:,}, {self.dtype.label}"
        )


USUAL = Sizes()
LARGE = f"tensors of 1 GiB: {GIB // 4:,} numbers in fp32"

Record = Callable[[Tape, Sizes], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to write or call the operation."""

    name: str
    record: Record
    kernels: Kernels = Kernels()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """An operation, the ways to run it, and why they keep what they keep."""

    name: str
    title: str
    why: str
    source: str
    variants: tuple[Variant, ...]
    """The usual way first."""
    fixed_sizes: str = ""
    """What it is about where that is not the sizes of a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStep:
    """One operation on the tape."""

    operation: str
    made_bytes: int
    saves: tuple[tuple[str, int], ...]
    """What it keeps: a description and its bytes; what another one keeps already left out."""
    again_bytes: int
    """What it keeps that another one kept before: counted once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taught:
    """One variant, recorded."""

    variant: Variant
    steps: tuple[SavedStep, ...]
    kept_bytes: int
    """What stays for backward, each storage once."""
    output_bytes: int
    kept_beside_output_bytes: int
    """The same without the result, which somebody else holds anyway."""
    kept_beside_given_bytes: int
    """The same without what it is given, which is there before it runs."""
    given_bytes: int
    peak_bytes: int
    """The most alive at once, forward or backward, weights and their gradients left out."""
    forward_peak_bytes: int
    """The same of the forward pass alone."""


def teach(variant: Variant, sizes: Sizes = USUAL) -> Taught:
    """Record a variant on a tape of its own and see what it keeps."""
    tape = Tape(
        TapeOptions(
            batch_size=sizes.batch, seq_len=sizes.tokens, weights=sizes.dtype, compute=sizes.dtype,
            kernels=variant.kernels,
        )
    )  # fmt: skip
    tape.begin(variant.name)
    out = variant.record(tape, sizes)
    tape.end(out)
    seen: dict[Storage, None] = {}
    steps: list[SavedStep] = []
    given: dict[Storage, None] = {}
    for operation in tape.segment.operations:
        if operation.kind is OperationKind.GIVEN:
            given.update(dict.fromkeys(each.storage for each in operation.outputs))
        else:
            steps.append(_step(operation, tape.segment.operations, seen))
    kept = sum(storage.num_bytes for storage in seen)
    beside = sum(storage.num_bytes for storage in seen if storage is not out.storage)
    forward_peak, peak = _peaks(tape)
    return Taught(
        variant=variant,
        steps=tuple(steps),
        kept_bytes=kept,
        output_bytes=out.storage.num_bytes,
        kept_beside_output_bytes=beside,
        kept_beside_given_bytes=sum(each.num_bytes for each in seen if each not in given),
        given_bytes=sum(each.num_bytes for each in given),
        peak_bytes=peak,
        forward_peak_bytes=forward_peak,
    )


def _peaks(tape: Tape) -> tuple[int, int]:
    """The most alive in the forward pass, and in both."""
    passes = StepWalk(tape).run()
    forward = [height.total_bytes for each in passes.forward for height in each.heights()]
    backward = [
        each.start.total_bytes + interval.peak.total_bytes
        for each in passes.backward
        for interval in each.intervals
    ]
    return max(forward), max(forward + backward)


def _step(
    operation: Operation, operations: list[Operation], seen: dict[Storage, None]
) -> SavedStep:
    saves, again = [], 0
    own = {tensor.storage for tensor in operation.outputs}
    read = {tensor.storage for tensor in operation.inputs}
    places = {tensor.storage: place for place, tensor in enumerate(operation.inputs)}
    for storage in sorted(dict.fromkeys(operation.held), key=lambda each: places.get(each, 99)):
        if storage in seen:
            again += storage.num_bytes
            continue
        seen[storage] = None
        what = _described(storage, own, read, operations)
        name = saved_name(operation, storage)
        if operation.kind is OperationKind.MUL and name in _FACTORS:
            what = f"{_FACTORS[name]}, {what}"
        if name:
            what += f" ({name})"
        saves.append((what, storage.num_bytes))
    made = sum(storage.num_bytes for storage in own - read)
    return SavedStep(
        operation=operation.name, made_bytes=made, saves=tuple(saves), again_bytes=again
    )


_FACTORS = {"_saved_self": "the first factor", "_saved_other": "the second factor"}
_PYTHON = frozenset({
    OperationKind.ROTARY, OperationKind.FUSED_GATE, OperationKind.FUSED_LINEAR_CROSS_ENTROPY,
    OperationKind.FUSED_SOFTMAX, OperationKind.GELU_NEW,
    OperationKind.VOCAB_PARALLEL_CROSS_ENTROPY,
})  # fmt: skip
"""Kernels of others, which keep what they keep in ``saved_tensors``."""
_ATTENTION = frozenset({
    OperationKind.FLASH_ATTENTION, OperationKind.CUDNN_ATTENTION, OperationKind.EFFICIENT_ATTENTION,
})  # fmt: skip
_INPUT_NAMES = {
    **dict.fromkeys(_ATTENTION, ("_saved_query", "_saved_key", "_saved_value")),
    OperationKind.CONVOLUTION: ("_saved_input", "_saved_weight"),
    OperationKind.LAYER_NORM: ("_saved_input",),
    OperationKind.LINEAR: ("_saved_self", "_saved_mat2"),
    OperationKind.MASKED_FILL: ("", "_saved_mask"),
    OperationKind.WHERE: ("_saved_condition",),
    OperationKind.MATMUL: ("_saved_self", "_saved_mat2"),
    OperationKind.NLL_LOSS: ("_saved_self", "_saved_target"),
    OperationKind.RMS_NORM: ("_saved_input",),
}
_RESULT_NAMES = {
    **dict.fromkeys(_ATTENTION, ("_saved_output", "_saved_logsumexp")),
    OperationKind.DROPOUT: ("_saved_result1",),
    OperationKind.LAYER_NORM: ("", "_saved_result1", "_saved_result2"),
    OperationKind.RMS_NORM: ("", "_saved_result1"),
    OperationKind.NLL_LOSS: ("", "_saved_total_weight"),
}
"""Attributes of ``grad_fn`` where they are not called as most are (torch 2.13)."""


def saved_name(operation: Operation, storage: Storage) -> str:
    """Under which name autograd keeps it, as ``y.grad_fn._saved_self``; empty where that is not known."""
    if operation.kind in _PYTHON:
        return ""
    if operation.kind is OperationKind.EMBEDDING:
        return "_saved_indices"  # all it keeps; the table is no input on the tape
    inputs = _INPUT_NAMES.get(operation.kind, ("_saved_self", "_saved_other"))
    results = _RESULT_NAMES.get(operation.kind, ("_saved_result",))
    for tensors, names in ((operation.inputs, inputs), (operation.outputs, results)):
        for tensor, name in zip(tensors, names, strict=False):
            if tensor.storage is storage:
                return name
    return ""


def _described(
    storage: Storage, own: set[Storage], read: set[Storage], operations: list[Operation]
) -> str:
    if storage in own and storage not in read:
        return "its result"
    for operation in operations:
        if any(tensor.storage is storage for tensor in operation.outputs):
            if operation.kind is OperationKind.GIVEN:
                return "its input"
            return f"the result of {operation.name}"
    return "its input"


# -- inputs --------------------------------------------------------------------------------------


def given(t: Tape, numel: int, dtype: DType | None = None, *, requires_grad: bool = True) -> Tensor:
    """A tensor that was there before, in the lesson's format."""
    made = t.tensor(numel, dtype or t.options.compute, requires_grad=requires_grad)
    t.record(OperationKind.GIVEN, (), (made,))
    return made


def hidden_states(t: Tape, sizes: Sizes) -> Tensor:
    """The residual stream of the lessons' layer."""
    return given(t, sizes.hidden_numel)
