"""LongT5's attention: each block of tokens to itself and its neighbours, and to a summary of every block.

transformers 5.23, models/longt5/modeling_longt5.py, ``LongT5LocalAttention`` and
``LongT5TransientGlobalAttention``. Keys and values are padded by a block on either side and joined out of
three slices; the bias, in which the mask is, is added to the scores in place.
"""

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.attention.position_bias import learned_bias
from memplan.graph.contraction import Turned, contraction
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import matmul_weight
from memplan.graph.segments import RESULT, Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor, allocated_bytes
from memplan.model.attention import AttentionSpec, LocalBlocksSpec, PositionBias
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import WeightRole
from memplan.units import ceil_div


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of what is cut."""

    batch: int
    tokens: int
    """Of one sequence."""
    block: int
    heads: int
    width: int
    """Of all heads together."""
    summaries: int
    """Of blocks, that each token sees beside its neighbours."""

    @property
    def blocks(self) -> int:
        """Of all sequences, the last of each filled up."""
        return self.batch * ceil_div(self.tokens, self.block)

    @property
    def rows(self) -> int:
        """Tokens of all blocks."""
        return self.blocks * self.block

    @property
    def pairs(self) -> int:
        """Of a token and a neighbour, for one head."""
        return self.rows * 3 * self.block


def share_local_mask(t: Tape, spec: LocalBlocksSpec, context: StackContext) -> None:
    """What the stack hands its layers: which neighbours are there, or which tokens are no padding."""
    ones = t.tensor(context.batch * context.seq_len, DType.FP32)
    t.record(OperationKind.ONES, (), (ones,))
    t.hold(ones)
    context.mask = ones if spec.global_block_size else _neighbours(t, _sizes(spec, context))


def _neighbours(t: Tape, sizes: Sizes, *, held: bool = True) -> Tensor:
    seen, mask = t.tensor(sizes.pairs, DType.BOOL), t.tensor(sizes.pairs, DType.BOOL)
    t.record(OperationKind.BITWISE_AND, (), (seen,))
    t.record(OperationKind.BITWISE_AND, (seen,), (mask,))
    if held:
        t.hold(mask)
    return mask


def _sizes(spec: LocalBlocksSpec, context: StackContext) -> Sizes:
    scores = spec.scores
    summaries = context.seq_len // spec.global_block_size if spec.global_block_size else 0
    return Sizes(
        context.batch, context.seq_len, spec.radius + 1, scores.num_heads,
        scores.num_heads * scores.head_dim, summaries,
    )  # fmt: skip


def local_blocks(t: Tape, x: Tensor, spec: LocalBlocksSpec, context: StackContext) -> Tensor:
    """Projections, blocks and their neighbours, scores, bias, values, the output projection."""
    sizes, hidden, scores_of = _sizes(spec, context), context.hidden_size, spec.scores
    held: list[Tensor] = []
    summaries = None
    if spec.global_block_size:
        summaries = _summaries(t, x, sizes, hidden, held)
        held.append(summaries)
    role = WeightRole.QUERY_KEY
    weights = [
        t.matrix(f"self_attn.{name}_proj.weight", sizes.width, hidden, role=role if name != "v" else WeightRole.MATRIX)
        for name in "qkv"
    ]  # fmt: skip
    query, key, value = (matmul_weight(t, x, weight) for weight in weights)
    sides = [] if summaries is None else [matmul_weight(t, summaries, each) for each in weights[1:]]
    query = _whole_blocks(t, _seen_by_head(t, query), sizes)
    key, value = (_whole_blocks(t, each, sizes) for each in (key, value))
    key, value = _three_blocks(t, key, sizes), _three_blocks(t, value, sizes)
    if sides:
        repeated = [_repeated(t, each, sizes) for each in sides]
        key, value = t.concatenate(key, repeated[0]), t.concatenate(value, repeated[1])
        held += repeated
    keys = 3 * sizes.block + sizes.summaries
    numel = sizes.rows * sizes.heads * keys
    scores = contraction(t, query, key, numel, scores_of.head_dim, Turned(first=True, second=True))
    bias = _bias(t, spec, sizes, context, scores.dtype, held)
    scores = _added(t, scores, bias)
    soft = softmax(t, t.cast(scores, DType.FP32))
    dropped = dropout(t, t.cast(soft, scores.dtype), scores_of.dropout)
    out = contraction(
        t, dropped, value, sizes.rows * sizes.width, keys, Turned(second=True, result=True)
    )
    rows = t.contiguous(out)
    if sizes.rows != sizes.batch * sizes.tokens:
        rows = t.slice(rows, sizes.batch * sizes.tokens * sizes.width)
    role = WeightRole.ATTENTION_OUTPUT
    weight = t.matrix("self_attn.o_proj.weight", hidden, sizes.width, role=role)
    result = matmul_weight(t, rows, weight)
    t.touch(query, key, value, scores, dropped, *held)
    return result


def _seen_by_head(t: Tape, x: Tensor) -> Tensor:
    """A view, whose gradient comes head by head from a product and is copied into rows."""
    out = t.view(x, x.numel)
    t.record(OperationKind.VIEW, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def _whole_blocks(t: Tape, x: Tensor, sizes: Sizes) -> Tensor:
    """Zeros behind each sequence, where it does not fill its last block."""
    if sizes.rows == sizes.batch * sizes.tokens:
        return x
    out = t.tensor(sizes.rows * sizes.width, x.dtype)
    t.record(OperationKind.PAD, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def _three_blocks(t: Tape, x: Tensor, sizes: Sizes) -> Tensor:
    """Each block between its neighbours: three slices of the padded whole, joined."""
    outer = sizes.rows + 2 * sizes.batch * sizes.block
    padded = t.tensor(outer * sizes.width, x.dtype)
    t.record(OperationKind.PAD, (x,), (padded,), gradients=(Gradient.FRESH,))
    out = t.concatenate(*(t.slice(padded, sizes.rows * sizes.width) for _ in range(3)))
    t.touch(x)  # the caller's name for it is given to what is joined
    return out


def _repeated(t: Tape, x: Tensor, sizes: Sizes) -> Tensor:
    """The summaries of a sequence, once for each of its blocks."""
    out = t.tensor(sizes.blocks * sizes.summaries * sizes.width, x.dtype)
    t.record(OperationKind.REPEAT, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def _summaries(t: Tape, x: Tensor, sizes: Sizes, hidden: int, held: list[Tensor]) -> Tensor:
    """``_create_global_aggregates``: tokens summed up by a product with marks of their blocks; a norm."""
    tokens = sizes.batch * sizes.tokens
    owners, marked = (
        t.tensor(tokens, DType.INT32),
        t.tensor(sizes.batch * sizes.summaries, DType.INT32),
    )
    t.record(OperationKind.CUMSUM, (), (owners, marked))
    held += [owners, marked]
    chosen = t.tensor(tokens, DType.INT32)
    t.record(OperationKind.WHERE, (owners,), (chosen,))
    ones = t.tensor(tokens * (sizes.summaries + 1), DType.INT64)
    t.record(OperationKind.SCATTER, (chosen,), (ones,))
    marks = t.tensor(tokens * sizes.summaries, x.dtype)
    t.record(OperationKind.TO, (ones,), (marks,))
    given, factor = x, marks
    if t.autocast is not None:
        given, factor = t.cast(x, t.autocast), t.cast(marks, t.autocast)
    out = t.tensor(sizes.batch * sizes.summaries * hidden, given.dtype)
    t.record(
        OperationKind.MATMUL, (given, factor), (out,), saves=(factor,),
        gradients=(Gradient.FRESH, Gradient.NONE), flops=2 * out.numel * sizes.tokens,
    )  # fmt: skip
    t.touch(chosen, ones)
    spec = NormSpec(kind=NormKind.RMS_T5)
    return norm(t, out, spec, "self_attn.global_norm", hidden)


def _bias(
    t: Tape,
    spec: LocalBlocksSpec,
    sizes: Sizes,
    context: StackContext,
    dtype: DType,
    held: list[Tensor],
) -> Tensor:
    """What the first layer makes for all: distances looked up, plus the mask."""
    mask = context.mask
    if spec.global_block_size:
        found = _neighbours(t, sizes, held=False)
        mask = _penalty(t, found, sizes.pairs)
        held.append(mask)
    if spec.scores.position_bias is PositionBias.EARLIER_LEARNED and context.bias is not None:
        return context.bias
    near = learned_bias(t, spec.scores, sizes.block, 3 * sizes.block, "self_attn")
    if not spec.global_block_size:
        mask = _penalty(t, mask, sizes.pairs)
        held.append(mask)
    bias = _with_mask(t, near, mask, sizes.pairs * sizes.heads)
    if spec.global_block_size:
        side = _side_bias(t, spec.scores, sizes, dtype)
        held.append(side)
        bias = t.concatenate(t.cast(bias, dtype), side)
    t.hold(bias)
    context.bias = bias
    return bias


def _penalty(t: Tape, seen: Tensor | None, numel: int) -> Tensor:
    """Zero, or a large negative number in fp32 where nothing is to be seen."""
    flags, out = t.tensor(numel, DType.BOOL), t.tensor(numel, DType.FP32)
    t.record(OperationKind.GT, () if seen is None else (seen,), (flags,))
    t.record(OperationKind.WHERE, (flags,), (out,))
    if seen is not None:
        t.touch(seen)
    return out


def _with_mask(t: Tape, bias: Tensor, mask: Tensor | None, numel: int) -> Tensor:
    """The sum in fp32, for every sequence: the bias's gradient is summed up, then cast."""
    out = t.tensor(numel, DType.FP32)
    inputs = (bias,) if mask is None else (bias, mask)
    summed = allocated_bytes(bias.numel, DType.FP32)
    gradients = (Gradient.FRESH, Gradient.NONE)[: len(inputs)]
    t.record(
        OperationKind.ADD, inputs, (out,), gradients=gradients,
        backward_scratch_bytes=0 if bias.dtype is DType.FP32 else summed,
    )  # fmt: skip
    return out


def _side_bias(t: Tape, scores: AttentionSpec, sizes: Sizes, dtype: DType) -> Tensor:
    """``compute_side_bias``: of each token and the summary of each block, looked up in a table of its own."""
    pairs = sizes.batch * sizes.tokens * sizes.summaries
    equal = t.tensor(pairs, DType.BOOL)
    t.record(OperationKind.EQ, (), (equal,))
    penalty = _penalty(t, equal, pairs)
    held = [equal, penalty]
    rows = sizes.batch * sizes.tokens
    found = learned_bias(t, scores, rows, sizes.summaries, "self_attn.global", held=held)
    out = _with_mask(t, found, penalty, pairs * sizes.heads)
    t.touch(*held, found)
    if sizes.rows != sizes.batch * sizes.tokens:
        padded = t.tensor(sizes.rows * sizes.summaries * sizes.heads, out.dtype)
        t.record(OperationKind.PAD, (out,), (padded,), gradients=(Gradient.FRESH,))
        out = padded
    return t.cast(out, dtype)


def _added(t: Tape, scores: Tensor, bias: Tensor) -> Tensor:
    """``scores += bias`` on a view: backward copies the gradient, lets it go, and copies the copy twice,
    one of them cast for the bias (torch 2.13, ``CopySlices``)."""
    out = t.view(scores, scores.numel)
    copy = allocated_bytes(scores.numel, scores.dtype)
    scratch = () if bias.dtype is scores.dtype else (RESULT, copy, RESULT)
    t.record(
        OperationKind.ADD_IN_PLACE, (scores, bias), (out,),
        gradients=(Gradient.FRESH, Gradient.FRESH), backward_scratch_bytes=scratch,
    )  # fmt: skip
    seen = t.view(out, out.numel)
    t.record(OperationKind.VIEW, (out,), (seen,), gradients=(Gradient.FRESH,))
    return seen
