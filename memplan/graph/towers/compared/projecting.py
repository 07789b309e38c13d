"""Parts of projectors: what makes a language model's tokens of a tower's."""

from math import isqrt

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import softmax
from memplan.graph.operations.norms import norm
from memplan.graph.towers.state import Flow
from memplan.model.norms import NormKind, NormSpec
from memplan.model.towers.compared.projecting import (
    CropBody,
    HalvedBody,
    JoinedPatchesBody,
    PackedCropsBody,
    PooledProjectionBody,
    ProjectingBody,
    VisualWordsBody,
)


def crop(t: Tape, x: Tensor, body: CropBody, flow: Flow) -> Tensor:
    """All tokens but the first; of several pictures a copy."""
    rest = t.slice(x, x.numel - flow.items * body.size)
    return rest if flow.items == 1 or body.last else t.contiguous(rest)


def joined_patches(t: Tape, x: Tensor, body: JoinedPatchesBody) -> Tensor:
    """``pixel_shuffle``: views that are copied where the next one asks for rows."""
    for _ in range(body.copies):
        x = t.contiguous(x)
    return x


def halved(t: Tape, x: Tensor, body: HalvedBody) -> Tensor:
    """``act(gate) * x`` of two halves of one tensor."""
    first, gate = t.split(x, x.numel // 2, x.numel // 2)
    return t.mul(activation(t, gate, body.activation), first)


def packed_crops(t: Tape, x: Tensor, body: PackedCropsBody, flow: Flow) -> Tensor:
    """``pack_image_features``: crops laid side by side, ends of rows, the whole picture before them."""
    pictures = flow.items // body.crops
    whole = x.numel // body.crops
    first, rest = t.split(x, whole, x.numel - whole)
    grid = t.contiguous(rest)
    crops = body.crops - 1
    # Two lie side by side, four two by two.
    side = isqrt(grid.numel // body.size // pictures // crops) * isqrt(crops)
    vector = t.parameter(body.newline)
    ends = Tensor(pictures * side * body.size, vector.dtype, vector.storage)
    t.record(OperationKind.EXPAND, (vector,), (ends,), gradients=(Gradient.FRESH,))
    ends = t.cast(ends, grid.dtype)
    return t.concatenate(first, t.concatenate(grid, ends))


def pooled_projection(t: Tape, x: Tensor, body: PooledProjectionBody, flow: Flow) -> Tensor:
    """``Gemma3MultiModalProjector``: turned, averaged in squares, normed, multiplied."""
    dtype = x.dtype
    turned = t.contiguous(x)
    averaged = t.tensor(flow.items * body.tokens * body.size, x.dtype)
    t.record(
        OperationKind.MEAN, (turned,), (averaged,), saves=(turned,), gradients=(Gradient.FRESH,)
    )
    t.touch(turned, x)
    normed = norm(t, averaged, NormSpec(kind=NormKind.RMS_GEMMA), body.norm, body.size)
    out = times_weight(t, normed, t.parameter(body.weight), body.size, body.outputs)
    t.touch(normed)
    return t.cast(out, dtype)


def times_weight(t: Tape, x: Tensor, weight: Parameter, inputs: int, outputs: int) -> Tensor:
    """``torch.matmul(x, weight)`` with a weight of ``(inputs, outputs)``."""
    factor, given = t.cast_weight(weight), x
    if t.autocast is not None:
        given = t.cast(x, t.autocast)
    rows = x.numel // inputs
    out = t.tensor(rows * outputs, given.dtype)
    t.record(
        OperationKind.MATMUL, (given, factor), (out,), saves=(given, factor),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * rows * inputs * outputs,
    )  # fmt: skip
    return out


def visual_words(t: Tape, x: Tensor, body: VisualWordsBody) -> Tensor:
    """``Ovis2Model.get_image_features``: shares, zeros for what is never scored, a product."""
    shares = softmax(t, x)
    rows = shares.numel // (body.rows - body.spare)
    zeros = t.tensor(rows * body.spare, shares.dtype)
    t.record(OperationKind.ZEROS, (), (zeros,))
    weighed = t.concatenate(shares, zeros)
    return times_weight(t, weighed, t.parameter(f"{body.table}.weight"), body.rows, body.size)


def write_projecting(t: Tape, x: Tensor, body: ProjectingBody, flow: Flow) -> Tensor:
    """The operations of any body of ``memplan.model.towers.compared.projecting``."""
    match body:
        case CropBody():
            return crop(t, x, body, flow)
        case JoinedPatchesBody():
            return joined_patches(t, x, body)
        case HalvedBody():
            return halved(t, x, body)
        case PackedCropsBody():
            return packed_crops(t, x, body, flow)
        case PooledProjectionBody():
            return pooled_projection(t, x, body, flow)
        case VisualWordsBody():
            return visual_words(t, x, body)
