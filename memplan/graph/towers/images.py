"""Pictures as tokens (``*Embeddings`` of transformers' vision models)."""

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.placing import positions
from memplan.graph.towers.state import Flow, sensed
from memplan.model.pictures import PictureSpec
from memplan.model.towers.gridded.nets import PixelsBody
from memplan.model.towers.parts import RMS_NORM
from memplan.model.towers.patches import Cut, PatchesBody, Positions
from memplan.model.towers.tiles import TilesBody


def picture_size(
    side: int | None,
    body: PatchesBody | PixelsBody | TilesBody | PictureSpec,
) -> tuple[int, int]:
    """Height and width of a picture, as the setup or the model says.

    Raises ``SetupError`` for one that is smaller than a patch.
    """
    if side is None or (isinstance(body, PatchesBody) and body.resized):
        return body.image
    if isinstance(body, TilesBody) or (isinstance(body, PatchesBody) and body.rows):
        msg = (
            f"image_size: {side} pixels a side are as good as any: pictures are resized to {body.image[0]} "
            "before this model sees them; leave it out"
        )
        raise SetupError(msg)
    if isinstance(body, PictureSpec) and body.fixed and (side, side) != body.image:
        msg = f"image_size: {side}: this model's class takes pictures of {body.image[0]} pixels a side alone"
        raise SetupError(msg)
    if not isinstance(body, PixelsBody) and side < max(body.patch):
        msg = f"image_size: {side} pixels are less than a patch, which has {max(body.patch)}"
        raise SetupError(msg)
    return side, side


def image_patches(t: Tape, body: PatchesBody, flow: Flow) -> Tensor:
    """A convolution, tokens before its vectors, positions added."""
    height, width = flow.picture = picture_size(t.options.image_size, body)
    flow.items *= body.crops
    flow.grid = height // body.patch[0], width // body.patch[1]
    patches = flow.patches = body.rows or flow.grid[0] * flow.grid[1]
    pixels = height * width
    if body.rows:
        pixels = body.rows * body.patch[0] * body.patch[1]
    pixels *= flow.items * body.channels
    x = sensed(t, pixels, casts=body.casts_pictures)
    if body.centred:
        x = t.scale(t.shift(x))
    if body.casts_pictures:
        x = t.cast(x, t.compute)
    if body.picked:
        x = _picked(t, x, flow.items)
    x = vectors = _vectors(t, x, body, flow.items * patches)
    if body.tokens:
        others = [spread(t, name, flow.items, body.size) for name in body.tokens]
        x = t.concatenate(x, *others) if body.tokens_last else t.concatenate(*others, x)
    if body.first_norm:
        x = norm(t, x, RMS_NORM, body.first_norm, body.size)
    if body.positions is not Positions.NONE:
        given, added = x, positions(t, body, flow.items, patches)
        x = t.add(given, added)
        if body.names_patches:
            t.touch(added, given, vectors)
    if body.masked:
        # One row of all pictures, of which each sees itself alone.
        x = t.contiguous(x)
        x = norm(t, x, RMS_NORM, "ln_pre", body.size)
        if not t.kernels.attention.is_package:
            flow.mask = t.tensor((flow.items * patches) ** 2, x.dtype)
            t.record(OperationKind.MASK, (), (flow.mask,))
            flow.share(t, flow.mask)
    if body.rows:
        flow.hold_padding(t, flow.items, body.rows)
    if body.rotary_dim and body.cut is Cut.UNFOLDED:
        # Llama 4's one table of complex numbers is a buffer.
        flow.tables = (t.buffer((patches + len(body.tokens)) * body.rotary_dim, DType.FP32),) * 2
    elif body.rotary_dim:
        rows = patches if body.one_table else flow.items * patches
        _tables(t, body, flow, rows, _table_dtype(x, body))
    return dropout(t, x, body.dropout)


def _table_dtype(x: Tensor, body: PatchesBody) -> DType:
    """What cosines and sines are cast to: fp32, what patches are, or what a norm makes of them."""
    if body.masked or body.rows:
        return x.dtype
    return DType.FP32


def _vectors(t: Tape, x: Tensor, body: PatchesBody, patches: int) -> Tensor:
    """One vector of each patch."""
    if body.cut is Cut.CONVOLVED:
        out = convolution(t, x, body.projection, patches, bias=body.bias, gives_rows=True)
        out.by_channel = body.by_channel
        return out
    if body.cut is Cut.UNFOLDED:
        x = t.contiguous(x)
    return linear(t, x, body.projection, x.numel // patches, body.size, bias=body.bias)


def _picked(t: Tape, x: Tensor, items: int) -> Tensor:
    """Pictures that hold something, told from those that pad a sample."""
    empty = t.tensor(x.numel, DType.BOOL)
    t.record(OperationKind.EQ, (x,), (empty,))
    numbers = t.tensor(items, DType.INT64)
    t.record(OperationKind.SUM, (empty,), (numbers,))
    out = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.INDEX, (x, numbers), (out,))
    return out


def _tables(t: Tape, body: PatchesBody, flow: Flow, rows: int, dtype: DType) -> None:
    """Cosines and sines of every patch, held by the tower."""
    angles = t.tensor(rows * body.rotary_dim, DType.FP32)
    t.record(OperationKind.MUL, (), (angles,))
    tables = []
    for kind in (OperationKind.COS, OperationKind.SIN):
        made = t.tensor(rows * body.rotary_dim, DType.FP32)
        t.record(kind, (angles,), (made,))
        made = t.cast(made, dtype)
        flow.share(t, made)
        tables.append(made)
    flow.tables = tables[0], tables[1]


def spread(t: Tape, name: str, items: int, size: int) -> Tensor:
    """A weight seen once for each picture (``expand``); its gradient is summed over them."""
    weight = t.parameter(name)
    out = Tensor((size or weight.numel) * items, weight.dtype, weight.storage)
    t.record(OperationKind.EXPAND, (weight,), (out,), gradients=(Gradient.FRESH,))
    return out
