"""Two towers beside one another (``DeepseekVLHybridModel`` of transformers)."""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.products import linear
from memplan.graph.towers.gridded.nets import write_net
from memplan.graph.towers.gridded.segmenting import neck
from memplan.graph.towers.state import Flow
from memplan.model.networks import Activation
from memplan.model.towers.gridded.nets import ConvolutionBody
from memplan.model.towers.pairs import PairBody, SideBySideBody, TappedBody, TwoDepthsBody

HALVINGS = 2
"""Convolutions that halve a picture's sides."""


def write_pairs(t: Tape, x: Tensor, body: PairBody, flow: Flow, given: dict[str, Tensor]) -> Tensor:
    """The operations of any body of ``memplan.model.towers.pairs``."""
    match body:
        case TappedBody():
            t.hold(x)
            flow.tapped = x
            return x
        case TwoDepthsBody():
            return _two_depths(t, x, body, flow)
        case SideBySideBody():
            return _side_by_side(t, body, given)


def _two_depths(t: Tape, x: Tensor, body: TwoDepthsBody, flow: Flow) -> Tensor:
    """``get_high_res_image_features``."""
    assert flow.tapped is not None
    grid = flow.grid
    end = _halved(t, x, body, flow)
    flow.grid = grid
    middle = _halved(t, neck(t, flow.tapped, body.neck, body.size, body.channels), body, flow)
    out = t.add(end, t.mul(middle, t.parameter(body.share)))
    t.release(flow.tapped)
    return out


def _halved(t: Tape, x: Tensor, body: TwoDepthsBody, flow: Flow) -> Tensor:
    """``DeepseekVLSamVisionProj``: resized to what two halvings make the smaller tower's grid of."""
    side = body.side << HALVINGS
    resized = t.tensor(flow.items * side * side * body.channels, x.dtype)
    t.record(OperationKind.RESIZE, (x,), (resized,), gradients=(Gradient.FRESH,))
    flow.grid, out = (side, side), resized
    for number in range(1, HALVINGS + 1):
        layer = ConvolutionBody(
            module=f"{body.projection}.conv{number}", kernel=3, stride=2, padding=2
        )
        out = write_net(t, out, layer, flow)
    return out


def _side_by_side(t: Tape, body: SideBySideBody, given: dict[str, Tensor]) -> Tensor:
    """``DeepseekVLHybridAligner``."""
    half = body.outputs // 2
    parts = {
        module: linear(t, given[tower], f"{body.module}.{module}", width, half, bias=True)
        for tower, module, width in (body.second, body.first)
    }
    joined = t.concatenate(*(parts[module] for _, module, _ in (body.first, body.second)))
    t.touch(*parts.values())
    active = activation(t, joined, Activation.GELU)
    return linear(t, active, f"{body.module}.proj", body.outputs, body.outputs, bias=True)
