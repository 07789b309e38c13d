"""Longformer's attention within a window, chunk by chunk (``LongformerSelfAttention``).

Queries and keys are cut into chunks that overlap by half, whose scores are laid out along diagonals;
values are cut into chunks of three halves. What is cut is a view that overlaps itself, so that a product
copies it, and its gradient is added up by index (torch's ``as_strided_backward``).
"""

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.attention.own_ways.turned import turned_linear
from memplan.graph.attention.projections import idle_projection
from memplan.graph.contraction import Turned, contraction
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.elementwise import dropout, written
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.attention import SlidingChunksSpec
from memplan.model.parameters import WeightRole


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of what is cut."""

    heads: int
    """Of all sequences."""
    batch: int
    tokens: int
    """Of one sequence."""
    half: int
    """Neighbours on either side."""
    width: int
    """Of a head."""

    @property
    def chunks(self) -> int:
        """That overlap by half."""
        return self.tokens // self.half - 1

    @property
    def scores(self) -> int:
        """Of each token with its neighbours and itself."""
        return self.heads * self.tokens * (2 * self.half + 1)


def sliding_chunks(t: Tape, x: Tensor, spec: SlidingChunksSpec, context: StackContext) -> Tensor:
    """Projections token by token, scores along diagonals, values, the output projection."""
    hidden, batch = context.hidden_size, context.batch
    sizes = Sizes(
        batch * spec.num_heads, batch, context.seq_len, spec.window // 2, hidden // spec.num_heads
    )
    query, key, value = (
        _projection(t, x, f"self_attn.{name}_proj", hidden, batch) for name in "qkv"
    )
    for name in ("query_global", "key_global", "value_global"):
        idle_projection(t, f"self_attn.{name}", hidden)
    scaled = t.view(query, query.numel)
    t.record(OperationKind.MUL_IN_PLACE, (query,), (scaled,), gradients=(Gradient.FRESH,))
    scores = _diagonals(t, scaled, key, sizes)
    held = _masked(t, context.mask, sizes)
    weights = _weights(t, scores, spec, sizes)
    out = _values(t, weights, value, sizes)
    t.touch(query, key, value, *held, weights)
    result = _projection(t, out, "self_attn.o_proj", hidden, batch, last=True)
    t.touch(out)
    return result


def _projection(
    t: Tape, x: Tensor, name: str, hidden: int, batch: int, *, last: bool = False
) -> Tensor:
    """A linear layer on rows in another order."""
    role = WeightRole.ATTENTION_OUTPUT if last else WeightRole.MATRIX
    if batch == 1:
        return linear(t, x, name, hidden, hidden, bias=True, role=role)
    return turned_linear(t, x, name, hidden, hidden, bias=True, role=role)


def _cut(t: Tape, x: Tensor, numel: int) -> Tensor:
    """Chunks that overlap: their gradient is added up by the numbers of their elements."""
    out = t.view(x, numel)
    t.record(
        OperationKind.VIEW, (x,), (out,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(
            RESULT, allocated_bytes(x.numel, DType.INT64), allocated_bytes(numel, DType.INT64),
        ),
    )  # fmt: skip
    return out


def _diagonals(t: Tape, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
    """``_sliding_chunks_query_key_matmul``: scores of chunks, copied to where their diagonals belong."""
    heads, half, chunks = sizes.heads, sizes.half, sizes.chunks
    cut = heads * chunks * 2 * half * sizes.width
    full = heads * chunks * 4 * half * half
    first, second = _cut(t, query, cut), _cut(t, key, cut)
    scores = contraction(t, first, second, full, sizes.width, Turned(first=True, second=True))
    padded = t.tensor(heads * chunks * (2 * half + 1) * 2 * half, scores.dtype)
    t.record(OperationKind.PAD, (scores,), (padded,), gradients=(Gradient.FRESH,))
    t.touch(scores)
    laid = t.tensor(sizes.scores, scores.dtype)
    t.record(OperationKind.ZEROS, (), (laid,))
    parts = (
        chunks * half * (half + 1), half * (half + 1), chunks * half * half, (half - 1) * (half - 1),
    )  # fmt: skip
    for part in parts:
        laid = written(t, laid, t.slice(padded, heads * max(part, 1)))
    for _ in ("beginning", "end"):
        laid = written(t, laid, _without_edge(t, laid, sizes))
    t.touch(padded)
    return laid


def _without_edge(t: Tape, laid: Tensor, sizes: Sizes) -> Tensor:
    """Neighbours before the first or behind the last token, in a copy."""
    numel = sizes.heads * sizes.half * (sizes.half + 1)
    part = t.slice(laid, numel)
    mask = t.tensor(numel, DType.BOOL)
    t.record(OperationKind.TO, (), (mask,))
    out = t.tensor(numel, laid.dtype)
    t.record(
        OperationKind.WHERE, (mask, part), (out,), saves=(mask,),
        gradients=(Gradient.NONE, Gradient.FRESH),
    )  # fmt: skip
    return out


def _masked(t: Tape, mask: Tensor | None, sizes: Sizes) -> tuple[Tensor, ...]:
    """The mask of padding, laid out as the scores of one head are; added to them in place."""
    chunks, half, dtype = sizes.batch * sizes.chunks, sizes.half, t.autocast or t.compute
    product = t.tensor(chunks * 4 * half * half, dtype)
    t.record(OperationKind.MUL, () if mask is None else (mask,), (product,))
    padded = t.tensor(chunks * (2 * half + 1) * 2 * half, dtype)
    t.record(OperationKind.PAD, (product,), (padded,))
    laid = t.tensor(sizes.batch * sizes.tokens * (2 * half + 1), dtype)
    t.record(OperationKind.COPY_SLICE, (padded,), (laid,))
    return (laid,)


def _weights(t: Tape, scores: Tensor, spec: SlidingChunksSpec, sizes: Sizes) -> Tensor:
    """The fp32 softmax, without what is padding, cast back; dropout."""
    full = t.cast(scores, DType.FP32)
    soft = t.tensor(full.numel, DType.FP32)
    t.record(
        OperationKind.SOFTMAX, (full,), (soft,), saves=(soft,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=0 if t.decomposed else soft.storage.num_bytes,
    )  # fmt: skip
    mask = t.tensor(sizes.batch * sizes.tokens, DType.BOOL)
    filled = t.tensor(full.numel, DType.FP32)
    t.record(
        OperationKind.MASKED_FILL,
        (soft, mask),
        (filled,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )
    weights = t.cast(filled, scores.dtype)
    t.touch(scores)
    return dropout(t, weights, spec.dropout)


def _values(t: Tape, weights: Tensor, value: Tensor, sizes: Sizes) -> Tensor:
    """``_sliding_chunks_matmul_attn_probs_value``, and its result token by token."""
    half, heads = sizes.half, sizes.heads
    turned = t.contiguous(weights)
    longer = t.tensor(heads * (sizes.tokens + 2 * half) * sizes.width, value.dtype)
    t.record(OperationKind.PAD, (value,), (longer,), gradients=(Gradient.FRESH,))
    shifted = t.tensor(heads * sizes.tokens * (3 * half + 2), weights.dtype)
    t.record(OperationKind.PAD, (turned,), (shifted,), gradients=(Gradient.FRESH,))
    t.touch(turned)
    factor = t.slice(shifted, heads * sizes.tokens * 3 * half)
    cut = _cut(t, longer, heads * sizes.tokens * 3 * sizes.width)
    numel = heads * sizes.tokens * sizes.width
    out = contraction(t, factor, cut, numel, 3 * half, Turned(second=True, result=True))
    t.touch(longer)
    rows = t.contiguous(out)
    t.touch(out)
    return rows
