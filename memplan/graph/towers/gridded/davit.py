"""DaViT as Florence-2 runs it (``Florence2VisionBackbone``, ``Florence2MultiModalProjector``)."""

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.paths import attend
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.gridded.nets import drop_path, write_net
from memplan.graph.towers.state import Flow
from memplan.model.attention import AttentionSpec
from memplan.model.towers.gridded.davit import (
    ChannelsBody,
    DavitBody,
    DavitLayerBody,
    PlacedMeanBody,
)
from memplan.model.towers.gridded.nets import ConvolutionBody


def write_davit(t: Tape, x: Tensor, body: DavitBody, flow: Flow) -> Tensor:
    """The operations of any body of ``memplan.model.towers.gridded.davit``."""
    match body:
        case ChannelsBody():
            return _channels(t, x, body, flow)
        case DavitLayerBody():
            middle = _half(t, x, "spatial", body, flow)
            out = _half(t, middle, "channel", body, flow)
            # What called it still names what it was given.
            t.touch(middle)
            return out
        case PlacedMeanBody():
            return _placed(t, x, body, flow)


def _channels(t: Tape, x: Tensor, body: ChannelsBody, flow: Flow) -> Tensor:
    x = layer_norm(t, x, "norm", body.inputs) if body.first else t.cast(x, t.compute)
    layer = ConvolutionBody(
        module="conv", kernel=body.kernel, stride=body.stride, padding=body.padding, bias=True
    )
    out = write_net(t, x, layer, flow)
    return out if body.first else layer_norm(t, out, "norm", body.size)


def _half(t: Tape, x: Tensor, half: str, body: DavitLayerBody, flow: Flow) -> Tensor:
    size, positions = body.size, x.numel // body.size
    drops = body.drop_path[half == "channel"]
    x = t.add(convolution(t, x, f"{half}.conv1", positions), x)
    normed = layer_norm(t, x, f"{half}.norm1", size)
    attend_in = _windows if half == "spatial" else _groups
    attended = attend_in(t, normed, half, body, flow)
    t.touch(normed)
    if drops:
        attended = drop_path(t, attended, flow.items)
    x = t.add(x, attended)
    x = t.add(convolution(t, x, f"{half}.conv2", positions), x)
    normed = layer_norm(t, x, f"{half}.norm2", size)
    raised = linear(t, normed, f"{half}.ffn.fc1", size, body.inner_size, bias=True)
    active = activation(t, raised, body.activation)
    t.touch(raised)
    fed = linear(t, active, f"{half}.ffn.fc2", body.inner_size, size, bias=True)
    if drops:
        fed = drop_path(t, fed, flow.items)
    return t.add(x, fed)


def _windows(t: Tape, x: Tensor, half: str, body: DavitLayerBody, flow: Flow) -> Tensor:
    """Each window of patches sees itself; what is missing at the edges is padded."""
    size, side = body.size, body.window
    down, across = (-(-each // side) for each in flow.grid)
    number = flow.items * down * across
    padded = t.tensor(number * side**2 * size, x.dtype)
    t.record(OperationKind.PAD, (x,), (padded,), gradients=(Gradient.FRESH,))
    windows = t.contiguous(padded)
    both = linear(t, windows, f"{half}.attn.qkv", size, 3 * size, bias=body.bias)
    query, key, value = t.split(both, *(windows.numel,) * 3)
    spec = _spec(body.num_heads, size // body.num_heads)
    out = attend(t, query, key, value, Shape(number, side**2, side**2, spec), None)
    t.touch(windows)
    made = linear(t, out, f"{half}.attn.proj", size, size, bias=True)
    whole = t.contiguous(made)
    t.touch(padded)
    if padded.numel != x.numel:
        whole = t.contiguous(t.slice(whole, x.numel))
    # The method's own variables.
    t.touch(made, both)
    return whole


def _groups(t: Tape, x: Tensor, half: str, body: DavitLayerBody, flow: Flow) -> Tensor:
    """Each channel sees those of its group, by all positions."""
    size = body.size
    both = linear(t, x, f"{half}.attn.qkv", size, 3 * size, bias=body.bias)
    query, key, value = t.split(both, *(x.numel,) * 3)
    positions, channels = x.numel // size // flow.items, size // body.num_groups
    if t.kernels.attention.is_package:
        msg = (
            f"attention: flash-attention has no heads of {positions} numbers, by which DaViT's channels see "
            "one another; choose sdpa or eager"
        )
        raise SetupError(msg)
    spec = _spec(body.num_groups, positions)
    out = attend(t, query, key, value, Shape(flow.items, channels, channels, spec), None)
    turned = t.contiguous(out)
    t.touch(out)
    made = linear(t, turned, f"{half}.attn.proj", size, size, bias=True)
    t.touch(both, turned)
    return made


def _spec(heads: int, head_dim: int) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=head_dim, causal=False, fp32_softmax=False,
        names_weights=False,
    )  # fmt: skip


def _placed(t: Tape, x: Tensor, body: PlacedMeanBody, flow: Flow) -> Tensor:
    size, (height, width) = body.size, flow.grid
    cells = height * width
    parts = []
    for name, count, share in (
        ("column_embeddings", width, size - size // 2), ("row_embeddings", height, size // 2),
    ):  # fmt: skip
        numbers = t.tensor(count, DType.INT64)
        t.record(OperationKind.ARANGE, (), (numbers,))
        found = embedding_lookup(t, t.parameter(f"{name}.weight"), count, numbers)
        spread = t.tensor(cells * share, found.dtype)
        t.record(OperationKind.REPEAT, (found,), (spread,), gradients=(Gradient.FRESH,))
        parts.append(spread)
    once = t.concatenate(*parts)
    places = t.tensor(x.numel, once.dtype)
    t.record(OperationKind.REPEAT, (once,), (places,), gradients=(Gradient.FRESH,))
    placed = t.add(x, places)
    t.hold_buffer(allocated_bytes(body.frames * size, t.options.weights))
    placed = t.shift(placed)
    t.touch(places)
    mean, own = t.mean(placed, cells), t.mean(placed, 1)
    both = t.concatenate(mean, own)
    t.touch(mean, own, placed)
    made = linear(t, both, "image_projection", size, body.outputs, bias=False)
    return layer_norm(t, made, "image_proj_norm", body.outputs)
