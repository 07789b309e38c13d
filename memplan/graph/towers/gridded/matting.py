"""ViTDet and ViTMatte, as their classes write them out."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import softmax
from memplan.graph.operations.products import linear
from memplan.graph.towers.gridded.nets import batch_norm, resized
from memplan.graph.towers.gridded.segmenting import distance_products
from memplan.graph.towers.state import Flow
from memplan.model.networks import Activation
from memplan.model.towers.gridded.matting import (
    ChannelNormBody,
    MattersBody,
    MattingBody,
    ResizedPlacesBody,
    WindowedScoresBody,
)


def write_matters(t: Tape, x: Tensor, body: MattersBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case ResizedPlacesBody():
            return _placed(t, x, body, flow)
        case WindowedScoresBody():
            return _windowed(t, x, body, flow)
        case ChannelNormBody():
            return _channel_norm(t, x, body)
        case MattingBody():
            return _matted(t, x, body, flow)


def _placed(t: Tape, x: Tensor, body: ResizedPlacesBody, flow: Flow) -> Tensor:
    table = t.parameter(body.positions)
    places = t.slice(table, table.numel - body.size)
    if flow.grid != (body.side, body.side):
        places = resized(t, places, flow.grid[0] * flow.grid[1] * body.size)
    out = t.add(x, places)
    t.touch(x)
    return out


def _windowed(t: Tape, x: Tensor, body: WindowedScoresBody, flow: Flow) -> Tensor:
    """``VitDetLayer`` between its norm and the sum."""
    if not body.window:
        out = _scores(t, x, body, flow.items, flow.grid)
        t.touch(x)
        return out
    down, across = (-(-each // body.window) for each in flow.grid)
    items = flow.items * down * across
    padded = t.tensor(items * body.window**2 * body.size, x.dtype)
    t.record(OperationKind.PAD, (x,), (padded,), gradients=(Gradient.FRESH,))
    windows = t.contiguous(padded)
    t.touch(x, padded)
    attended = _scores(t, windows, body, items, (body.window, body.window))
    t.touch(windows)
    whole = t.contiguous(attended)
    kept = t.slice(t.slice(whole, x.numel), x.numel)
    out = t.contiguous(kept)
    t.touch(whole, attended)
    return out


def _scores(
    t: Tape, x: Tensor, body: WindowedScoresBody, items: int, side: tuple[int, int]
) -> Tensor:
    """``VitDetAttention``."""
    size, name = body.size, body.module
    rows, head_dim = side[0] * side[1], size // body.num_heads
    both = linear(t, x, f"{name}.qkv", size, 3 * size, bias=body.bias)
    apart = both if items == 1 else t.contiguous(both)
    query, key, value = t.split(apart, x.numel, x.numel, x.numel)
    pairs = items * body.num_heads * rows**2
    product = batched_matmul(t, t.scale(query), key, pairs, head_dim)
    scores = product
    if body.relative:
        tables = f"{name}.rel_pos_h", f"{name}.rel_pos_w"
        products = distance_products(t, query, head_dim, tables, side, items, resizes=False)
        for each in products:
            scores = _spread_sum(t, scores, each)
        t.touch(product, *products)
    weights = softmax(t, scores)
    out = t.contiguous(batched_matmul(t, weights, value, x.numel, rows))
    t.touch(scores, weights)
    given = linear(t, out, f"{name}.proj", size, size, bias=True)
    t.touch(x, both, query)
    return given


def _spread_sum(t: Tape, scores: Tensor, addend: Tensor) -> Tensor:
    """Numbers of one axis are added to all pairs that share it."""
    out = t.tensor(scores.numel, scores.dtype)
    t.record(
        OperationKind.ADD, (scores, addend), (out,), gradients=(Gradient.ALIAS, Gradient.SUMMED)
    )
    return out


def _channel_norm(t: Tape, x: Tensor, body: ChannelNormBody) -> Tensor:
    """``VitDetLayerNorm``: from the square on in fp32 under autocast."""
    mean = t.mean(x, body.size)
    apart = _less_mean(t, x, mean)
    read = apart if t.autocast is None else t.cast(apart, DType.FP32)
    variance = t.mean(t.square(read), body.size)
    numerator = _less_mean(t, x, mean)
    root = t.elementwise(OperationKind.SQRT, t.shift(variance))
    normed = t.tensor(x.numel, root.dtype)
    t.record(
        OperationKind.DIV, (numerator, root), (normed,), saves=(numerator, root),
        gradients=(Gradient.FRESH, 3 * normed.storage.num_bytes),
    )  # fmt: skip
    t.touch(x, mean, variance)
    scaled = t.mul(t.parameter(f"{body.module}.weight"), normed)
    out = t.add(scaled, t.parameter(f"{body.module}.bias"))
    t.touch(normed)
    return out


def _less_mean(t: Tape, x: Tensor, mean: Tensor) -> Tensor:
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.SUB, (x, mean), (out,), gradients=(Gradient.ALIAS, out.storage.num_bytes)
    )
    return out


def _convolved(t: Tape, x: Tensor, name: str, channels: int, rows: int) -> Tensor:
    """``VitMatteBasicConv3x3``."""
    made = convolution(t, x, f"{name}.conv", rows, bias=False)
    normed = batch_norm(t, made, f"{name}.batch_norm", channels)
    out = activation(t, normed, Activation.RELU)
    t.touch(normed, x)
    return out


def _matted(t: Tape, x: Tensor, body: MattingBody, flow: Flow) -> Tensor:
    """``VitMatteDetailCaptureModule``."""
    assert flow.pixels is not None
    features, items = x, flow.items
    details, grids = [flow.pixels], [flow.picture]
    for number, channels in enumerate(body.details):
        height, width = ((side - 1) // 2 + 1 for side in grids[-1])
        name = f"convstream.{number}"
        details.append(_convolved(t, details[-1], name, channels, items * height * width))
        grids.append((height, width))
    for number, channels in enumerate(body.fused):
        detail, grid = details[-1 - number], grids[-1 - number]
        wider = resized(t, features, 4 * features.numel)
        joined = t.concatenate(detail, wider)
        rows = items * grid[0] * grid[1]
        made = _convolved(t, joined, f"fusion_blocks.{number}", channels, rows)
        t.touch(wider, features)
        features = made
    rows = items * grids[0][0] * grids[0][1]
    first = convolution(t, features, "matting_convs.0", rows)
    normed = batch_norm(t, first, "matting_convs.1", first.numel // rows)
    active = t.view(normed, normed.numel)
    t.record(OperationKind.RELU, (normed,), (active,), saves=(active,), gradients=(Gradient.FRESH,))
    scores = convolution(t, active, "matting_convs.3", rows)
    out = t.elementwise(OperationKind.SIGMOID, scores)
    t.touch(*details[1:], scores, active)
    return out
