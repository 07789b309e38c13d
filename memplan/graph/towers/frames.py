"""TimeSformer's clips and layers (transformers 5.23, ``TimesformerEmbeddings``, ``TimesformerLayer``)."""

from memplan.errors import SetupError
from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.gridded.nets import drop_path
from memplan.graph.towers.images import spread
from memplan.graph.towers.state import Flow, sensed
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.model.towers.clips import FramesLayerBody, FramesPatchesBody


def frames_patches(t: Tape, body: FramesPatchesBody, flow: Flow) -> Tensor:
    """Patches of each frame with a token before them and positions; then all frames behind one token.

    Raises ``SetupError`` for frames of another size, which the layers cannot put in rows.
    """
    height, width = body.image
    if t.options.image_size is not None and (t.options.image_size,) * 2 != body.image:
        msg = f"image_size: this model's layers take frames of {height}x{width} pixels alone; leave it out"
        raise SetupError(msg)
    size, pictures = body.size, flow.items * body.frames
    flow.patches = height // body.patch[0] * (width // body.patch[1])
    x = sensed(t, pictures * body.channels * height * width)
    x = convolution(t, x, "patch_embeddings", pictures * flow.patches)
    token = spread(t, "embeddings.cls_token", pictures, size)
    x = t.concatenate(token, x)
    x = dropout(t, t.add(x, t.parameter("embeddings.position_embeddings")), body.dropout)
    first = t.slice(t.slice(x, flow.items * (flow.patches + 1) * size), flow.items * size)
    rest = t.contiguous(t.slice(x, pictures * flow.patches * size))
    rest = dropout(t, t.add(rest, t.parameter("embeddings.time_embeddings")), body.dropout)
    out = t.concatenate(first, rest)
    t.touch(first)
    return out


def frames_layer(t: Tape, x: Tensor, body: FramesLayerBody, flow: Flow) -> Tensor:
    """Attention over frames and places, or over all; a network on the sum."""
    middle = _divided(t, x, body, flow) if body.divided else _joint(t, x, body, flow)
    normed = layer_norm(t, middle, "layernorm_after", body.size)
    raised = linear(t, normed, "mlp.fc1", body.size, body.inner_size, bias=True)
    active = activation(t, raised, body.activation)
    t.touch(raised)
    active = dropout(t, active, body.dropout)
    t.touch(normed)
    fed = linear(t, active, "mlp.fc2", body.inner_size, body.size, bias=True)
    t.touch(active)
    fed = dropout(t, fed, body.dropout)
    added = drop_path(t, fed, flow.items) if body.drop_path else fed
    out = t.add(middle, added)
    t.touch(middle, fed)
    _keep(t, out, flow, divided=body.divided)
    return out


def _keep(t: Tape, x: Tensor, flow: Flow, *, divided: bool) -> None:
    """The encoder's variable holds what a layer reads, of which the layer may keep copies alone."""
    if divided and flow.items > 1 and not t.segment.checkpointed:
        t.carry(x)


def _joint(t: Tape, x: Tensor, body: FramesLayerBody, flow: Flow) -> Tensor:
    tokens = x.numel // body.size // flow.items
    normed = layer_norm(t, x, "layernorm_before", body.size)
    attended = _attention(t, normed, "self_attn", body, flow.items, tokens)
    t.linger(attended)
    added = drop_path(t, attended, flow.items) if body.drop_path else attended
    return t.add(x, added)


def _divided(t: Tape, x: Tensor, body: FramesLayerBody, flow: Flow) -> Tensor:
    """What each function returned stays in a variable of the layer until it is done."""
    size, places, pictures = body.size, flow.patches, flow.items * body.frames
    without = pictures * places * size
    rows = t.contiguous(t.slice(x, without)) if flow.items > 1 else t.slice(x, without)
    normed = layer_norm(t, rows, "temporal_layernorm", size)
    t.touch(rows)
    attended = _attention(t, normed, "temporal_attn", body, flow.items * places, body.frames)
    t.linger(attended)
    dropped = drop_path(t, attended, flow.items * places) if body.drop_path else attended
    turned = linear(t, dropped, "temporal_dense", size, size, bias=True)
    t.linger(turned)
    temporal = t.add(t.slice(x, without), turned)
    t.linger(temporal)
    token = t.slice(x, flow.items * size)
    repeated = t.tensor(pictures * size, token.dtype)
    t.record(OperationKind.REPEAT, (token,), (repeated,), gradients=(Gradient.FRESH,))
    spatial = t.contiguous(temporal)
    joined = t.concatenate(repeated, spatial)
    t.touch(spatial, repeated)
    t.linger(joined)
    normed = layer_norm(t, joined, "layernorm_before", size)
    attended = _attention(t, normed, "self_attn", body, pictures, places + 1)
    t.linger(attended)
    found = drop_path(t, attended, pictures) if body.drop_path else attended
    firsts = t.slice(found, pictures * size)
    mean = t.tensor(flow.items * size, firsts.dtype)
    t.record(OperationKind.MEAN, (firsts,), (mean,), gradients=(Gradient.FRESH,))
    rest = t.contiguous(t.slice(found, without))
    t.linger(rest)
    return t.add(t.concatenate(token, temporal), t.concatenate(mean, rest))


def _attention(
    t: Tape, x: Tensor, name: str, body: FramesLayerBody, batch: int, tokens: int
) -> Tensor:
    """``TimesformerSelfAttention``: shares of one matrix's result, each copied head by head."""
    t.block = LayerBlock.ATTENTION
    size, heads = body.size, body.num_heads
    every = linear(t, x, f"{name}.qkv", size, 3 * size, bias=body.bias)
    query, key, value = (t.slice(every, x.numel) for _ in range(3))
    left, right = t.contiguous(query), t.contiguous(key)
    scores = t.scale(batched_matmul(t, left, right, batch * heads * tokens**2, size // heads))
    weights = softmax(t, scores)
    t.touch(scores)
    weights = dropout(t, weights, body.attention_dropout)
    cast = weights if t.autocast is None else t.cast(weights, t.autocast)
    product = batched_matmul(t, cast, t.contiguous(value), x.numel, tokens)
    out = t.contiguous(product)
    t.touch(every, weights, product)
    made = linear(t, out, f"{name}.proj", size, size, bias=True, role=WeightRole.ATTENTION_OUTPUT)
    t.touch(x, out)
    t.block = LayerBlock.NETWORK
    return dropout(t, made, body.dropout)
