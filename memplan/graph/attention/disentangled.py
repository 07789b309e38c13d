"""DeBERTa's disentangled attention: scores of contents plus scores of contents against distances.

``DisentangledSelfAttention`` of transformers 5.23 (``modeling_deberta``). Every layer projects one
table of relative distances for keys and for queries, multiplies it with all queries and keys, and
gathers each pair's distance out of the product, which autograd keeps.
"""

from collections.abc import Sequence

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, batched_matmul, merged_heads
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolve as convolution
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear, matmul_weight
from memplan.graph.segments import RESULT, Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.temporaries import Temporaries
from memplan.graph.tensors import Parameter, Tensor, allocated_bytes
from memplan.model.attention import AttentionSpec
from memplan.model.distances import DistanceSpec
from memplan.model.layers import ConvolutionSpec, StackSpec
from memplan.model.parameters import WeightRole


def make_distances(t: Tape, stack: StackSpec, context: StackContext) -> None:
    """What the encoder makes once: a mask of every pair, distances, and their table."""
    spec = stack.runs[0].layer.attention
    if not isinstance(spec, AttentionSpec) or spec.distances is None:
        return
    pairs = context.seq_len * context.seq_len
    ones = t.tensor(context.batch * context.seq_len, DType.FP32)
    t.record(OperationKind.ONES, (), (ones,))
    mask = t.tensor(context.batch * pairs, DType.FP32)
    t.record(OperationKind.MUL, (ones,), (mask,))
    relative = t.tensor(pairs, DType.INT64)
    scratch = _of_distances(spec.distances, pairs)
    t.record(OperationKind.SUB, (), (relative,), forward_scratch_bytes=scratch)
    for tensor in (ones, mask, relative):
        t.hold(tensor)
    context.mask, context.relative = mask, relative
    hidden = context.hidden_size
    if spec.distances.max_distance:
        context.distances = t.parameter(
            "rel_embeddings.weight", 2 * spec.distances.max_distance, hidden, role=WeightRole.TABLE
        )
        if spec.distances.norm is not None:
            normed = norm(t, context.distances, spec.distances.norm, "rel_norm", hidden)
            t.hold(normed)
            context.distances = normed


def _of_distances(spec: DistanceSpec, pairs: int) -> tuple[int, ...]:
    """What ``build_relative_position`` makes on its way: DeBERTa repeats the keys' positions first."""
    long, full, bools = (
        allocated_bytes(pairs, dtype) for dtype in (DType.INT64, DType.FP32, DType.BOOL)
    )
    made = Temporaries()
    if not spec.flat_heads:
        made.take(long)
    elif spec.log_buckets:
        _bucketed(made, long, full, bools)
    else:
        return (RESULT,)
    made.result()
    return made.blocks


def _bucketed(made: Temporaries, long: int, full: int, bools: int) -> None:
    """``make_log_bucket_position``, line by line."""
    distance, sign = made.take(long), made.take(long)
    below, above, near = made.take(bools), made.take(bools), made.take(bools)
    made.drop(below, above)
    absolute, unsigned = made.take(long), made.take(long)
    made.drop(near, absolute)
    logarithm = made.take(full)
    for _ in range(5):  # divided, its logarithm, divided, multiplied, rounded, shifted
        following = made.take(full)
        made.drop(logarithm)
        logarithm = following
    near, cast, signed = made.take(bools), made.take(full), made.take(full)
    made.take(full)
    made.drop(near, cast, signed, sign, unsigned, logarithm, distance)


def disentangled_attention(
    t: Tape, x: Tensor, spec: AttentionSpec, context: StackContext
) -> Tensor:
    """Queries, keys and values in one product, three kinds of scores, output projection."""
    if spec.distances is not None and spec.distances.flat_heads:
        return flat_attention(t, x, spec, spec.distances, context)
    hidden = context.hidden_size
    shape = Shape(context.batch, context.seq_len, context.seq_len, spec)
    fused = linear(t, x, "self_attn.in_proj", hidden, 3 * hidden)
    query, key, value = t.split(t.slice(fused, fused.numel), *(fused.numel // 3,) * 3)
    query = t.add(query, t.parameter("self_attn.q_bias", hidden))
    value = t.add(value, t.parameter("self_attn.v_bias", hidden))
    query = t.scale(query)
    scores = batched_matmul(
        t, merged_heads(t, query, shape), merged_heads(t, key, shape), shape.scores, spec.head_dim
    )
    table = distances = None
    if spec.distances is not None and context.distances is not None:
        table = dropout(t, context.distances, spec.distances.dropout)
        distances = _distance_scores(t, (query, key), table, shape, spec.distances, context)
    scores = t.shift(scores) if distances is None else t.add(scores, distances)
    masked, kept = _masked(t, scores, context)
    weights = dropout(t, softmax(t, masked), spec.dropout)
    size = shape.rows * hidden
    out = batched_matmul(t, weights, merged_heads(t, value, shape), size, shape.keys)
    out = t.contiguous(out) if shape.batch == 1 else t.scale(out, OperationKind.CLONE)
    t.touch(*kept, fused, query, value, masked, weights)
    t.touch(*(each for each in (table, distances) if each is not None))
    context.attention_frame = (out,)
    return linear(
        t, out, "self_attn.o_proj", hidden, hidden, bias=True, role=WeightRole.ATTENTION_OUTPUT
    )


def flat_attention(
    t: Tape, x: Tensor, spec: AttentionSpec, distances: DistanceSpec, context: StackContext
) -> Tensor:
    """DeBERTa-v2's: projections copied with heads and batch as one dimension."""
    hidden, width = context.hidden_size, spec.num_heads * spec.head_dim
    shape = Shape(context.batch, context.seq_len, context.seq_len, spec)
    query_weights, key_weights, value_weights = (
        _projection(t, f"self_attn.{name}_proj", hidden, width)
        for name in ("query", "key", "value")
    )
    query, key, value = (
        t.scale(matmul_weight(t, x, *weights), OperationKind.CLONE)
        for weights in (query_weights, key_weights, value_weights)
    )
    scores = batched_matmul(t, query, t.scale(key), shape.scores, spec.head_dim)
    table = context.distances
    dropped = total = None
    if table is not None:
        if not distances.shared_projections:
            key_weights = _projection(t, "self_attn.pos_key_proj", hidden, width)
            query_weights = _projection(t, "self_attn.pos_query_proj", hidden, width)
        dropped = dropout(t, table, distances.dropout)
        span = 2 * distances.max_distance
        queries = _repeated(t, matmul_weight(t, dropped, *query_weights), shape)
        keys = _repeated(t, matmul_weight(t, dropped, *key_weights), shape)
        total = _flat_scores(t, (query, key), (queries, keys), span, shape, context)
        scores = t.add(scores, total)
    masked, kept = _masked(t, scores, context)
    weights = dropout(t, softmax(t, masked), spec.dropout)
    out = batched_matmul(t, weights, value, shape.rows * width, shape.keys)
    out = t.scale(out, OperationKind.CLONE)
    t.touch(*kept, query, key, value, masked, weights)
    t.touch(*(each for each in (dropped, total) if each is not None))
    context.attention_frame = (out,)
    return linear(
        t, out, "self_attn.o_proj", width, hidden, bias=True, role=WeightRole.ATTENTION_OUTPUT
    )


def convolve(
    t: Tape, spec: ConvolutionSpec, embedded: Tensor, x: Tensor, context: StackContext
) -> Tensor:
    """``ConvLayer`` of DeBERTa-v2: a convolution over the tokens beside the first layer."""
    hidden = context.hidden_size
    t.begin("encoder.convolution", x=x)
    weight = t.parameter("conv.weight", hidden, hidden // spec.groups, spec.kernel_size)
    bias = t.parameter("conv.bias", hidden)
    given = _channels_turned(t, embedded)
    rows = context.batch * context.seq_len
    out = convolution(t, given, weight, bias, rows, hidden, gives_rows=True)
    out = _channels_turned(t, out)
    padded = t.tensor(rows, DType.BOOL)
    # ``1 - input_mask``
    t.record(
        OperationKind.TO, (), (padded,),
        forward_scratch_bytes=(allocated_bytes(rows, DType.FP32), RESULT),
    )  # fmt: skip
    filled = t.view(out, out.numel)
    t.record(
        OperationKind.MASKED_FILL_IN_PLACE,
        (out, padded),
        (filled,),
        saves=(padded,),
        gradients=(Gradient.FRESH, -2),
    )
    activated = activation(t, dropout(t, filled, spec.dropout), spec.activation)
    t.touch(filled)
    added = t.add(x, activated)
    normed = norm(t, added, spec.norm, "norm", hidden)
    # ``input_mask.to(output.dtype)``
    mask = t.tensor(context.batch * context.seq_len, normed.dtype)
    t.record(OperationKind.TO, (), (mask,))
    out = t.mul(normed, mask)
    t.touch(x, activated, added, normed)
    t.end(out)
    return out


def _channels_turned(t: Tape, x: Tensor) -> Tensor:
    """``permute(0, 2, 1).contiguous()``: a copy, whose gradient is seen the other way round."""
    out = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.CLONE, (x,), (out,), gradients=(Gradient.SEEN,))
    return out


def _projection(t: Tape, name: str, hidden: int, width: int) -> tuple[Parameter, Parameter]:
    return t.parameter(f"{name}.weight", width, hidden), t.parameter(f"{name}.bias", width)


def _repeated(t: Tape, distances: Tensor, shape: Shape) -> Tensor:
    """A copy with the heads first, then one for each sequence."""
    by_head = t.scale(distances, OperationKind.CLONE)
    out = t.tensor(distances.numel * shape.batch, distances.dtype)
    t.record(OperationKind.REPEAT, (by_head,), (out,), gradients=(Gradient.FRESH,))
    return out


def _flat_scores(
    t: Tape,
    contents: tuple[Tensor, Tensor],
    distances: tuple[Tensor, Tensor],
    span: int,
    shape: Shape,
    context: StackContext,
) -> Tensor:
    """Queries against distances of keys, keys against those of queries, each scaled."""
    query, key = contents
    queries, keys = distances
    products = _products(t, query, keys, span, shape)
    first_index = _index(t, shape, context)
    first = _picked(t, products, shape, first_index)
    total = t.shift(t.scale(first))
    second_index = _negated_index(t, shape, context)
    second = _picked(t, _products(t, key, queries, span, shape), shape, second_index)
    total = _summed(t, total, t.scale(second))
    t.touch(queries, keys, first_index, first, second_index, second)
    return total


def _masked(t: Tape, scores: Tensor, context: StackContext) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``masked_fill`` with the mask turned into booleans by each layer for itself, and these."""
    if context.mask is None:
        return scores, ()
    kept, hidden = (t.tensor(context.mask.numel, DType.BOOL) for _ in range(2))
    t.record(OperationKind.TO, (context.mask,), (kept,))
    t.record(OperationKind.BITWISE_NOT, (kept,), (hidden,))
    out = t.tensor(scores.numel, scores.dtype)
    t.record(
        OperationKind.MASKED_FILL, (scores, hidden), (out,), saves=(hidden,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out, (kept,)


def _distance_scores(
    t: Tape,
    contents: tuple[Tensor, Tensor],
    table: Tensor,
    shape: Shape,
    spec: DistanceSpec,
    context: StackContext,
) -> Tensor | None:
    """Scores of queries and keys against distances, as far as the config has them."""
    query, key = contents
    hidden = context.hidden_size
    span = 2 * min(shape.queries, spec.max_distance)
    # A slice of all of it is the table itself (torch/csrc/autograd/python_variable_indexing.cpp).
    near = t.slice(table, span * hidden) if span * hidden < table.numel else table
    held: list[Tensor] = []
    total = None
    if spec.content_to_position:
        keys = linear(t, near, "self_attn.pos_proj", hidden, hidden)
        products = _products(
            t, merged_heads(t, query, shape), _expanded(t, keys, shape), span, shape
        )
        index = _index(t, shape, context)
        found = _picked(t, products, shape, index)
        total = t.shift(found)
        held += (keys, index, found)
    if spec.position_to_content:
        queries = linear(t, near, "self_attn.pos_q_proj", hidden, hidden, bias=True)
        index = _negated_index(t, shape, context)
        products = _products(
            t, merged_heads(t, key, shape), _expanded(t, queries, shape), span, shape
        )
        found = _picked(t, products, shape, index)
        total = _summed(t, total, found) if total is not None else t.shift(found)
        held += (queries, index, found)
    t.touch(*held)
    return total


def _summed(t: Tape, total: Tensor, found: Tensor) -> Tensor:
    """A sum in place; the gradient of both is the sum's own."""
    out = t.view(total, total.numel)
    t.record(
        OperationKind.ADD_IN_PLACE,
        (total, found),
        (out,),
        gradients=(Gradient.ALIAS, Gradient.ALIAS),
    )
    return out


def _index(t: Tape, shape: Shape, context: StackContext) -> Tensor:
    """For each pair the row of its distance, shifted, then clamped to those that there are."""
    pairs = shape.queries * shape.keys
    shifted = allocated_bytes(pairs, DType.INT64)
    return _clamped(t, pairs, context, (shifted, RESULT))


def _negated_index(t: Tape, shape: Shape, context: StackContext) -> Tensor:
    """The same of the opposite distance: negated, shifted, clamped."""
    pairs = shape.queries * shape.keys
    negated = shifted = allocated_bytes(pairs, DType.INT64)
    return _clamped(t, pairs, context, (negated, shifted, ~0, RESULT))


def _clamped(t: Tape, pairs: int, context: StackContext, scratch: Sequence[int]) -> Tensor:
    index = t.tensor(pairs, DType.INT64)
    made_from = () if context.relative is None else (context.relative,)
    t.record(OperationKind.CLAMP, made_from, (index,), forward_scratch_bytes=scratch)
    return index


def _products(t: Tape, contents: Tensor, distances: Tensor, span: int, shape: Shape) -> Tensor:
    """Contents times all distances."""
    rows = shape.batch * shape.spec.num_heads * shape.queries
    return batched_matmul(t, contents, distances, rows * span, shape.spec.head_dim)


def _picked(t: Tape, products: Tensor, shape: Shape, index: Tensor) -> Tensor:
    """Of all products each pair's own."""
    out = t.tensor(shape.scores, products.dtype)
    scratch = products.storage.num_bytes if t.decomposed else 0
    t.record(
        OperationKind.GATHER, (products, index), (out,), saves=(products, index),
        gradients=(Gradient.FRESH, Gradient.NONE), backward_scratch_bytes=scratch,
    )  # fmt: skip
    return out


def _expanded(t: Tape, distances: Tensor, shape: Shape) -> Tensor:
    """One table for every sequence, copied for a product of more than one."""
    if t.autocast is not None:
        distances = t.cast(distances, t.autocast)
    if shape.batch == 1:
        return t.slice(distances, distances.numel)
    out = t.tensor(distances.numel * shape.batch, distances.dtype)
    t.record(OperationKind.CLONE, (distances,), (out,), gradients=(Gradient.FRESH,))
    return out
