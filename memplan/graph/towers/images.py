"""Pictures as tokens (``*Embeddings`` of transformers' vision models)."""

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations import dropout, embedding_lookup, norm
from memplan.graph.segments import Gradient
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor, allocated_bytes
from memplan.graph.towers.convolutions import convolution
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.towers.parts import RMS_NORM
from memplan.model.towers.patches import PatchesBody, Positions


def picture_size(side: int | None, body: PatchesBody) -> tuple[int, int]:
    """Height and width of a picture, as the setup or the model says.

    Raises ``SetupError`` for one that is smaller than a patch.
    """
    if side is None:
        return body.image
    if side < max(body.patch):
        msg = f"image_size: {side} pixels are less than a patch, which has {max(body.patch)}"
        raise SetupError(msg)
    return side, side


def image_patches(t: Tape, body: PatchesBody, flow: Flow) -> Tensor:
    """A convolution, tokens before its vectors, positions added."""
    height, width = picture_size(t.options.image_size, body)
    flow.items *= body.crops
    pixels = flow.items * body.frames * body.channels * height * width
    cast = body.casts_pictures or t.autocast is not None
    x = from_batch(t, pixels, DType.FP32 if cast else t.compute)
    if body.casts_pictures:
        x = t.cast(x, t.compute)
    patches = (height // body.patch[0]) * (width // body.patch[1])
    flow.patches = patches
    flow.grid = height // body.patch[0], width // body.patch[1]
    x = convolution(t, x, body.projection, flow.items * patches, bias=body.bias)
    if body.tokens:
        before = [_spread(t, name, flow.items, body.size) for name in body.tokens]
        x = t.concatenate(*before, x)
    if body.windowed:
        x = reordered(t, x, body.size)
    if body.resampled_rows:
        x = t.add(x, t.cast(_resampled(t, body, flow.items * patches), x.dtype))
    elif body.positions is not Positions.NONE:
        x = t.add(x, _positions(t, body, patches + len(body.tokens)))
    if body.num_registers:
        first = t.slice(x, flow.items * body.size)
        rest = t.slice(x, x.numel - flow.items * body.size)
        x = t.concatenate(first, _spread(t, body.registers, flow.items, 0), rest)
    if body.masked:
        # One row of all pictures, of which each sees itself alone.
        x = t.contiguous(x)
        x = norm(t, x, RMS_NORM, "ln_pre", body.size)
        if not t.kernels.attention.is_package:
            flow.mask = t.tensor((flow.items * patches) ** 2, x.dtype)
            t.record(OperationKind.MASK, (), (flow.mask,))
            flow.share(t, flow.mask)
    if body.rotary_dim:
        _tables(t, body, flow, flow.items * patches, DType.FP32 if not body.masked else x.dtype)
    return dropout(t, x, body.dropout)


def reordered(t: Tape, x: Tensor, size: int) -> Tensor:
    """Rows picked by index."""
    out = t.tensor(x.numel, x.dtype)
    numbers = t.tensor(x.numel // size, DType.INT64)
    t.record(OperationKind.ARANGE, (), (numbers,))
    t.record(
        OperationKind.INDEX, (x, numbers), (out,), saves=(numbers,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def _resampled(t: Tape, body: PatchesBody, rows: int) -> Tensor:
    """Four rows of the table for each patch, weighed and added up."""
    numbers, shares = t.tensor(4 * rows, DType.INT64), t.tensor(4 * rows, DType.FP32)
    t.record(OperationKind.ARANGE, (), (numbers,))
    t.record(OperationKind.ARANGE, (), (shares,))
    table = t.parameter(f"{body.position_module}.weight")
    found = embedding_lookup(t, table, 4 * rows, numbers)
    shares = t.cast(shares, found.dtype)
    product = t.tensor(found.numel, found.dtype)
    t.record(
        OperationKind.MUL, (found, shares), (product,), saves=(shares,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    out = t.tensor(rows * body.size, product.dtype)
    t.record(OperationKind.SUM, (product,), (out,), gradients=(Gradient.FRESH,))
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


def _spread(t: Tape, name: str, items: int, size: int) -> Tensor:
    """A weight seen once for each picture (``expand``); its gradient is summed over them."""
    weight = t.parameter(name)
    out = Tensor((size or weight.numel) * items, weight.dtype, weight.storage)
    t.record(OperationKind.EXPAND, (weight,), (out,), gradients=(Gradient.FRESH,))
    return out


def _positions(t: Tape, body: PatchesBody, count: int) -> Tensor:
    if body.positions is Positions.PARAMETER:
        return t.parameter(body.position_module)
    t.hold_buffer(allocated_bytes(count, DType.INT64))
    return embedding_lookup(t, t.parameter(f"{body.position_module}.weight"), count)
