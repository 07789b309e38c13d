"""Parts of convolutional networks, as torch runs them.

cuDNN's workspaces are left out: which algorithm it takes, and what that asks for, only the library
itself knows, on the card.
"""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import dropout
from memplan.graph.towers.images import picture_size
from memplan.graph.towers.state import Flow, sensed
from memplan.model.towers.body import (
    BranchBody,
    CallBody,
    ResidualBody,
    TowerBody,
)
from memplan.model.towers.gridded.nets import (
    ConvolutionBody,
    NetBody,
    PixelsBody,
)

Write = Callable[[Tensor, TowerBody], Tensor]
"""Writes any body's operations."""


def pixels(t: Tape, body: PixelsBody, flow: Flow) -> Tensor:
    """What the batch brings, in 16 bits where the model is."""
    flow.grid = flow.picture = picture_size(t.options.image_size, body)
    height, width = flow.grid
    flow.pixels = sensed(t, flow.items * body.channels * height * width)
    return flow.pixels


def write_net(t: Tape, x: Tensor, body: NetBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case ConvolutionBody():
            return _convolved(t, x, body, flow)
        case PixelsBody():
            return pixels(t, body, flow)


def write_branches(t: Tape, x: Tensor, body: BranchBody, write: Write) -> Tensor:
    """The operations of branches, and of what joins them."""
    match body:
        case CallBody():
            return _called(t, x, body, write)
        case ResidualBody():
            return _residual(t, x, body, write)


def _called(t: Tape, x: Tensor, body: CallBody, write: Write) -> Tensor:
    """Parts of a module, with names in its frame."""
    lingering = t.segment.lingering
    outer = len(lingering)
    made = x
    for part in body.parts:
        made = write(made, part)
    t.touch(*lingering[outer:], x)
    del lingering[outer:]
    return made


def resized(t: Tape, x: Tensor, numel: int) -> Tensor:
    """``interpolate``, which autocast runs in fp32: nothing is kept."""
    read = x if t.autocast is None else t.cast(x, DType.FP32)
    out = t.tensor(numel, read.dtype)
    t.record(OperationKind.UPSAMPLE, (read,), (out,), gradients=(Gradient.FRESH,))
    t.touch(x)
    return out


def _fewer(flow: Flow, kernel: int, stride: int, padding: int) -> None:
    """Positions behind windows of a size, so far from one another.

    Raises ``SetupError`` where a picture is too small for them.
    """
    height, width = ((side + padding - kernel) // stride + 1 for side in flow.grid)
    if min(height, width) < 1:
        msg = f"image_size: pictures are too small for this model, whose windows of {kernel} pixels find none"
        raise SetupError(msg)
    flow.grid = height, width


def _convolved(t: Tape, x: Tensor, body: ConvolutionBody, flow: Flow) -> Tensor:
    _fewer(flow, body.kernel, body.stride, body.padding)
    positions = flow.items * flow.grid[0] * flow.grid[1]
    return convolution(t, x, body.module, positions, bias=body.bias)


def batch_norm(t: Tape, x: Tensor, module: str, channels: int) -> Tensor:
    """``torch.nn.BatchNorm2d``: autocast leaves it its input's dtype; statistics are fp32."""
    weights = t.parameter(f"{module}.weight"), t.parameter(f"{module}.bias")
    for dtype in (t.compute if t.autocast is None else DType.FP32,) * 2:
        t.hold_buffer(allocated_bytes(channels, dtype), module=module)
    t.hold_buffer(allocated_bytes(1, DType.INT64), module=module)
    out = t.tensor(x.numel, x.dtype)
    statistics = [t.tensor(channels, DType.FP32) for _ in range(2)]
    t.record(
        OperationKind.BATCH_NORM, (x, *weights), (out, *statistics), saves=(x, *statistics, weights[0]),
        gradients=(Gradient.FRESH,) * 3,
    )  # fmt: skip
    t.touch(x)
    return out


def _residual(t: Tape, x: Tensor, body: ResidualBody, write: Write) -> Tensor:
    added = x
    for part in body.branch:
        added = write(added, part)
    out = t.add(dropout(t, added, body.dropout), x)
    t.touch(x)
    return out


def drop_path(t: Tape, x: Tensor, items: int) -> Tensor:
    """What is left is divided by its share, and multiplied by one number for each sample."""
    factors = t.tensor(items, x.dtype)
    t.record(OperationKind.UNIFORM_IN_PLACE, (), (factors,))
    out = t.mul(t.scale(x, OperationKind.DIV), factors)
    t.touch(x)
    return out
