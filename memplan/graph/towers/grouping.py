"""Patches that become groups, as ``GroupViTStage`` of transformers does it."""

from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.images import spread
from memplan.graph.towers.state import Flow
from memplan.model.networks import Activation
from memplan.model.towers.grouping import (
    GroupingBody,
    GroupsAssignBody,
    GroupsBeginBody,
    WrittenLayerBody,
)


def write_grouping(t: Tape, x: Tensor, body: GroupingBody, flow: Flow) -> Tensor:
    """The operations of any body of ``memplan.model.towers.grouping``."""
    match body:
        case WrittenLayerBody():
            return _layer(t, x, body, flow)
        case GroupsBeginBody():
            return _begin(t, x, body, flow)
        case GroupsAssignBody():
            return _assign(t, x, body, flow)


def _layer(t: Tape, x: Tensor, body: WrittenLayerBody, flow: Flow) -> Tensor:
    size = body.size
    normed = layer_norm(t, x, "layer_norm1", size)
    mask = flow.mask if body.causal else None
    middle = t.add(x, _attention(t, normed, normed, "self_attn", body, flow, mask))
    t.touch(normed)
    normed = layer_norm(t, middle, "layer_norm2", size)
    out = t.add(middle, _network(t, normed, "mlp", (size, body.inner_size), body.activation))
    t.touch(normed)
    return out


def _attention(
    t: Tape,
    x: Tensor,
    read: Tensor,
    name: str,
    body: WrittenLayerBody | GroupsAssignBody,
    flow: Flow,
    mask: Tensor | None = None,
) -> Tensor:
    """``GroupViTAttention``: queries scaled at once, heads copied, scores in their own format."""
    size, heads = body.size, body.num_heads
    query = t.scale(linear(t, x, f"{name}.q_proj", size, size, bias=True))
    key = t.contiguous(linear(t, read, f"{name}.k_proj", size, size, bias=True))
    value = t.contiguous(linear(t, read, f"{name}.v_proj", size, size, bias=True))
    asked = t.contiguous(query)
    keys = read.numel // size // flow.items
    pairs = x.numel // size * keys * heads
    scores = batched_matmul(t, asked, key, pairs, size // heads)
    if mask is not None:
        scores = t.add(scores, mask)
    weights = softmax(t, scores)
    t.touch(scores)
    seen = batched_matmul(t, dropout(t, weights, body.dropout), value, x.numel, keys)
    joined = t.contiguous(seen)
    t.touch(seen)
    output = body.output if isinstance(body, WrittenLayerBody) else "o_proj"
    out = linear(t, joined, f"{name}.{output}", size, size, bias=True)
    t.touch(asked, key, value, weights, joined)
    return out


def _network(
    t: Tape, x: Tensor, name: str, sizes: tuple[int, int], kind: Activation, outputs: int = 0
) -> Tensor:
    size, inner = sizes
    raised = linear(t, x, f"{name}.fc1", size, inner, bias=True)
    active = activation(t, raised, kind)
    t.touch(raised)
    return linear(t, active, f"{name}.fc2", inner, outputs or size, bias=True)


def _mixed(
    t: Tape, x: Tensor, name: str, sizes: tuple[int, int], kind: Activation, outputs: int
) -> Tensor:
    """A network across tokens, of each channel: it reads a copy."""
    read = x if t.autocast is None else t.cast(x, t.autocast)
    return _network(t, t.contiguous(read), name, sizes, kind, outputs)


def _begin(t: Tape, x: Tensor, body: GroupsBeginBody, flow: Flow) -> Tensor:
    tokens = spread(t, "stage.group_token", flow.items, 0)
    if body.before:
        assert flow.past is not None
        normed = layer_norm(t, flow.past, "group_projector.norm", body.size)
        sizes = body.before, body.size // 2
        made = _mixed(t, normed, "group_projector.mlp", sizes, body.activation, body.count)
        tokens = t.add(tokens, made)
        t.release(flow.past)
    return t.concatenate(x, tokens)


def _assign(t: Tape, x: Tensor, body: GroupsAssignBody, flow: Flow) -> Tensor:
    """``GroupViTTokenAssign``, and what is handed to the next stage."""
    size, kind = body.size, body.activation
    groups = flow.items * body.count * size
    patches = t.slice(x, x.numel - groups)
    flow.past = t.slice(x, groups)
    t.hold(flow.past)
    tokens = layer_norm(t, flow.past, "downsample.norm_tokens", size)
    images = layer_norm(t, patches, "downsample.norm_x", size)
    sizes = body.count, body.tokens_size
    made = _mixed(t, tokens, "downsample.mlp_inter", sizes, kind, body.outputs)
    made = layer_norm(t, made, "downsample.norm_post_tokens", size)
    asked = t.add(made, _attention(t, made, images, "downsample.pre_assign_attn", body, flow))
    normed = layer_norm(t, asked, "downsample.norm2", size)
    wide = size, body.inner_size
    asked = t.add(asked, _network(t, normed, "downsample.mlp", wide, kind))
    asked = layer_norm(t, asked, "downsample.norm_post", size)
    summed = t.add(_summed(t, asked, images, body, flow), asked)
    normed = layer_norm(t, summed, "downsample.norm_new_x", size)
    channels = size, body.channels_size
    out = t.add(summed, _network(t, normed, "downsample.mlp_channels", channels, kind))
    t.touch(tokens, images, asked)
    return out


def _summed(t: Tape, asked: Tensor, images: Tensor, body: GroupsAssignBody, flow: Flow) -> Tensor:
    """``GroupViTAssignAttention``: Gumbel noise, one group for each patch, shares of a group."""
    size, name = body.size, "downsample.assign_attn"
    query = linear(t, asked, f"{name}.q_proj", size, size, bias=True)
    key = linear(t, images, f"{name}.k_proj", size, size, bias=True)
    value = linear(t, images, f"{name}.v_proj", size, size, bias=True)
    patches = images.numel // size // flow.items
    pairs = flow.items * body.outputs * patches
    raw = t.scale(batched_matmul(t, query, key, pairs, size))
    noise = t.tensor(pairs, raw.dtype)
    t.record(OperationKind.GUMBEL, (), (noise,))
    soft = softmax(t, t.scale(t.add(raw, noise), OperationKind.DIV))
    hard = t.tensor(pairs, soft.dtype)
    t.record(OperationKind.ZEROS, (), (hard,))
    chosen = t.add(hard, soft)
    total = t.tensor(flow.items * body.outputs, chosen.dtype)
    t.record(OperationKind.SUM, (chosen,), (total,), gradients=(Gradient.FRESH,))
    total = t.shift(total)
    shares = t.tensor(pairs, chosen.dtype)
    t.record(
        OperationKind.DIV, (chosen, total), (shares,), saves=(chosen, total),
        gradients=(Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    seen = batched_matmul(t, shares, value, asked.numel, patches)
    t.touch(query, key, value, raw, noise, chosen)
    return linear(t, seen, f"{name}.o_proj", size, size, bias=True)
