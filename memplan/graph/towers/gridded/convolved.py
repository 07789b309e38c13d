"""Layers of convolutions over pictures (``ConvNextLayer``, ``ConvNextStage``)."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.state import Flow
from memplan.model.towers.gridded.convolved import (
    ConvolvedBody,
    ConvolvedLayerBody,
    DownsamplingBody,
)


def convolved_layer(t: Tape, x: Tensor, body: ConvolvedLayerBody, flow: Flow) -> Tensor:
    """Each channel with its neighbours, then each position's channels with one another."""
    size, inner = body.size, body.inner_size
    out = convolution(t, x, "dwconv", x.numel // size)
    out = layer_norm(t, out, "layernorm", size)
    out = linear(t, out, "pwconv1", size, inner, bias=True)
    out = activation(t, out, body.activation)
    if body.response_norm:
        out = _response_norm(t, out, body.response_norm, flow.items * inner)
    out = linear(t, out, "pwconv2", inner, size, bias=True)
    if body.scale:
        out = t.mul(t.parameter(body.scale), out)
    if body.drop_path:
        factors = t.tensor(flow.items, out.dtype)
        t.record(OperationKind.UNIFORM_IN_PLACE, (), (factors,))
        out = t.mul(t.scale(out, OperationKind.DIV), factors)
    return t.add(x, out)


def _response_norm(t: Tape, x: Tensor, module: str, numel: int) -> Tensor:
    """``ConvNextV2GRN``: from the norm on in fp32 under autocast."""
    dtype = x.dtype if t.autocast is None else DType.FP32
    norms, shares = t.tensor(numel, dtype), t.tensor(numel, dtype)
    quotient, zeros = allocated_bytes(x.numel, dtype), allocated_bytes(numel, DType.BOOL)
    t.record(
        OperationKind.VECTOR_NORM, (x,), (norms,), saves=(x, norms), gradients=(Gradient.FRESH,),
        # The quotient and where the norm is 0 (torch 2.13, ``linalg_vector_norm_backward``).
        backward_scratch_bytes=(quotient, zeros, RESULT),
    )  # fmt: skip
    weight, bias = t.parameter(f"{module}.weight"), t.parameter(f"{module}.bias")
    mean = t.shift(t.mean(norms, weight.numel))
    size = shares.storage.num_bytes
    t.record(
        OperationKind.DIV, (norms, mean), (shares,), saves=(norms, mean),
        gradients=(Gradient.FRESH, size), backward_scratch_bytes=(RESULT, size, size, RESULT),
    )  # fmt: skip
    scaled = t.mul(weight, t.mul(x, shares))
    out = t.add(t.add(scaled, bias), x)
    t.touch(x, norms, shares)
    return out


def downsampling(t: Tape, x: Tensor, body: DownsamplingBody, flow: Flow) -> Tensor:
    """Squares of positions become one each."""
    height, width = flow.grid
    flow.grid = height // body.side, width // body.side
    rows = flow.items * flow.grid[0] * flow.grid[1]
    return convolution(t, x, body.module, rows, channels_last=True)


def write_convolved(t: Tape, x: Tensor, body: ConvolvedBody, flow: Flow) -> Tensor:
    """The operations of any body of ``memplan.model.towers.gridded.convolved``."""
    match body:
        case ConvolvedLayerBody():
            return convolved_layer(t, x, body, flow)
        case DownsamplingBody():
            return downsampling(t, x, body, flow)
