"""A layer of a tower: attention and a feed-forward network, norms before or behind them."""

from dataclasses import replace

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, as_heads, splits_heads
from memplan.graph.attention.paths import attend
from memplan.graph.attention.rotary import rotate
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient, Operation
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import clamp_between, dropout
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.operations.rotary import rotary, rotary_as_complex
from memplan.graph.towers.state import Flow
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.model.towers.layers import LayerBody, Turning


def tower_layer(t: Tape, x: Tensor, body: LayerBody, flow: Flow) -> Tensor:
    """With norms before each part."""
    names, size = body.names, body.size
    normed = norm(t, x, body.norm, names.first_norm, size)
    attended = attention(t, normed, body, flow)
    t.touch(normed)
    added = _added(t, attended, body, names.first_scale, flow, names.first_post_norm)
    middle = _summed(t, added, x)
    if body.cross_attention is not None:
        normed = norm(t, middle, body.norm, names.cross_norm, size)
        weights, t.segment.lingering = t.segment.lingering, []
        attended = attention(t, normed, body, flow, cross=True)
        # The same name takes both attentions' weights.
        t.touch(normed, *weights)
        middle = _summed(t, _added(t, attended, body, "", flow), middle)
    normed = norm(t, middle, body.norm, names.second_norm, size)
    fed = network(t, normed, body)
    added = _added(t, fed, body, names.second_scale, flow, names.second_post_norm)
    t.touch(normed)
    return _summed(t, added, middle)


def _summed(t: Tape, added: Tensor, x: Tensor) -> Tensor:
    """A part's result, and the stream, which says how the sum lies: classes write it first."""
    out = t.add(added, x)
    out.by_channel = x.by_channel
    t.touch(added, x)
    return out


def _added(
    t: Tape, x: Tensor, body: LayerBody, scale: str, flow: Flow, post_norm: str = ""
) -> Tensor:
    """What a part adds to the stream: normed, scaled by number, dropped in part or by the sample."""
    if post_norm:
        given = x
        x = norm(t, given, body.norm, post_norm, body.size)
        t.touch(given)
    if scale and body.gated:
        gate = t.elementwise(OperationKind.TANH, t.parameter(scale))
        given = x
        x = t.mul(gate, given)
        t.touch(given)
    elif scale:
        x = t.mul(x, t.parameter(scale))
    x = dropout(t, x, body.dropout)
    if body.drop_path:
        factors = t.tensor(flow.items, x.dtype)
        t.record(OperationKind.UNIFORM_IN_PLACE, (), (factors,))
        x = t.mul(t.scale(x, OperationKind.DIV), factors)
    return x


def attention(t: Tape, x: Tensor, body: LayerBody, flow: Flow, *, cross: bool = False) -> Tensor:
    """Projections, scores, the output projection."""
    spec, name, size, read = body.attention, body.names.attention, body.size, x
    if cross and body.cross_attention is not None and flow.memory is not None:
        spec, name, read = body.cross_attention, body.names.cross_attention, flow.memory
    width, narrow = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    t.block = LayerBlock.CROSS_ATTENTION if cross else LayerBlock.ATTENTION
    shape = Shape(
        flow.items, flow.tokens(x, size), flow.tokens(read, size), spec,
        heads_split=splits_heads(t, spec),
    )  # fmt: skip
    if body.one_row:
        rows = flow.items * shape.queries
        shape = replace(shape, batch=1, queries=rows, keys=rows)

    copies: list[Operation] = []
    start = len(t.segment.operations)

    def cut(made: Tensor, part: str, heads: int) -> Tensor:
        splits = shape.heads_split or (part != "v_proj" and body.turning is Turning.IN_PART)
        return as_heads(t, made, heads) if splits else made

    def project(source: Tensor, part: str, heads: int, *, bias: bool) -> Tensor:
        source = _straight(t, source, body)
        made = _linear(t, source, f"{name}.{part}", size, heads * spec.head_dim, body, bias=bias)
        if not body.copies_heads:
            # Keys' gradients are views until the matrix takes them, wherever the class cuts.
            is_late = body.cuts_together and part != "k_proj"
            return made if is_late else cut(made, part, heads)
        if part == "q_proj":
            made = t.scale(made)
        made = t.scale(made, OperationKind.CLONE)
        copies.append(t.segment.operations[-1])
        made.by_head = True
        return made

    if body.names.fused:
        query, key, value = _fused(t, x, body, width, narrow)
    else:
        query = project(x, "q_proj", spec.num_heads, bias=spec.query_bias)
        key = project(read, "k_proj", spec.num_kv_heads, bias=spec.key_bias)
        value = project(read, "v_proj", spec.num_kv_heads, bias=spec.value_bias)
        if body.cuts_together:
            query = cut(query, "q_proj", spec.num_heads)
            value = cut(value, "v_proj", spec.num_kv_heads)
    if body.head_norm:
        kind = body.head_norm_kind or body.norm
        query = norm(t, query, kind, f"{name}.q_norm", body.head_norm)
        key = norm(t, key, kind, f"{name}.k_norm", body.head_norm)
        if body.value_norm:
            plain = replace(kind, weight=False)
            value = norm(t, value, plain, f"{name}.v_norm", body.head_norm)
    if flow.tables is not None:
        query, key = _turned(t, query, key, body, flow.tables)
    masked = spec.causal or body.one_row or body.masked
    out = attend(t, query, key, value, shape, flow.mask if masked else None)
    if any(each.kind is OperationKind.EFFICIENT_ATTENTION for each in t.segment.operations[start:]):
        # Its gradients lie in rows, whatever it was given (ATen/native/transformers/cuda/attention_backward.cu).
        for each in copies:
            each.gradients = each.gradients and (Gradient.ALIAS,)
    out = _linear(
        t, out, f"{name}.{body.names.output}", width, size, body, bias=spec.output_bias,
        role=WeightRole.ATTENTION_OUTPUT,
    )  # fmt: skip
    t.touch(query, key, value)
    t.block = LayerBlock.NETWORK
    return out


def _linear(
    t: Tape,
    x: Tensor,
    name: str,
    inputs: int,
    outputs: int,
    body: LayerBody,
    *,
    bias: bool,
    role: WeightRole = WeightRole.MATRIX,
) -> Tensor:
    """A linear layer, perhaps between two clamps (``Gemma4ClippableLinear``)."""
    if not body.clipped:
        return linear(t, x, name, inputs, outputs, bias=bias, role=role)
    made = linear(t, clamp_between(t, x), name, inputs, outputs, bias=bias, role=role)
    return clamp_between(t, made)


def _straight(t: Tape, x: Tensor, body: LayerBody) -> Tensor:
    """What a matrix reads, in rows."""
    if not body.across:
        return x
    return t.contiguous(x if t.autocast is None else t.cast(x, t.autocast))


def _fused(
    t: Tape, x: Tensor, body: LayerBody, width: int, narrow: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One matrix, of whose result queries, keys and values are views."""
    bias = body.attention.query_bias
    name = f"{body.names.attention}.{body.names.fused}"
    columns = width + 2 * narrow
    both = linear(t, x, name, body.size, columns, bias=bias)
    rows = both.numel // columns
    sizes = rows * width, rows * narrow, rows * narrow
    query, key, value = (
        [t.slice(both, each) for each in sizes] if body.selected else t.split(both, *sizes)
    )
    return query, key, value


def _turned(
    t: Tape, query: Tensor, key: Tensor, body: LayerBody, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Queries and keys, each turned by its position."""
    match body.turning:
        case Turning.NONE:
            return query, key
        case Turning.PLAIN:
            return rotary(t, query, *tables), rotary(t, key, *tables)
        case Turning.FULL:
            cos, sin = (t.cast(each, DType.FP32) for each in tables)
            return _turned_in_full(t, query, cos, sin), _turned_in_full(t, key, cos, sin)
        case Turning.AXES:
            return _turned_by_axis(t, query, *tables), _turned_by_axis(t, key, *tables)
        case Turning.IN_PART:
            return rotate(t, query, key, body.attention, *tables)
        case Turning.COMPLEX:
            return rotary_as_complex(t, query, key, tables[0])


def _turned_in_full(t: Tape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply_rotary_pos_emb_vision``: in fp32, cast back."""
    full = t.cast(x, DType.FP32)
    out = t.cast(rotary(t, full, cos, sin), x.dtype)
    t.touch(full)
    return out


def _turned_by_axis(t: Tape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply_multidimensional_rope``: halves turned, then joined."""
    half = x.numel // 2
    cosines, sines = t.view(cos, cos.numel // 2), t.view(sin, sin.numel // 2)
    parts = [rotary(t, part, cosines, sines) for part in t.split(x, half, half)]
    return t.concatenate(*parts)


def network(t: Tape, x: Tensor, body: LayerBody) -> Tensor:
    """Up, activation, perhaps times a gate, down."""
    names, inner = body.names, body.inner_size

    def up(name: str) -> Tensor:
        read = _straight(t, x, body)
        return _linear(t, read, f"{names.network}.{name}", body.size, inner, body, bias=body.bias)

    if names.gate:
        gate = up(names.gate)
        active = activation(t, gate, body.activation)
        middle = t.mul(active, up(names.up))
        t.touch(gate)
    else:
        raised = up(names.up)
        middle = activation(t, raised, body.activation)
        t.touch(raised)
    middle = dropout(t, middle, body.activation_dropout)
    out = _linear(
        t, middle, f"{names.network}.{names.down}", inner, body.size, body, bias=body.bias
    )
    t.touch(x)
    return out
