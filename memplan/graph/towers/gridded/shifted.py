"""Swin Transformer V2's attention and merging of patches, as its classes write them out."""

from memplan.dtypes import DType
from memplan.graph.attention.eager import heads_product
from memplan.graph.attention.head_layout import Shape, as_heads
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.products import linear
from memplan.graph.towers.state import Flow
from memplan.model.attention import AttentionSpec
from memplan.model.towers.gridded.shifted import MergedSquaresBody, ShiftedBody, ShiftedWindowsBody


def write_shifted(t: Tape, x: Tensor, body: ShiftedBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case ShiftedWindowsBody():
            return _shifted_windows(t, x, body, flow)
        case MergedSquaresBody():
            return _merged(t, x, body, flow)


def _shifted_windows(t: Tape, x: Tensor, body: ShiftedWindowsBody, flow: Flow) -> Tensor:
    """The first half of ``Swinv2Layer``, whose variables last until it returns."""
    down, across = (-(-side // body.window) for side in flow.grid)
    number = flow.items * down * across
    length = body.window**2
    # ``pad`` copies be there nothing to add.
    whole = t.tensor(number * length * body.size, x.dtype)
    t.record(OperationKind.PAD, (x,), (whole,), gradients=(Gradient.FRESH,))
    rolled = t.scale(whole, OperationKind.CLONE) if body.shift else whole
    windows = t.contiguous(rolled)
    mask = _mask(t, down * across, length, x.dtype) if body.shift else None
    attended = _attention(t, windows, body, number, mask)
    t.touch(windows)
    back = t.contiguous(attended)
    out = t.scale(back, OperationKind.CLONE) if body.shift else back
    if number * length * body.size != x.numel:
        kept = t.slice(out, x.numel)
        if across * body.window != flow.grid[1]:
            kept = t.slice(kept, x.numel)
        out = t.contiguous(kept)
    t.touch(whole)
    for each in dict.fromkeys((rolled, windows, attended, back, out)):
        t.linger(each)
    if mask is not None:
        t.linger(mask)
    return out


def _mask(t: Tape, windows: int, length: int, dtype: DType) -> Tensor:
    """Which positions of a rolled picture's windows were neighbours before."""
    pairs = windows * length**2
    regions = t.tensor(windows * length, dtype)
    t.record(OperationKind.ARANGE, (), (regions,))
    apart = t.tensor(pairs, dtype)
    t.record(OperationKind.SUB, (regions,), (apart,))
    return _filled(t, apart, _filled(t, apart, apart))


def _filled(t: Tape, asked: Tensor, x: Tensor) -> Tensor:
    """``x.masked_fill(asked != 0, ...)``."""
    unlike = t.tensor(asked.numel, DType.BOOL)
    t.record(OperationKind.EQ, (asked,), (unlike,))
    filled = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.MASKED_FILL, (x, unlike), (filled,))
    return filled


def _attention(
    t: Tape, x: Tensor, body: ShiftedWindowsBody, number: int, mask: Tensor | None
) -> Tensor:
    """``Swinv2SelfAttention``, and the layer behind it."""
    size, heads, name = body.size, body.num_heads, body.module
    length = body.window**2

    def project(part: str, *, bias: bool) -> Tensor:
        made = linear(t, x, f"{name}.{part}", size, size, bias=bias)
        return as_heads(t, made, heads)

    query = project("q_proj", bias=body.bias)
    key = project("k_proj", bias=False)
    value = project("v_proj", bias=body.bias)
    spec = AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=size // heads, causal=False)
    shape = Shape(number, length, length, spec, heads_split=True)
    sides = _unit(t, query, size // heads), _unit(t, key, size // heads)
    product = heads_product(t, *sides, shape, shape.scores, spec.head_dim)
    scale = t.parameter(f"{name}.logit_scale")
    factor = t.elementwise(OperationKind.EXP, _at_most(t, scale))
    scores = t.mul(product, factor)
    t.touch(product)
    table, distances = _distances(t, body, length)
    scores = t.add(scores, distances)
    if mask is not None:
        # The class adds it twice.
        scores = t.add(t.add(scores, mask), mask)
    weights = dropout(t, softmax(t, scores), body.dropout)
    out = heads_product(t, weights, value, shape, shape.outputs, length, first_merged=True)
    rows = t.contiguous(out) if number == 1 else t.scale(out, OperationKind.CLONE)
    t.touch(out, query, key, value, scores, weights, factor, table, distances)
    made = dropout(t, linear(t, rows, f"{name}.o_proj", size, size, bias=True), body.dropout)
    t.touch(x, rows)
    return made


def _unit(t: Tape, x: Tensor, width: int) -> Tensor:
    """``torch.nn.functional.normalize``: under autocast norms are fp32, and so is what they divide."""
    dtype = x.dtype if t.autocast is None else DType.FP32
    norms = t.tensor(x.numel // width, dtype)
    t.record(
        OperationKind.VECTOR_NORM, (x,), (norms,), saves=(x, norms), gradients=(Gradient.FRESH,)
    )
    least = t.tensor(norms.numel, dtype)
    t.record(OperationKind.CLAMP, (norms,), (least,), saves=(norms,), gradients=(Gradient.FRESH,))
    out = t.tensor(x.numel, dtype)
    t.record(
        OperationKind.DIV, (x, least), (out,), saves=(x, least),
        gradients=(Gradient.FRESH, 3 * out.storage.num_bytes),
    )  # fmt: skip
    return out


def _at_most(t: Tape, x: Tensor) -> Tensor:
    out = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.CLAMP, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,))
    return out


def _distances(t: Tape, body: ShiftedWindowsBody, length: int) -> tuple[Tensor, Tensor]:
    """A small network on each distance, and what it gives to each pair of positions."""
    name, heads = f"{body.module}.position_mlp", body.num_heads
    count = (2 * body.window - 1) ** 2
    places = t.buffer(2 * count, t.compute if t.autocast is None else DType.FP32)
    numbers = t.buffer(length**2, DType.INT64)
    raised = linear(t, places, f"{name}.0", 2, body.bias_width, bias=True)
    active = t.view(raised, raised.numel)
    t.record(OperationKind.RELU, (raised,), (active,), saves=(active,), gradients=(Gradient.FRESH,))
    table = linear(t, active, f"{name}.2", body.bias_width, heads)
    picked = t.tensor(length**2 * heads, table.dtype)
    t.record(
        OperationKind.INDEX, (table, numbers), (picked,), saves=(numbers,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    turned = t.contiguous(picked)
    shares = t.elementwise(OperationKind.SIGMOID, turned)
    t.touch(turned)
    return table, t.scale(shares)


def _merged(t: Tape, x: Tensor, body: MergedSquaresBody, flow: Flow) -> Tensor:
    """``Swinv2PatchMerging`` without its norm."""
    height, width = flow.grid
    flow.grid = -(-height // 2), -(-width // 2)
    positions = flow.items * flow.grid[0] * flow.grid[1]
    given = x
    if height % 2 or width % 2:
        given = t.tensor(4 * positions * body.size, x.dtype)
        t.record(OperationKind.PAD, (x,), (given,), gradients=(Gradient.FRESH,))
    quarters = [t.slice(t.slice(given, given.numel // 2), given.numel // 4) for _ in range(4)]
    joined = t.concatenate(*quarters)
    made = linear(t, joined, f"{body.module}.reduction", 4 * body.size, 2 * body.size)
    t.touch(given, x)
    return made
