"""Parts of the delta rule in chunks that Kimi Linear's writer runs: masks, running sums, decays of pairs (transformers 5.23)."""

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor

CHUNK = 64
"""Tokens of a chunk: the default of ``torch_chunk_gated_delta_rule``."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the rule on whole chunks."""

    heads: int
    """Value heads of all sequences."""
    tokens: int
    """Of one sequence."""
    chunks: int
    keys: int
    """Width of a key's head."""
    values: int
    """Width of a value's head."""
    strided: bool
    """Tokens come before heads in memory: fp32 states are not copied on their way, and padding by
    nothing keeps the order; so products copy them."""
    batch: int

    @property
    def rows(self) -> int:
        """Padded tokens of all heads."""
        return self.heads * self.chunks * CHUNK

    @property
    def pairs(self) -> int:
        """Pairs of tokens within chunks."""
        return self.rows * CHUNK


def later_tokens(t: Tape) -> Tensor:
    """The mask of a chunk's pairs whose second token comes later."""
    ones = t.tensor(CHUNK * CHUNK, DType.BOOL)
    t.record(OperationKind.ONES, (), (ones,))
    mask = t.tensor(CHUNK * CHUNK, DType.BOOL)
    t.record(OperationKind.TRIU, (ones,), (mask,))
    return mask


def running_sums(t: Tape, decay: Tensor) -> Tensor:
    """``cumsum`` within chunks, whose backward turns the gradient round and back."""
    total = t.tensor(decay.numel, DType.FP32)
    t.record(
        OperationKind.CUMSUM,
        (decay,),
        (total,),
        gradients=(Gradient.FRESH,),
        backward_scratch_bytes=2 * total.storage.num_bytes,
    )
    return total


def decay_of_pairs(t: Tape, total: Tensor, mask: Tensor, numel: int) -> Tensor:
    """The exponential of two tokens' difference, for every pair that the mask leaves."""
    between = t.tensor(numel, DType.FP32)
    t.record(
        OperationKind.SUB,
        (total, total),
        (between,),
        gradients=(Gradient.FRESH, between.storage.num_bytes),
    )
    masked = masked_pairs(t, between, mask)
    t.touch(between)
    return t.elementwise(OperationKind.EXP, masked)


def masked_pairs(t: Tape, x: Tensor, mask: Tensor) -> Tensor:
    """``masked_fill``, which keeps the mask."""
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.MASKED_FILL, (x, mask), (out,), saves=(mask,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def zeros(t: Tape, numel: int, dtype: DType = DType.FP32) -> Tensor:
    """The rule's first state, or what its outputs are written into."""
    out = t.tensor(numel, dtype)
    t.record(OperationKind.ZEROS, (), (out,))
    return out


def without_gradient(x: Tensor) -> Tensor:
    """What makes the last state, which nothing reads: its graph is gone before the loop is."""
    return Tensor(x.numel, x.dtype, x.storage)
