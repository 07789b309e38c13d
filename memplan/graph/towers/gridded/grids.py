"""What mixes the positions of a picture that stays a grid, as its classes write it out."""

from memplan.dtypes import DType
from memplan.graph.attention.eager import heads_product
from memplan.graph.attention.head_layout import Shape, as_heads
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.gridded.nets import batch_norm, resized
from memplan.graph.towers.images import spread
from memplan.graph.towers.state import Flow
from memplan.model.attention import AttentionSpec
from memplan.model.networks import Activation
from memplan.model.towers.gridded.grids import (
    ConvolvedAttentionBody,
    DepthwiseBody,
    FirstBody,
    FocalBody,
    FoldedBody,
    ForgottenBody,
    GridBody,
    LocalBody,
    NamedBody,
    NormedLinearBody,
    OffsetAttentionBody,
    PlacedBody,
    ReducedAttentionBody,
    ReturnedBody,
    SampleFactorsBody,
    ScaledBody,
    TokenBody,
    UnfoldedBody,
)


def write_grid(t: Tape, x: Tensor, body: GridBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case NamedBody():
            t.hold(x)
            flow.named.append(x)
            return x
        case ForgottenBody():
            t.release(flow.named.pop())
            return x
        case ReturnedBody():
            t.hold(x)
            flow.returned.append(x)
            return x
        case LocalBody():
            t.linger(x)
            return x
        case PlacedBody():
            return _placed(t, x, body, flow)
        case TokenBody():
            return t.concatenate(spread(t, body.token, flow.items, body.size), x)
        case FirstBody():
            single = flow.items * body.size
            return t.split(x, single, x.numel - single)[0]
        case UnfoldedBody():
            return _unfolded(t, x, body, flow)
        case FoldedBody():
            return _folded(t, x, body, flow)
        case ReducedAttentionBody():
            return _reduced(t, x, body, flow)
        case ConvolvedAttentionBody():
            return _convolved(t, x, body, flow)
        case NormedLinearBody():
            return _normed_linear(t, x, body)
        case OffsetAttentionBody():
            return _with_offsets(t, x, body, flow)
        case SampleFactorsBody():
            return _sample_factors(t, x, flow)
        case FocalBody():
            return _focal(t, x, body, flow)
        case DepthwiseBody():
            return convolution(t, x, body.module, flow.items * flow.grid[0] * flow.grid[1])
        case ScaledBody():
            return t.mul(t.parameter(body.weight), x) if body.weight else t.scale(x)


def _placed(t: Tape, x: Tensor, body: PlacedBody, flow: Flow) -> Tensor:
    """``PvtPatchEmbeddings``: the table is resized though it fits."""
    table = t.parameter(body.positions)
    first: Tensor | None = None
    rest: Tensor = table
    if body.token:
        x = t.concatenate(spread(t, body.token, flow.items, body.size), x)
        rest = t.slice(table, table.numel - body.size)
    patches = flow.grid[0] * flow.grid[1]
    places = t.tensor(patches * body.size, table.dtype)
    t.record(OperationKind.UPSAMPLE, (rest,), (places,), gradients=(Gradient.FRESH,))
    if body.token:
        first = t.slice(table, body.size)
        places = t.concatenate(first, places)
    out = t.add(x, places)
    t.touch(places)
    return dropout(t, out, body.dropout)


def scores_shape(
    items: int, queries: int, keys: int, num_heads: int, head_dim: int, value: int
) -> Shape:
    """Sizes of scores that a class writes out itself, seen by no causal mask."""
    spec = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, value_head_dim=value,
        causal=False,
    )  # fmt: skip
    return Shape(items, queries, keys, spec, heads_split=True)


def own_scores(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    probability: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Scores, softmax in their own dtype, dropout, and the weighted values, head by head in memory."""
    spec = shape.spec
    product = heads_product(t, query, key, shape, shape.scores, spec.head_dim)
    scores = t.scale(product)
    if bias is not None:
        scores = t.add(scores, bias)
    weights = dropout(t, softmax(t, scores), probability)
    out = heads_product(t, weights, value, shape, shape.outputs, shape.keys, first_merged=True)
    t.touch(scores, weights)
    return out


def by_rows(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """Heads side by side again: a copy."""
    out = t.contiguous(x) if shape.batch == 1 else t.scale(x, OperationKind.CLONE)
    t.touch(x)
    return out


def _squares(body: UnfoldedBody | FoldedBody, flow: Flow) -> int:
    """Positions of a picture once its sides hold whole squares."""
    down, across = (-(-side // body.side) * body.side for side in flow.grid)
    return down * across


def _unfolded(t: Tape, x: Tensor, body: UnfoldedBody, flow: Flow) -> Tensor:
    """``MobileViTLayer.unfolding``: resized where squares do not fit, and copied twice."""
    numel = flow.items * _squares(body, flow) * body.size
    if numel != x.numel:
        x = resized(t, x, numel)
    flow.items *= body.side**2
    return t.scale(t.scale(x, OperationKind.CLONE), OperationKind.CLONE)


def _folded(t: Tape, x: Tensor, body: FoldedBody, flow: Flow) -> Tensor:
    flow.items //= body.side**2
    out = t.scale(t.scale(x, OperationKind.CLONE), OperationKind.CLONE)
    numel = flow.items * flow.grid[0] * flow.grid[1] * body.size
    return out if numel == x.numel else resized(t, out, numel)


def _heads(
    t: Tape, x: Tensor, name: str, body: ReducedAttentionBody | ConvolvedAttentionBody
) -> Tensor:
    size = body.size
    made = linear(t, x, f"{body.module}.{name}", size, size, bias=body.bias)
    return as_heads(t, made, body.num_heads)


def _attended(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    body: ReducedAttentionBody | ConvolvedAttentionBody,
    flow: Flow,
) -> Tensor:
    items, head_dim = flow.items, body.size // body.num_heads
    queries, keys = (each.numel // body.size // items for each in (query, key))
    shape = scores_shape(items, queries, keys, body.num_heads, head_dim, head_dim)
    out = by_rows(t, own_scores(t, query, key, value, shape, body.dropout), shape)
    t.touch(query, key, value)
    result = linear(t, out, f"{body.module}.o_proj", body.size, body.size, bias=True)
    return dropout(t, result, body.output_dropout)


def _reduced(t: Tape, x: Tensor, body: ReducedAttentionBody, flow: Flow) -> Tensor:
    """``PvtEfficientSelfAttention`` and the layer behind it."""
    query = _heads(t, x, "q_proj", body)
    read = x
    if body.reduction > 1:
        height, width = (side // body.reduction for side in flow.grid)
        name = f"{body.module}.sequence_reduction"
        fewer = convolution(t, x, name, flow.items * height * width)
        read = layer_norm(t, fewer, f"{body.module}.layer_norm", body.size)
    key, value = _heads(t, read, "k_proj", body), _heads(t, read, "v_proj", body)
    out = _attended(t, query, key, value, body, flow)
    t.touch(x)
    return out


def _convolved(t: Tape, x: Tensor, body: ConvolvedAttentionBody, flow: Flow) -> Tensor:
    """``CvtSelfAttention``: first keys, then queries, then values."""
    positions = x
    first: Tensor | None = None
    if body.has_token:
        single = flow.items * body.size
        first, positions = t.split(x, single, x.numel - single)

    def convolve(part: str, stride: int, padding: int) -> Tensor:
        height, width = ((side + padding - body.kernel) // stride + 1 for side in flow.grid)
        module = f"{body.module}.convolution_{part}"
        made = convolution(t, positions, module, flow.items * height * width, bias=False)
        return batch_norm(t, made, f"{module}.norm", body.size)

    key = convolve("key", body.key_stride, body.key_padding)
    query = convolve("query", body.query_stride, body.query_padding)
    value = convolve("value", body.key_stride, body.key_padding)
    if first is not None:
        query, key, value = (t.concatenate(first, each) for each in (query, key, value))
    query = _heads(t, query, "q_proj", body)
    key = _heads(t, key, "k_proj", body)
    value = _heads(t, value, "v_proj", body)
    out = _attended(t, query, key, value, body, flow)
    t.touch(x)
    return out


def _normed_linear(t: Tape, x: Tensor, body: NormedLinearBody) -> Tensor:
    """``MLPLayerWithBN``."""
    given = x
    if body.copies:
        given = t.contiguous(x)
    made = linear(t, given, f"{body.module}.linear", body.inputs, body.outputs)
    t.touch(x)
    return batch_norm(t, made, f"{body.module}.batch_norm", body.outputs)


def _with_offsets(t: Tape, x: Tensor, body: OffsetAttentionBody, flow: Flow) -> Tensor:
    """``LevitAttention`` and ``LevitAttentionSubsample``."""
    items, heads, size = flow.items, body.num_heads, body.size
    keys = x.numel // size // items
    narrow, wide = heads * body.key_size, heads * body.value_size

    def project(source: Tensor, part: str, outputs: int, *, copies: bool) -> Tensor:
        linear_body = NormedLinearBody(
            module=f"{body.module}.{part}", inputs=size, outputs=outputs, copies=copies
        )
        return _normed_linear(t, source, linear_body)

    rows = items * keys
    if body.stride:
        both = project(x, "keys_values", narrow + wide, copies=body.copies)
        key, value = t.split(both, rows * narrow, rows * wide)
        height, width = flow.grid
        flow.grid = (height - 1) // body.stride + 1, (width - 1) // body.stride + 1
        fewer = t.slice(x, x.numel // height * flow.grid[0])
        fewer = t.slice(fewer, fewer.numel // width * flow.grid[1])
        query = project(t.contiguous(fewer), "queries", narrow, copies=False)
        query = as_heads(t, query, heads)
    else:
        both = project(x, "queries_keys_values", 2 * narrow + wide, copies=body.copies)
        query, key, value = t.split(both, rows * narrow, rows * narrow, rows * wide)
    queries = flow.grid[0] * flow.grid[1]
    shape = scores_shape(items, queries, keys, heads, body.key_size, body.value_size)
    out = own_scores(t, query, key, value, shape, 0.0, _offsets(t, body, queries * keys))
    out = by_rows(t, out, shape)
    active = t.elementwise(OperationKind.HARDSWISH, out)
    t.touch(out, query, key, value)
    last = NormedLinearBody(module=f"{body.module}.projection", inputs=wide, outputs=body.outputs)
    made = _normed_linear(t, active, last)
    t.touch(x)
    return made


def _offsets(t: Tape, body: OffsetAttentionBody, pairs: int) -> Tensor:
    """A number for each pair of positions and each head, of those for each distance."""
    table = t.parameter(f"{body.module}.attention_biases")
    numbers = t.buffer(pairs, DType.INT64)
    out = t.tensor(body.num_heads * pairs, table.dtype)
    t.record(
        OperationKind.INDEX, (table, numbers), (out,), saves=(numbers,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def _sample_factors(t: Tape, x: Tensor, flow: Flow) -> Tensor:
    factors = t.tensor(flow.items, DType.FP32)
    t.record(OperationKind.UNIFORM_IN_PLACE, (), (factors,))
    return t.mul(x, t.scale(factors, OperationKind.DIV))


def _focal(t: Tape, x: Tensor, body: FocalBody, flow: Flow) -> Tensor:
    """``FocalNetModulation``."""
    size, levels, name = body.size, len(body.kernels), body.module
    rows = x.numel // size
    columns = 2 * size + levels + 1
    wide = linear(t, x, f"{name}.projection_in", size, columns, bias=True)
    whole = t.contiguous(wide)
    query, context, gates = t.split(whole, rows * size, rows * size, rows * (levels + 1))
    total: Tensor | None = None
    for level in range(levels):
        made = convolution(t, context, f"{name}.focal_layers.{level}", rows, bias=False)
        context = activation(t, made, Activation.GELU)
        t.touch(made)
        gated = t.mul(context, t.slice(gates, rows))
        total = t.shift(gated) if total is None else t.add(total, gated)
    across = t.mean(t.mean(context, flow.grid[0]), flow.grid[1])
    everywhere = activation(t, across, Activation.GELU)
    gated = _outer(t, everywhere, t.slice(gates, rows), rows * size)
    total = t.shift(gated) if total is None else t.add(total, gated)
    if body.normalized:
        total = t.scale(total, OperationKind.DIV)
    modulator = convolution(t, total, f"{name}.projection_context", rows)
    out = t.contiguous(t.mul(query, modulator))
    if body.normed:
        out = layer_norm(t, out, f"{name}.layernorm", size)
    result = linear(t, out, f"{name}.projection_out", size, size, bias=True)
    result = dropout(t, result, body.dropout)
    t.touch(whole, context, total, everywhere, modulator, x)
    return result


def _outer(t: Tape, left: Tensor, right: Tensor, numel: int) -> Tensor:
    """A number for each channel times one for each position: larger than either."""
    out = t.tensor(numel, left.dtype)
    size = out.storage.num_bytes
    t.record(OperationKind.MUL, (left, right), (out,), saves=(right, left), gradients=(size, size))
    return out
