"""Moonshine's layers (transformers 5.23, ``MoonshineAttention``, ``MoonshineEncoderMLP``)."""

from dataclasses import replace

from memplan.graph.attention.head_layout import Shape, as_heads, splits_heads
from memplan.graph.attention.paths import attend
from memplan.graph.attention.rotary import rotate, turns_heads
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.operations.rotary import rotary_tables
from memplan.graph.towers.state import Flow
from memplan.model.attention import AttentionSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.model.towers.turned import TurnedBody, TurnedLayerBody, TurningTablesBody

_NORM = NormSpec(kind=NormKind.LAYER)


def write_turned(t: Tape, x: Tensor, body: TurnedBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case TurningTablesBody():
            flow.tables = rotary_tables(t, flow.length, body.dim, x.dtype)
            flow.shared += flow.tables
            return x
        case TurnedLayerBody():
            return _layer(t, x, body, flow)


def _layer(t: Tape, x: Tensor, body: TurnedLayerBody, flow: Flow) -> Tensor:
    middle = _attended(t, x, x, "self_attn", body.attention, body, flow)
    if body.cross_attention is not None and flow.memory is not None:
        middle = _attended(t, middle, flow.memory, "cross_attn", body.cross_attention, body, flow)
    normed = norm(t, middle, _NORM, "final_layer_norm", body.size)
    fed = _network(t, normed, body)
    t.touch(normed)
    return t.add(middle, fed)


def _attended(
    t: Tape,
    x: Tensor,
    source: Tensor,
    name: str,
    spec: AttentionSpec,
    body: TurnedLayerBody,
    flow: Flow,
) -> Tensor:
    """A norm, attention, and the sum."""
    normed = norm(t, x, _NORM, f"{name}_layer_norm", body.size)
    read = normed if source is x else source
    out = _attention(t, normed, read, name, spec, body, flow)
    t.touch(normed)
    return t.add(x, out)


def _attention(
    t: Tape,
    x: Tensor,
    source: Tensor,
    name: str,
    spec: AttentionSpec,
    body: TurnedLayerBody,
    flow: Flow,
) -> Tensor:
    own = source is x
    t.block = LayerBlock.ATTENTION if own else LayerBlock.CROSS_ATTENTION
    queries, keys = flow.tokens(x, body.size), flow.tokens(source, body.size)
    wide = replace(spec, head_dim=spec.head_dim + body.padding)
    shape = Shape(flow.items, queries, keys, wide, heads_split=splits_heads(t, spec))
    cut = shape.heads_split or body.padding > 0
    turned = own and turns_heads(t, spec)

    def project(read: Tensor, part: str, heads: int, *, split: bool) -> Tensor:
        made = linear(
            t, read, f"{name}.{part}", body.size, heads * spec.head_dim, bias=spec.query_bias
        )
        return as_heads(t, made, heads) if split else made

    query = project(x, "q_proj", spec.num_heads, split=cut or turned)
    key = project(source, "k_proj", spec.num_kv_heads, split=cut or turned)
    value = project(source, "v_proj", spec.num_kv_heads, split=cut)
    if own and flow.tables is not None:
        query, key = rotate(t, query, key, spec, *flow.tables)
    if body.padding:
        query, key, value = (
            _padded(t, each, spec.head_dim, body.padding) for each in (query, key, value)
        )
    out = attend(t, query, key, value, shape, flow.mask if spec.causal else None)
    if body.padding:
        out = t.contiguous(t.slice(out, shape.rows * spec.num_heads * spec.head_dim))
    width = spec.num_heads * spec.head_dim
    out = linear(t, out, f"{name}.o_proj", width, body.size, role=WeightRole.ATTENTION_OUTPUT)
    t.touch(query, key, value)
    t.block = LayerBlock.NETWORK
    return out


def _padded(t: Tape, x: Tensor, head_dim: int, padding: int) -> Tensor:
    out = t.tensor(x.numel // head_dim * (head_dim + padding), x.dtype)
    t.record(OperationKind.PAD, (x,), (out,), gradients=(Gradient.FRESH,))
    out.by_head = True
    return out


def _network(t: Tape, x: Tensor, body: TurnedLayerBody) -> Tensor:
    inner = body.inner_size
    if not body.gated:
        raised = linear(t, x, "mlp.fc1", body.size, inner, bias=True)
        middle = activation(t, raised, body.activation)
        t.touch(raised)
        return linear(t, middle, "mlp.fc2", inner, body.size, bias=True)
    both = linear(t, x, "mlp.fc1", body.size, 2 * inner, bias=True)
    half = both.numel // 2
    kept, gate = t.split(both, half, half)
    middle = t.mul(activation(t, gate, body.activation), kept)
    out = linear(t, middle, "mlp.fc2", inner, body.size, bias=True)
    t.touch(both)
    return out
