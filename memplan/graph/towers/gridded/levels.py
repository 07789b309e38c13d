"""Decoders that join a picture's sizes, as their classes write them out."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.gridded.nets import batch_norm, resized
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.networks import Activation
from memplan.model.towers.gridded.levels import (
    DepthBody,
    FusedLevelBody,
    LevelBody,
    LevelsBody,
    SegmentedBody,
    UpsampledBody,
)


def write_levels(t: Tape, x: Tensor, body: LevelsBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case LevelBody():
            t.hold(x)
            flow.levels.append((x, flow.grid))
            return x
        case UpsampledBody():
            return _twice(t, x, flow)
        case FusedLevelBody():
            return _fused(t, x, body, flow)
        case DepthBody():
            return _depth(t, x, flow)
        case SegmentedBody():
            return _segmented(t, x, body, flow)


def _twice(t: Tape, x: Tensor, flow: Flow) -> Tensor:
    flow.grid = 2 * flow.grid[0], 2 * flow.grid[1]
    return resized(t, x, 4 * x.numel)


def _fused(t: Tape, x: Tensor, body: FusedLevelBody, flow: Flow) -> Tensor:
    """``GLPNDecoderStage``: its result stays in a list until the decoder returns."""
    level, flow.grid = flow.levels.pop()
    flow.found.append(level)
    rows = flow.items * flow.grid[0] * flow.grid[1]
    given = level
    if body.size != body.width:
        given = convolution(t, level, "convolution", rows)
    out = given if body.first else _selected(t, given, x, body, rows)
    made = _twice(t, out, flow)
    if flow.levels:
        t.hold(made)
        flow.found.append(made)
    return made


def _selected(t: Tape, near: Tensor, far: Tensor, body: FusedLevelBody, rows: int) -> Tensor:
    """``GLPNSelectiveFeatureFusion``."""
    width, name = body.width, "fusion"
    read = t.concatenate(near, far)
    for number, channels in ((1, width), (2, width // 2)):
        read = convolution(t, read, f"{name}.convolution{number}", rows)
        read = batch_norm(t, read, f"{name}.norm{number}", channels)
        given = read
        read = activation(t, given, Activation.RELU)
        t.touch(given)
    scores = convolution(t, read, f"{name}.convolution3", rows)
    shares = t.elementwise(OperationKind.SIGMOID, scores)
    t.touch(read, scores)
    first = t.mul(near, t.slice(shares, rows))
    out = t.add(first, t.mul(far, t.slice(shares, rows)))
    t.touch(near, far, shares)
    return out


def _depth(t: Tape, x: Tensor, flow: Flow) -> Tensor:
    """``SiLogLoss``: pixels whose depth is known are picked by a mask; here all are."""
    pixels = x.numel
    shares = t.elementwise(OperationKind.SIGMOID, x)
    found = t.scale(shares)
    t.touch(x, shares)
    t.give_out(found)
    t.returned.append(found)
    labels = from_batch(t, pixels, DType.FP32 if t.autocast is not None else t.compute)
    known = t.tensor(pixels, DType.BOOL)
    t.record(OperationKind.GT, (labels,), (known,))
    numbers = 3 * allocated_bytes(pixels, DType.INT64)

    def logarithm(source: Tensor) -> Tensor:
        picked = t.tensor(pixels, source.dtype)
        t.record(
            OperationKind.INDEX, (source, known), (picked,), saves=(known,),
            gradients=(Gradient.FRESH, Gradient.NONE), forward_scratch_bytes=(numbers, RESULT),
            backward_scratch_bytes=(RESULT, numbers),
        )  # fmt: skip
        if t.autocast is not None:
            picked = t.cast(picked, DType.FP32)
        return t.elementwise(OperationKind.LOG, picked)

    target = logarithm(labels)
    predicted = logarithm(found)
    difference = t.tensor(pixels, predicted.dtype)
    t.record(
        OperationKind.SUB, (target, predicted), (difference,),
        gradients=(Gradient.NONE, Gradient.FRESH),
    )  # fmt: skip
    t.touch(target, predicted)
    squares = t.mean(t.square(difference), pixels)
    square = t.square(t.mean(difference, pixels))
    left = t.tensor(1, squares.dtype)
    t.record(
        OperationKind.SUB, (squares, t.scale(square)), (left,),
        gradients=(Gradient.ALIAS, Gradient.FRESH),
    )  # fmt: skip
    loss = t.elementwise(OperationKind.SQRT, left)
    t.touch(difference, known)
    for each in flow.found:
        t.release(each)
    return loss


def _segmented(t: Tape, x: Tensor, body: SegmentedBody, flow: Flow) -> Tensor:
    """Classes of each pixel: scores are made as large as the picture, and their cross-entropy."""
    pixels = flow.items * flow.picture[0] * flow.picture[1]
    t.give_out(x)
    t.returned.append(x)
    whole = resized(t, x, pixels * body.num_classes)
    return cross_entropy(t, whole, from_batch(t, pixels, DType.INT64))
