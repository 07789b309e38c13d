"""Positions that are added to the patches of pictures, each way that classes make them."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.lookups import embedding_backward_scratch, embedding_lookup
from memplan.model.towers.patches import PatchesBody, Positions


def positions(t: Tape, body: PatchesBody, items: int, patches: int, dtype: DType) -> Tensor:
    """What is added to the patches of all pictures, or to each picture's; in ``dtype`` where it is cast."""
    rows = items * patches
    match body.positions:
        case Positions.PARAMETER:
            return t.parameter(body.position_module)
        case Positions.EACH:
            return _for_each(t, body, rows)
        case Positions.WEIGHED | Positions.WEIGHED_FULL:
            return t.cast(_weighed(t, body, rows), dtype)
        case Positions.SAMPLED:
            return _sampled(t, body, rows)
        case Positions.AXES:
            return _by_axis(t, body, rows)
        case Positions.RESIZED:
            return _resized(t, body, rows)
        case Positions.BAGGED:
            return t.cast(_bagged(t, body, rows), dtype)
        case Positions.TABLE | Positions.NONE:
            count = patches + len(body.tokens)
            t.hold_buffer(allocated_bytes(count, DType.INT64))
            return embedding_lookup(t, t.parameter(f"{body.position_module}.weight"), count)


def _numbers(t: Tape, count: int, dtype: DType = DType.INT64) -> Tensor:
    made = t.tensor(count, dtype)
    t.record(OperationKind.ARANGE, (), (made,))
    return made


def _for_each(t: Tape, body: PatchesBody, rows: int) -> Tensor:
    """``Idefics3VisionEmbeddings``: numbers of each picture's own."""
    table = t.parameter(f"{body.position_module}.weight")
    return embedding_lookup(t, table, rows, _numbers(t, rows))


def _weighed(t: Tape, body: PatchesBody, rows: int) -> Tensor:
    """Four rows of the table for each patch, weighed and added up."""
    numbers, shares = _numbers(t, 4 * rows), _numbers(t, 4 * rows, DType.FP32)
    table = t.parameter(f"{body.position_module}.weight")
    found = embedding_lookup(t, table, 4 * rows, numbers)
    if body.positions is Positions.WEIGHED:
        shares = t.cast(shares, found.dtype)
    product = t.tensor(found.numel, shares.dtype)
    t.record(
        OperationKind.MUL, (found, shares), (product,), saves=(shares,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    out = t.tensor(rows * body.size, product.dtype)
    t.record(OperationKind.SUM, (product,), (out,), gradients=(Gradient.FRESH,))
    return out


def _by_axis(t: Tape, body: PatchesBody, rows: int) -> Tensor:
    """``Gemma4VisionPatchEmbedder``: two look-ups in halves of one weight, zeros where there is padding."""
    table = t.parameter(body.position_module)
    numbers = _numbers(t, 2 * rows)
    found = []
    for _ in range(2):
        out = t.tensor(rows * body.size, table.dtype)
        t.record(
            OperationKind.EMBEDDING, (table, numbers), (out,), saves=(numbers,),
            gradients=(Gradient.FRESH, Gradient.NONE),
            backward_scratch_bytes=(table.storage.num_bytes // 2, RESULT),
        )  # fmt: skip
        found.append(out)
    both = t.add(*found)
    padding = t.tensor(rows, DType.BOOL)
    t.record(OperationKind.EQ, (), (padding,))
    out = t.tensor(both.numel, both.dtype)
    t.record(
        OperationKind.WHERE, (both, padding), (out,), saves=(padding,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def _sampled(t: Tape, body: PatchesBody, rows: int) -> Tensor:
    """``Glm4vVisionEmbeddings``: ``grid_sample`` of the table in fp32, cast back."""
    table = t.parameter(f"{body.position_module}.weight")
    full = t.cast(table, DType.FP32)
    points = _numbers(t, 2 * rows, DType.FP32)
    out = t.tensor(rows * body.size, DType.FP32)
    t.record(
        OperationKind.INDEX, (full, points), (out,), saves=(full, points),
        gradients=(Gradient.FRESH, Gradient.NONE),
        backward_scratch_bytes=points.storage.num_bytes,
    )  # fmt: skip
    return t.cast(out, table.dtype)


def _resized(t: Tape, body: PatchesBody, rows: int) -> Tensor:
    """``Siglip2VisionEmbeddings``: ``interpolate`` for each picture; nothing of it is kept."""
    table = t.parameter(f"{body.position_module}.weight")
    made = t.tensor(rows * body.size, table.dtype)
    t.record(
        OperationKind.INDEX, (table,), (made,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=made.storage.num_bytes,
    )  # fmt: skip
    return made


BAG_ROWS = 16
"""Rows that a bicubic point is mixed from."""


def _bagged(t: Tape, body: PatchesBody, rows: int) -> Tensor:
    """``Kimi_K25VisionPositionEmbeddings``: ``embedding_bag``, and rows of a table of frames in fp32."""
    count = BAG_ROWS * rows
    numbers, shares = _numbers(t, count), _numbers(t, count, DType.FP32)
    table = t.parameter(body.position_module)
    shares = t.cast(shares, table.dtype)
    starts, bags = _numbers(t, rows), _numbers(t, count)
    out = t.tensor(rows * body.size, table.dtype)
    t.record(
        OperationKind.EMBEDDING, (table, numbers, shares, starts), (out, bags),
        saves=(numbers, shares, starts, bags),
        gradients=(Gradient.FRESH, Gradient.NONE, Gradient.NONE, Gradient.NONE),
        backward_scratch_bytes=embedding_backward_scratch(
            t, count, table.numel, body.size, table.dtype
        ),
    )  # fmt: skip
    frames = _numbers(t, rows * body.size, DType.FP32)
    return t.add(out, frames)
