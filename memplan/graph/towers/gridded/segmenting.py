"""Segment Anything's encoder."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, batched_matmul
from memplan.graph.attention.paths import sdpa
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.state import Flow
from memplan.model.attention import AttentionSpec
from memplan.model.towers.gridded.segmenting import (
    MaskNeckBody,
    SegmentingBody,
    WindowedLayerBody,
)
from memplan.training.choices_of_kernels.kernels import AttentionKernel


def write_segmenting(t: Tape, x: Tensor, body: SegmentingBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case WindowedLayerBody():
            return _windowed_layer(t, x, body, flow)
        case MaskNeckBody():
            return neck(t, x, "neck", body.size, body.outputs)


def _windowed_layer(t: Tape, x: Tensor, body: WindowedLayerBody, flow: Flow) -> Tensor:
    normed = layer_norm(t, x, "layer_norm1", body.size)
    height, width = flow.grid
    side, items, given = (height, width), flow.items, normed
    if body.window:
        down, across = (-(-each // body.window) for each in flow.grid)
        side = body.window, body.window
        items = flow.items * down * across
        numel = items * body.window**2 * body.size
        padded = t.tensor(numel, normed.dtype)
        t.record(OperationKind.PAD, (normed,), (padded,), gradients=(Gradient.FRESH,))
        given = t.contiguous(padded)
        t.touch(normed, padded)
    attended = _with_distances(t, given, body, items, side)
    t.touch(given)
    if body.window:
        whole = t.contiguous(attended)
        windows, attended = attended, t.contiguous(t.slice(whole, x.numel))
        t.touch(windows)
    middle = t.add(x, attended)
    t.touch(attended)
    second = layer_norm(t, middle, "layer_norm2", body.size)
    raised = linear(t, second, "mlp.lin1", body.size, body.inner_size, bias=True)
    active = activation(t, raised, body.activation)
    t.touch(raised)
    out = t.add(middle, linear(t, active, "mlp.lin2", body.inner_size, body.size, bias=True))
    t.touch(second)
    return out


def _with_distances(
    t: Tape, x: Tensor, body: WindowedLayerBody, items: int, side: tuple[int, int]
) -> Tensor:
    """``SamVisionSdpaAttention``, or the class with its scores written out."""
    head_dim = body.size // body.num_heads
    spec = AttentionSpec(
        num_heads=body.num_heads, num_kv_heads=body.num_heads, head_dim=head_dim, causal=False,
    )  # fmt: skip
    rows = side[0] * side[1]
    shape = Shape(items, rows, rows, spec)
    both = linear(t, x, "attn.qkv", body.size, 3 * body.size, bias=body.bias)
    # Heads of one picture or window are told apart by strides alone.
    apart = both if items == 1 else t.contiguous(both)
    query, key, value = t.split(apart, x.numel, x.numel, x.numel)
    for each in (query, key, value):
        each.by_head = items > 1
    eager = body.written_out or t.kernels.attention is AttentionKernel.EAGER
    scores: Tensor | None = None
    if eager:
        scores = batched_matmul(t, t.scale(query), key, shape.scores, head_dim)
    bias = _distances(t, query, body, items, side) if body.relative else None
    if scores is None:
        out = sdpa(t, query, key, value, shape, bias)
    else:
        total = scores if bias is None else t.add(scores, bias)
        weights = t.cast(softmax(t, total, dtype=DType.FP32), query.dtype)
        t.touch(total)
        out = batched_matmul(t, dropout(t, weights, body.dropout), value, x.numel, rows)
        out = t.contiguous(out)
    given = linear(t, out, "attn.proj", body.size, body.size, bias=True)
    # The method's own variables.
    if bias is not None:
        t.touch(bias)
    t.touch(both, query)
    return given


def _distances(
    t: Tape, query: Tensor, body: WindowedLayerBody, items: int, side: tuple[int, int]
) -> Tensor:
    """``get_decomposed_rel_pos``: products of queries with rows of two tables, added across."""
    tables = "attn.rel_pos_h", "attn.rel_pos_w"
    head_dim = body.size // body.num_heads
    products = distance_products(t, query, head_dim, tables, side, items, resizes=True)
    pairs = items * body.num_heads * (side[0] * side[1]) ** 2
    total = t.tensor(pairs, products[0].dtype)
    t.record(OperationKind.ADD, products, (total,), gradients=(Gradient.SUMMED, Gradient.SUMMED))
    t.touch(*products)
    out = t.contiguous(total)
    t.touch(total)
    return out


def distance_products(
    t: Tape,
    query: Tensor,
    head_dim: int,
    tables: tuple[str, str],
    side: tuple[int, int],
    items: int,
    *,
    resizes: bool,
) -> list[Tensor]:
    """Products of queries with rows of a table for each axis, which may be resized though it fits."""
    products = []
    for name, extent, is_first in zip(tables, side, (True, False), strict=True):
        table: Tensor = t.parameter(name)
        if resizes or table.numel != (2 * extent - 1) * head_dim:
            resized = t.tensor(table.numel, table.dtype)
            t.record(OperationKind.REPEAT, (table,), (resized,), gradients=(Gradient.FRESH,))
            table = resized
        rows = t.tensor(extent**2 * head_dim, table.dtype)
        # Which rows, the CPU counts and keeps.
        t.record(OperationKind.INDEX, (table,), (rows,), gradients=(Gradient.FRESH,))
        # Down the picture queries are copied into another order; across they lie as they are asked for,
        # unless they are still what the projection gave.
        read = t.contiguous(query) if is_first or items == 1 else query
        numel = query.numel // head_dim * extent
        products.append(batched_matmul(t, read, rows, numel, head_dim))
    return products


def neck(t: Tape, x: Tensor, module: str, size: int, outputs: int) -> Tensor:
    """``SamVisionNeck``: two convolutions, each with a norm over the channels."""
    positions = x.numel // size
    first = convolution(t, x, f"{module}.conv1", positions, bias=False)
    normed = layer_norm(t, first, f"{module}.layer_norm1", outputs)
    second = convolution(t, normed, f"{module}.conv2", positions, bias=False)
    return layer_norm(t, second, f"{module}.layer_norm2", outputs)
