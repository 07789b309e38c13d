"""Spectra as tokens, in towers of language models that hear (transformers 5.23)."""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.rotary import rotary_tables
from memplan.graph.towers.state import Flow, sensed
from memplan.model.towers.sounds import (
    FramesBody,
    HalvedFramesBody,
    SignalBody,
    SoundBody,
    TurningTablesBody,
)


def signal(t: Tape, x: Tensor | None, body: SignalBody, flow: Flow) -> Tensor:
    """A convolution of what the batch brings, or of what the one before gave."""
    if x is None:
        flow.items, flow.length = t.options.batch_size, body.length
        # Sound is not cast by the class: whoever trains in 16 bits brings it so.
        x = sensed(t, flow.items * body.channels * flow.length, casts=body.casts)
        x = t.cast(x, t.compute)
    flow.length = (flow.length + 2 * body.padding - body.kernel) // body.stride + 1
    out = convolution(t, x, body.module, flow.items * flow.length, gives_rows=body.last)
    out.by_channel = True
    active = activation(t, out, body.activation)
    t.touch(out)
    return active


def frames(t: Tape, x: Tensor, body: FramesBody, flow: Flow) -> Tensor:
    """Rows of a table that is not trained, added to every clip's.

    A name holds what the convolutions gave until the tower returns (transformers 5.23,
    ``WhisperEncoder.forward``, ``inputs_embeds``).
    """
    flow.share(t, x)
    x.by_channel = True
    out = t.add(x, t.parameter(f"{body.positions}.weight"))
    if body.cast_back:
        out = t.cast(out, x.dtype)
    return dropout(t, out, body.dropout)


def halved_frames(t: Tape, x: Tensor) -> Tensor:
    """``torch.nn.AvgPool1d`` of two: keeps what it averages."""
    out = t.tensor(x.numel // 2, x.dtype)
    t.record(OperationKind.MEAN, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,))
    return out


def write_sound(t: Tape, x: Tensor, body: SoundBody, flow: Flow) -> Tensor:
    """The operations of any body of ``memplan.model.towers.sounds`` that reads what was computed."""
    match body:
        case SignalBody():
            return signal(t, x, body, flow)
        case FramesBody():
            return frames(t, x, body, flow)
        case HalvedFramesBody():
            return halved_frames(t, x)
        case TurningTablesBody():
            flow.tables = rotary_tables(t, flow.length, body.dim, x.dtype)
            flow.shared += flow.tables
            return x
