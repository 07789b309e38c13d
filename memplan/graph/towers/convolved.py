"""Layers of convolutions over pictures (``ConvNextLayer``, ``ConvNextStage``)."""

from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations import activation, layer_norm, linear
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.graph.towers.convolutions import convolution
from memplan.graph.towers.state import Flow
from memplan.model.towers.convolved import ConvolvedBody, ConvolvedLayerBody, DownsamplingBody


def convolved_layer(t: Tape, x: Tensor, body: ConvolvedLayerBody, flow: Flow) -> Tensor:
    """Each channel with its neighbours, then each position's channels with one another."""
    size, inner = body.size, body.inner_size
    out = convolution(t, x, "dwconv", x.numel // size)
    out = layer_norm(t, out, "layernorm", size)
    out = linear(t, out, "pwconv1", size, inner, bias=True)
    out = activation(t, out, body.activation)
    out = linear(t, out, "pwconv2", inner, size, bias=True)
    if body.scale:
        out = t.mul(t.parameter(body.scale), out)
    if body.drop_path:
        factors = t.tensor(flow.items, out.dtype)
        t.record(OperationKind.UNIFORM_IN_PLACE, (), (factors,))
        out = t.mul(t.scale(out, OperationKind.DIV), factors)
    return t.add(x, out)


def downsampling(t: Tape, x: Tensor, body: DownsamplingBody, flow: Flow) -> Tensor:
    """Squares of positions become one each."""
    height, width = flow.grid
    flow.grid = height // body.side, width // body.side
    return convolution(t, x, body.module, flow.items * flow.grid[0] * flow.grid[1])


def write_convolved(t: Tape, x: Tensor, body: ConvolvedBody, flow: Flow) -> Tensor:
    """The operations of any body of ``memplan.model.towers.convolved``."""
    match body:
        case ConvolvedLayerBody():
            return convolved_layer(t, x, body, flow)
        case DownsamplingBody():
            return downsampling(t, x, body, flow)
