"""Segment Anything, as ``SamModel`` runs it: one point or box a picture, masks, no loss of its own."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, batched_matmul
from memplan.graph.attention.paths import attend, sdpa
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.images import picture_size
from memplan.graph.towers.state import Flow
from memplan.model.attention import AttentionSpec
from memplan.model.networks import Activation
from memplan.model.towers.gridded.segmenting import (
    FineFeaturesBody,
    FineMasksBody,
    LastLookBody,
    MaskNeckBody,
    MasksBody,
    PlacesBody,
    PromptBody,
    SegmentingBody,
    TwoWayLayerBody,
    UpscalingBody,
    WindowedLayerBody,
)
from memplan.training.choices_of_kernels.kernels import AttentionKernel

POINTS = 2
"""Tokens of a prompt: a point and one that pads it, or two corners of a box."""


def write_segmenting(t: Tape, x: Tensor, body: SegmentingBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case WindowedLayerBody():
            return _windowed_layer(t, x, body, flow)
        case MaskNeckBody():
            return neck(t, x, "neck", body.size, body.outputs)
        case PromptBody():
            return _prompt(t, x, body, flow)
        case TwoWayLayerBody():
            return _two_way(t, x, body, flow)
        case LastLookBody():
            return _last_look(t, x, body, flow)
        case UpscalingBody():
            return _upscaled(t, x, body, flow)
        case MasksBody():
            return _masks(t, x, body, flow)
        case FineFeaturesBody():
            return _fine_features(t, x, body, flow)
        case FineMasksBody():
            return _fine_masks(t, x, body, flow)


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


def _prompt(t: Tape, x: Tensor, body: PromptBody, flow: Flow) -> Tensor:
    """Tokens, and the picture with what stands for no mask; positions of the picture stay."""
    # The model's own variables hold what it found of the picture; its decoder has copies.
    assert flow.places is not None
    flow.placed = _for_each_prompt(t, flow.places)
    for each in (x, flow.placed):
        _find(t, each, flow)
    pictures = _for_each_prompt(t, t.add(x, t.parameter("no_mask_embed.weight")))
    names = "iou_token.weight", "mask_tokens.weight", body.last_token
    joined = t.concatenate(*(t.parameter(name) for name in names if name))
    repeated = t.tensor(flow.items * joined.numel, joined.dtype)
    t.record(OperationKind.REPEAT, (joined,), (repeated,), gradients=(Gradient.FRESH,))
    point = t.tensor(flow.items * POINTS * body.size, joined.dtype)
    given = t.parameter("not_a_point_embed.weight")
    t.record(OperationKind.WHERE, (given,), (point,), gradients=(Gradient.FRESH,))
    flow.tokens_seen = t.concatenate(repeated, point)
    flow.asked = flow.tokens_seen
    t.hold(flow.asked)
    return pictures


def _for_each_prompt(t: Tape, x: Tensor) -> Tensor:
    """``repeat_interleave``: a copy, be there one prompt."""
    out = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.REPEAT_INTERLEAVE, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def places(t: Tape, body: PlacesBody, flow: Flow) -> Tensor:
    """Sines and cosines of products of places with a trained matrix, once for each picture."""
    height, width = picture_size(t.options.image_size, body)
    cells = height // body.patch[0] * (width // body.patch[1])
    matrix = t.parameter("shared_image_embedding.positional_embedding")
    half = t.tensor(cells * matrix.shape[1], t.autocast or matrix.dtype)
    t.record(OperationKind.MATMUL, (t.cast_weight(matrix),), (half,), gradients=(Gradient.FRESH,))
    turned = t.scale(half)
    kinds = OperationKind.SIN, OperationKind.COS
    once = t.concatenate(*(t.elementwise(kind, turned) for kind in kinds))
    t.touch(half, turned)
    flow.places = t.tensor(flow.items * once.numel, once.dtype)
    t.record(OperationKind.REPEAT, (once,), (flow.places,), gradients=(Gradient.FRESH,))
    return flow.places


def _seen(
    t: Tape,
    name: str,
    parts: tuple[Tensor, Tensor, Tensor],
    widths: tuple[int, int],
    num_heads: int,
    items: int,
) -> Tensor:
    """``SamAttention``: projections to a width, scores, and the way back."""
    query, key, value = parts
    size, narrow = widths
    made = [
        linear(t, each, f"{name}.{part}", size, narrow, bias=True)
        for each, part in ((query, "q_proj"), (key, "k_proj"), (value, "v_proj"))
    ]
    spec = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=narrow // num_heads, causal=False,
    )  # fmt: skip
    shape = Shape(items, query.numel // size // items, key.numel // size // items, spec)
    out = attend(t, made[0], made[1], made[2], shape, None)
    result = linear(t, out, f"{name}.o_proj", narrow, size, bias=True)
    t.touch(*made)
    return result


def _look(
    t: Tape, picture: Tensor, name: str, body: TwoWayLayerBody | LastLookBody, flow: Flow
) -> Tensor:
    """Tokens see the picture; what is added to them."""
    tokens, asked = flow.tokens_seen, flow.asked
    assert tokens is not None
    assert asked is not None
    query, key = t.add(tokens, asked), t.add(picture, _placed(flow))
    widths = body.size, body.narrow
    out = _seen(t, name, (query, key, picture), widths, body.num_heads, flow.items)
    t.touch(query, key)
    return t.add(tokens, out)


def _placed(flow: Flow) -> Tensor:
    assert flow.placed is not None
    return flow.placed


def _two_way(t: Tape, x: Tensor, body: TwoWayLayerBody, flow: Flow) -> Tensor:
    size = body.size
    tokens, asked = flow.tokens_seen, flow.asked
    assert tokens is not None
    assert asked is not None
    before, query = tokens, t.add(tokens, asked)
    out = _seen(t, "self_attn", (query, query, tokens), (size, size), body.num_heads, flow.items)
    flow.tokens_seen = layer_norm(t, t.add(tokens, out), "layer_norm1", size)
    tokens = layer_norm(
        t, _look(t, x, "cross_attn_token_to_image", body, flow), "layer_norm2", size
    )
    raised = linear(t, tokens, f"{body.network}.proj_in", size, body.inner_size, bias=True)
    active = activation(t, raised, body.activation)
    fed = linear(t, active, f"{body.network}.proj_out", body.inner_size, size, bias=True)
    tokens = layer_norm(t, t.add(tokens, fed), "layer_norm3", size)
    query, key = t.add(tokens, asked), t.add(x, _placed(flow))
    widths = size, body.narrow
    name = "cross_attn_image_to_token"
    out = _seen(t, name, (key, query, tokens), widths, body.num_heads, flow.items)
    picture = t.add(x, out)
    t.touch(key, out)
    if before is not asked:
        t.release(before)
    flow.tokens_seen = tokens
    t.hold(tokens)
    return layer_norm(t, picture, "layer_norm4", size)


def _last_look(t: Tape, x: Tensor, body: LastLookBody, flow: Flow) -> Tensor:
    seen = _look(t, x, "final_attn_token_to_image", body, flow)
    for each in (flow.tokens_seen, flow.asked):
        assert each is not None
        t.release(each)
    flow.tokens_seen = layer_norm(t, seen, "layer_norm_final_attn", body.size)
    t.hold(flow.tokens_seen)
    return x


def _upscaled(t: Tape, x: Tensor, body: UpscalingBody, flow: Flow) -> Tensor:
    positions = 4 * flow.items * flow.grid[0] * flow.grid[1]
    wide = convolution(t, x, "upscale_conv1", positions)
    normed = layer_norm(t, wide, "upscale_layer_norm", body.size // 4)
    active = activation(t, normed, Activation.GELU)
    t.touch(wide, normed)
    wider = convolution(t, active, "upscale_conv2", 4 * positions)
    out = activation(t, wider, Activation.GELU)
    t.touch(wider, active)
    return out


def _token_network(t: Tape, name: str, tokens: Tensor, size: int, flow: Flow) -> Tensor:
    found = t.slice(tokens, flow.items * size)
    for layer, outputs in (("proj_in", size), ("layers.0", size), ("proj_out", size // 8)):
        found = linear(t, found, f"{name}.{layer}", size, outputs, bias=True)
        if layer != "proj_out":
            found = activation(t, found, Activation.RELU)
    return found


def _find(t: Tape, x: Tensor, flow: Flow) -> None:
    """A variable of the model's holds it until the masks are there."""
    t.hold(x)
    flow.found.append(x)


def _fine_features(t: Tape, x: Tensor, body: FineFeaturesBody, flow: Flow) -> Tensor:
    """The beginning of ``SamHQMaskDecoder.forward``."""
    size = body.size
    positions = 4 * flow.items * flow.grid[0] * flow.grid[1]

    def widened(read: Tensor, name: str, outputs: int, norm: str) -> Tensor:
        wide = convolution(t, read, f"{name}1", positions)
        normed = layer_norm(t, wide, norm, outputs)
        active = activation(t, normed, Activation.GELU)
        t.touch(wide, normed)
        return convolution(t, active, f"{name}2", 4 * positions)

    for level, _ in flow.levels:
        flow.found.append(level)
    early = t.contiguous(flow.levels[0][0])
    _find(t, early, flow)
    encoded = widened(x, "encoder_conv", size // 4, "encoder_norm")
    compressed = widened(early, "compress_vit_conv", size, "compress_vit_norm")
    flow.fine = t.add(encoded, compressed)
    for each in (encoded, compressed, flow.fine):
        _find(t, each, flow)
    return x


def _fine_masks(t: Tape, x: Tensor, body: FineMasksBody, flow: Flow) -> Tensor:
    """The end of ``SamHQMaskDecoder.forward``."""
    tokens, fine = flow.tokens_seen, flow.fine
    assert tokens is not None
    assert fine is not None
    size, out, count = body.size, body.size // 8, body.num_tokens
    positions = x.numel // out
    first = convolution(t, x, "mask_conv1", positions)
    normed = layer_norm(t, first, "mask_norm", size // 4)
    active = activation(t, normed, Activation.GELU)
    t.touch(first, normed)
    second = convolution(t, active, "mask_conv2", positions)
    given = fine
    if flow.items == 1:
        given = t.tensor(fine.numel, fine.dtype)
        t.record(OperationKind.REPEAT, (fine,), (given,), gradients=(Gradient.FRESH,))
    finer = t.add(second, given)
    names = [f"output_hypernetworks_mlps.{number}" for number in range(count)]
    made = [_token_network(t, name, tokens, size, flow) for name in (*names, "hq_mask_mlp")]
    stacked = t.concatenate(*made)
    for each in (tokens, *flow.found):
        t.release(each)
    rows = flow.items * out
    masks = batched_matmul(t, t.slice(stacked, count * rows), x, positions * count, out)
    best = batched_matmul(t, t.slice(stacked, rows), finer, positions, out)
    joined = t.concatenate(masks, best)
    chosen = t.slice(joined, positions * (count - 1))
    order = t.tensor(flow.items * (count - 1), DType.INT64)
    t.record(OperationKind.SORT, (), (order,))
    sorted_masks = t.tensor(chosen.numel, chosen.dtype)
    t.record(
        OperationKind.GATHER, (chosen, order), (sorted_masks,), saves=(chosen, order),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    result = t.add(sorted_masks, t.slice(joined, positions))
    t.touch(x, given, finer, stacked, masks, best, joined, sorted_masks)
    return result


def _masks(t: Tape, x: Tensor, body: MasksBody, flow: Flow) -> Tensor:
    """Of all masks but the first, which only the class asked for a single one returns."""
    tokens = flow.tokens_seen
    assert tokens is not None
    size, out = body.size, body.size // 8
    names = (f"output_hypernetworks_mlps.{number}" for number in range(body.num_tokens))
    made = [_token_network(t, name, tokens, size, flow) for name in names]
    stacked = t.concatenate(*made)
    for each in (tokens, *flow.found):
        t.release(each)
    positions = x.numel // out
    masks = batched_matmul(t, stacked, x, positions * body.num_tokens, out)
    return t.slice(masks, positions * (body.num_tokens - 1))
