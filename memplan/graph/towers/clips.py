"""Clips as tokens (``VideoMAEEmbeddings``)."""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.convolutions import convolution
from memplan.graph.towers.images import picture_size
from memplan.graph.towers.state import Flow, sensed
from memplan.model.towers.clips import ClipBody


def clip_patches(t: Tape, body: ClipBody, flow: Flow) -> Tensor:
    """Cubes of pixels as vectors; sinusoids are cast, and copied, at each step."""
    height, width = picture_size(t.options.image_size, body)
    pixels = flow.items * body.frames * body.channels * height * width
    x = sensed(t, pixels)
    patches = height // body.patch[0] * (width // body.patch[1]) * (body.frames // body.span)
    flow.patches = patches
    x = convolution(t, x, body.projection, flow.items * patches)
    cast, copied = (t.tensor(patches * body.size, x.dtype) for _ in range(2))
    t.record(OperationKind.TO, (), (cast,))
    t.record(OperationKind.TO, (cast,), (copied,))
    out = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.ADD, (x, copied), (out,), gradients=(Gradient.ALIAS, Gradient.NONE))
    t.touch(x)
    return out
