"""Pictures in tiles (``MllamaVisionModel`` of transformers 5.23)."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.norms import layer_norm
from memplan.graph.towers.images import spread
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.towers.tiles import LayersJoinedBody, TileBody, TilePlacesBody, TilesBody
from memplan.units import round_up

TOKENS_MULTIPLE = 8
"""A tile's tokens are padded to a multiple of this."""


def tiles(t: Tape, body: TilesBody, flow: Flow) -> Tensor:
    """A convolution, places of tiles, a token before each tile's patches, places of patches."""
    patches = (body.image[0] // body.patch[0]) * (body.image[1] // body.patch[1])
    number, tokens = flow.items * body.crops, patches + 1
    flow.patches = tokens
    pixels = from_batch(t, number * body.channels * body.image[0] * body.image[1], DType.FP32)
    flow.shapes = from_batch(t, flow.items, DType.INT64)
    seen = from_batch(t, number, DType.INT64)
    x = convolution(t, t.cast(pixels, t.compute), "patch_embedding", number * patches, bias=False)
    x = _placed_tiles(t, x, "pre_tile_positional_embedding", flow)
    x = t.concatenate(spread(t, "vision_model.class_embedding", number, body.size), x)
    x = _placed_patches(t, x, flow)
    x = layer_norm(t, x, "layernorm_pre", body.size)
    length = round_up(tokens, TOKENS_MULTIPLE)
    padded = t.tensor(number * length * body.size, x.dtype)
    t.record(OperationKind.PAD, (x,), (padded,), gradients=(Gradient.FRESH,))
    flow.mask = _mask(t, seen, flow.items, body.crops * length)
    flow.share(t, flow.mask)
    t.hold(padded)
    flow.collected = [padded]
    return padded


def _gate(t: Tape, name: str) -> Tensor:
    return t.elementwise(OperationKind.TANH, t.parameter(name))


def _placed_tiles(t: Tape, x: Tensor, module: str, flow: Flow) -> Tensor:
    """``MllamaPrecomputedAspectRatioEmbedding``: a row for each shape of a picture."""
    table = t.parameter(f"{module}.embedding.weight")
    found = embedding_lookup(t, table, flow.items, flow.shapes)
    return t.add(x, t.mul(found, _gate(t, f"{module}.gate")))


def _placed_patches(t: Tape, x: Tensor, flow: Flow) -> Tensor:
    """``MllamaPrecomputedPositionEmbedding``: one table for all tiles, one for each shape's."""
    module = "gated_positional_embedding"
    rest = t.scale(_gate(t, f"{module}.gate"))
    x = t.add(x, t.mul(rest, t.parameter(f"{module}.embedding")))
    table = t.parameter("tile_embedding.weight")
    found = embedding_lookup(t, table, flow.items, flow.shapes)
    return t.add(x, t.mul(_gate(t, f"{module}.gate"), found))


def _mask(t: Tape, seen: Tensor, items: int, length: int) -> Tensor:
    """``_prepare_aspect_ratio_attention_mask``: a product that says of every pair whether to see it."""
    padding = t.tensor(items * length, t.compute)
    t.record(OperationKind.REPEAT, (seen,), (padding,))
    padding = t.cast(t.scale(padding), t.autocast or t.compute)
    pairs = t.tensor(items * length**2, padding.dtype)
    t.record(OperationKind.MATMUL, (padding,), (pairs,))
    return t.scale(pairs)


def write_tiles(t: Tape, x: Tensor, body: TileBody, flow: Flow) -> Tensor:
    """The operations of what reads tiles."""
    match body:
        case TilePlacesBody():
            return _placed_tiles(t, x, body.module, flow)
        case LayersJoinedBody():
            return _layers_joined(t, x, body, flow)


def _layers_joined(t: Tape, x: Tensor, body: LayersJoinedBody, flow: Flow) -> Tensor:
    """Results of layers stacked, padding cut off; all lie side by side."""
    assert flow.collected is not None
    read, *results = flow.collected
    tiles_seen = x.numel // body.size // round_up(flow.patches, TOKENS_MULTIPLE)
    numel = tiles_seen * flow.patches * body.size
    last = t.slice(x, numel)
    chosen = [results[number] for number in body.layers]
    stacked = t.concatenate(*chosen)
    cut = t.slice(stacked, numel * len(chosen))
    for each in (read, *results):
        t.release(each)
    flow.collected = None
    out = t.concatenate(last, cut)
    t.touch(stacked)
    return out
