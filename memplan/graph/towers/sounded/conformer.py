"""Conformers' operations (``Wav2Vec2ConformerEncoder``, ``Wav2Vec2BertEncoder``, Seamless M4T's).

transformers 5.23. Variables of the classes' functions hold what ``touch`` and ``linger`` say.
"""

from memplan.dtypes import DType
from memplan.errors import UnsupportedOperationError
from memplan.graph.attention.eager import eager
from memplan.graph.attention.head_layout import Shape, as_heads, batched_matmul, splits_heads
from memplan.graph.attention.paths import attend, sdpa
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.gridded.nets import batch_norm
from memplan.graph.towers.sounded.sounds import gated_linear_unit
from memplan.graph.towers.state import Flow
from memplan.model.attention import AttentionSpec
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.model.towers.conformer import (
    AttentiveAdapterBody,
    ConformerBody,
    ConformerLayerBody,
    Distances,
    DistanceTablesBody,
    HalfNetworkBody,
)


def write_conformer(t: Tape, x: Tensor, body: ConformerBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case DistanceTablesBody():
            return _tables(t, x, body, flow)
        case ConformerLayerBody():
            return _layer(t, x, body, flow)
        case AttentiveAdapterBody():
            return _adapter(t, x, body, flow)
        case HalfNetworkBody():
            fed = _network(
                t, x, body.module, body.size, body.inner_size, body.activation, body.dropout,
                body.activation_dropout,
            )  # fmt: skip
            out = t.add(x, t.scale(fed))
            # Variables of the model itself, which an adapter runs beside.
            for each in (x, fed, out):
                t.hold(each)
                flow.returned.append(each)
            return out


def _tables(t: Tape, x: Tensor, body: DistanceTablesBody, flow: Flow) -> Tensor:
    """Sines are a buffer that the class makes anew, and keeps, in the dtype that its input has; cosines
    of rotations are made by the first forward pass, and kept.

    What comes in is a variable of the model's, which holds it until the encoder has returned.
    """
    t.hold(x)
    flow.entered = x
    out = dropout(t, x, body.dropout)
    flow.tables = flow.mask = None
    if body.chunked:
        flow.mask = t.tensor(flow.length**2, DType.BOOL)
        t.record(OperationKind.MASK, (), (flow.mask,))
        flow.share(t, flow.mask)
    if body.distances is Distances.SINES:
        loaded, rows = (2 * n - 1 for n in (body.positions, max(body.positions, flow.length)))
        buffer = t.buffer(
            rows * body.size, out.dtype, before=body.before,
            loaded=(loaded * body.size, t.options.weights),
        )  # fmt: skip
        table = t.view(buffer, (2 * flow.length - 1) * body.size)
        flow.tables = table, table
    if body.distances is Distances.ROTARY:
        t.hold_buffer(allocated_bytes(body.head_dim // 2, t.options.weights), before=body.before)
        both = t.buffer(
            2 * flow.length * body.head_dim, out.dtype, before=body.before, loaded=(0, out.dtype)
        )
        cosines = t.view(both, both.numel // 2)
        flow.tables = cosines, cosines
    return out


def _layer(t: Tape, x: Tensor, body: ConformerLayerBody, flow: Flow) -> Tensor:
    middle = _half(t, x, body, "ffn1")
    normed = layer_norm(t, middle, "self_attn_layer_norm", body.size)
    attended = _attention(t, normed, body, flow)
    t.touch(normed)
    dropped = dropout(t, attended, body.attention_dropout)
    added = t.add(dropped, middle)
    t.touch(middle, dropped)
    convolved = _convolutions(t, added, body, flow)
    residual = t.add(added, convolved)
    t.touch(added, convolved)
    out = _half(t, residual, body, "ffn2")
    normed = layer_norm(t, out, "final_layer_norm", body.size)
    t.touch(out, residual)
    return normed


def _half(t: Tape, x: Tensor, body: ConformerLayerBody, module: str) -> Tensor:
    normed = layer_norm(t, x, f"{module}_layer_norm", body.size)
    fed = _network(
        t, normed, module, body.size, body.inner_size, body.activation, body.dropout,
        body.activation_dropout,
    )  # fmt: skip
    out = t.add(t.scale(fed), x)
    t.touch(x, fed)
    return out


def _network(
    t: Tape,
    x: Tensor,
    module: str,
    size: int,
    inner: int,
    active: Activation,
    drop: float,
    inner_drop: float,
) -> Tensor:
    raised = linear(t, x, f"{module}.fc1", size, inner, bias=True)
    middle = activation(t, raised, active)
    t.touch(raised)
    middle = dropout(t, middle, inner_drop)
    out = linear(t, middle, f"{module}.fc2", inner, size, bias=True)
    t.touch(x)
    return dropout(t, out, drop)


def _attention(t: Tape, x: Tensor, body: ConformerLayerBody, flow: Flow) -> Tensor:
    t.block = LayerBlock.ATTENTION
    spec = _spec(body.size, body.num_heads, body.attention_dropout)
    shape = _shape(t, x, spec, flow)
    read = x
    if body.distances is Distances.ROTARY and flow.tables is not None:
        read = _turned(t, x, *flow.tables)
    bias: Tensor | None = None
    held: tuple[Tensor, ...] = ()
    biased = body.distances in (Distances.SINES, Distances.TABLE)
    query = _projected(t, read, "q", spec, split=shape.heads_split or biased)
    key = _projected(t, read, "k", spec, split=shape.heads_split)
    value = _projected(t, x, "v", spec, split=shape.heads_split)
    if body.distances is Distances.SINES and flow.tables is not None:
        query, bias = _sines(t, query, shape, flow.tables[0])
        out = _biased(t, query, key, value, shape, bias, flow.mask, copies=False)
    elif body.distances is Distances.TABLE:
        bias, held = _looked_up(t, query, shape)
        out = _biased(t, query, key, value, shape, bias, flow.mask, copies=True)
    else:
        out = attend(t, query, key, value, shape, flow.mask)
    result = _output(t, out, body.size)
    # Variables of the call, in the order in which they were first set.
    t.touch(read, value, query, key)
    if bias is not None:
        t.touch(bias)
    if body.names_distances:
        t.touch(*held)
    return result


def _turned(t: Tape, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """``_apply_rotary_embedding``: its variable holds the turned halves until it returns; keeps the tables."""
    first, second = t.slice(x, x.numel // 2), t.slice(x, x.numel - x.numel // 2)
    halves = t.concatenate(t.scale(second, OperationKind.NEG), first)
    straight, across = t.mul(x, cosines), t.mul(halves, sines)
    out = t.add(straight, across)
    t.touch(straight, across, halves)
    return out


def _spec(size: int, heads: int, drop: float) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=size // heads, causal=False,
        fp32_softmax=False, dropout=drop, names_weights=True,
    )  # fmt: skip


def _shape(t: Tape, x: Tensor, spec: AttentionSpec, flow: Flow) -> Shape:
    tokens = flow.tokens(x, spec.num_heads * spec.head_dim)
    return Shape(flow.items, tokens, tokens, spec, heads_split=splits_heads(t, spec))


def _projected(t: Tape, x: Tensor, part: str, spec: AttentionSpec, *, split: bool) -> Tensor:
    size = spec.num_heads * spec.head_dim
    made = linear(t, x, f"self_attn.{part}_proj", size, size, bias=True)
    return as_heads(t, made, spec.num_heads) if split else made


def _output(t: Tape, x: Tensor, size: int) -> Tensor:
    out = linear(t, x, "self_attn.o_proj", size, size, bias=True, role=WeightRole.ATTENTION_OUTPUT)
    t.touch(x)
    t.block = LayerBlock.NETWORK
    return out


def _biased(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    bias: Tensor,
    chunks: Tensor | None,
    *,
    copies: bool,
) -> Tensor:
    """Numbers of each head and pair are added to the scores; sdpa takes them as a mask in rows.

    Raises ``UnsupportedOperationError`` for the flash-attention package, which takes no mask.
    """
    if shape.heads_split:
        # What tells chunks apart is added as it is.
        added = None if chunks is None else Tensor(chunks.numel, bias.dtype, chunks.storage)
        out = eager(t, query, key, value, shape, added, bias)
    else:
        if t.kernels.attention.is_package:
            msg = "flash attention cannot add numbers of distances; choose attention sdpa or eager"
            raise UnsupportedOperationError(msg)
        mask = bias if chunks is None else _where(t, bias, chunks)
        mask = t.contiguous(mask) if copies else mask
        out = sdpa(t, query, key, value, shape, mask)
    return out


def _where(t: Tape, bias: Tensor, chunks: Tensor) -> Tensor:
    out = t.tensor(bias.numel, bias.dtype)
    t.record(
        OperationKind.WHERE, (chunks, bias), (out,), saves=(chunks,),
        gradients=(Gradient.NONE, Gradient.FRESH),
    )  # fmt: skip
    return out


def _sines(t: Tape, query: Tensor, shape: Shape, table: Tensor) -> tuple[Tensor, Tensor]:
    """``_apply_relative_position_encoding``: scores of all distances, shifted row by row."""
    spec = shape.spec
    size = spec.num_heads * spec.head_dim
    places = linear(t, table, "self_attn.linear_pos", size, size, bias=False)
    moved = t.add(query, t.parameter("self_attn.pos_bias_v"))
    left = cast = moved if t.autocast is None else t.cast(moved, t.autocast)
    right = places
    if shape.batch > 1:
        left = t.contiguous(left)
        right = t.tensor(places.numel * shape.batch, places.dtype)
        t.record(OperationKind.BROADCAST, (places,), (right,), gradients=(Gradient.FRESH,))
    distances = 2 * shape.queries - 1
    rows = shape.rows * spec.num_heads
    scores = batched_matmul(t, left, right, rows * distances, spec.head_dim)
    t.touch(cast)
    padded = t.tensor(rows * (distances + 1), scores.dtype)
    t.record(OperationKind.PAD, (scores,), (padded,), gradients=(Gradient.FRESH,))
    shifted = t.slice(t.slice(padded, rows * distances), shape.scores)
    bias = t.tensor(shape.scores, shifted.dtype)
    t.record(OperationKind.MUL_SCALAR, (shifted,), (bias,), gradients=(Gradient.FRESH,))
    out = t.add(query, t.parameter("self_attn.pos_bias_u"))
    t.touch(places, moved, query)
    return out, bias


def _looked_up(t: Tape, query: Tensor, shape: Shape) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``_apply_relative_key_position_encoding``: a row for each pair, in the queries' dtype."""
    spec, pairs = shape.spec, shape.queries * shape.keys
    distances, clamped = t.tensor(pairs, DType.INT64), t.tensor(pairs, DType.INT64)
    t.record(OperationKind.SUB, (), (distances,))
    t.record(OperationKind.CLAMP, (distances,), (clamped,))
    numbers = t.shift(clamped)
    found = embedding_lookup(t, t.parameter("self_attn.distance_embedding.weight"), pairs, numbers)
    rows = t.cast(found, query.dtype)
    if t.autocast is not None:
        rows = t.cast(rows, t.autocast)
    left = t.contiguous(query)
    scores = batched_matmul(t, left, rows, shape.scores, spec.head_dim)
    bias = t.scale(scores)
    t.touch(clamped, rows, scores)
    return bias, (clamped, rows, scores)


def _convolutions(t: Tape, x: Tensor, body: ConformerLayerBody, flow: Flow) -> Tensor:
    """``ConvolutionModule``: each frame alone, a gate, each channel along time, each frame again.

    Frames come and go one after the other, and are convolved channel by channel: what comes is copied,
    and the gradient of what goes.
    """
    size, rows = body.size, flow.items * flow.length
    out = layer_norm(t, x, "conv_module.layer_norm", size, turned=True)
    out = convolution(t, out, "conv_module.pointwise_conv1", rows, bias=False, reads_rows=True)
    out = gated_linear_unit(t, out)
    if body.causal:
        padded = t.tensor(out.numel + flow.items * (body.kernel - 1) * size, out.dtype)
        t.record(OperationKind.PAD, (out,), (padded,), gradients=(Gradient.FRESH,))
        out = padded
    out = convolution(
        t, out, "conv_module.depthwise_conv", rows, bias=False, gives_rows=body.causal
    )
    if body.causal:
        out = layer_norm(t, out, "conv_module.depthwise_layer_norm", size)
    else:
        out = batch_norm(t, out, "conv_module.batch_norm", size)
    given = out
    out = activation(t, given, body.activation)
    t.touch(given)
    out = convolution(
        t, out, "conv_module.pointwise_conv2", rows, bias=False,
        reads_rows=body.causal, gives_rows=not body.convolution_dropout,
    )  # fmt: skip
    return dropout(t, out, body.convolution_dropout)


def _adapter(t: Tape, x: Tensor, body: AttentiveAdapterBody, flow: Flow) -> Tensor:
    """``Wav2Vec2BertAdapterLayer``."""
    size = body.size
    before = flow.length
    past = _fewer(t, x, "residual", body, flow)
    flow.length = before
    read = _fewer(t, x, "self_attn", body, flow)
    t.block = LayerBlock.ATTENTION
    spec = _spec(size, body.num_heads, body.attention_dropout)
    shape = _shape(t, read, spec, flow)
    query, key, value = (
        _projected(t, _in_rows(t, read), part, spec, split=shape.heads_split)
        for part in ("q", "k", "v")
    )
    out = attend(t, query, key, value, shape, None)
    t.touch(query, key, value)
    attended = _output(t, out, size)
    t.touch(read)
    attended = dropout(t, attended, body.result_dropout)
    middle = t.add(attended, past)
    t.touch(attended, past)
    normed = layer_norm(t, middle, "ffn_layer_norm", size)
    fed = _network(
        t, normed, "ffn", size, body.inner_size, body.activation, body.dropout,
        body.activation_dropout,
    )  # fmt: skip
    out = t.add(fed, middle)
    t.touch(middle, normed)
    return out


def _in_rows(t: Tape, x: Tensor) -> Tensor:
    """What a convolution gave lies channel by channel: each product copies it into rows."""
    return t.contiguous(x if t.autocast is None else t.cast(x, t.autocast))


def _fewer(t: Tape, x: Tensor, part: str, body: AttentiveAdapterBody, flow: Flow) -> Tensor:
    normed = layer_norm(t, x, f"{part}_layer_norm", body.size)
    padding = body.stride // 2
    flow.length = (flow.length + 2 * padding - body.kernel) // body.stride + 1
    wide = convolution(t, normed, f"{part}_conv", flow.items * flow.length)
    return gated_linear_unit(t, wide)
