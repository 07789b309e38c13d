"""What encoders of speech compute beside wav2vec 2.0's own parts."""

from memplan.graph.operations import activation, dropout, native_layer_norm
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.graph.towers.convolutions import convolution
from memplan.graph.towers.state import Flow
from memplan.model.towers.speech import SpeechBody, StackedPositionsBody


def write_speech(t: Tape, x: Tensor, body: SpeechBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    return _stacked_positions(t, x, body, flow)


def _stacked_positions(t: Tape, x: Tensor, body: StackedPositionsBody, flow: Flow) -> Tensor:
    """``Data2VecAudioPositionalConvEmbedding``: a layer norm without weights behind each convolution."""
    found = x
    padded = flow.length + 2 * (body.kernel // 2) - body.kernel + 1
    for module in body.modules:
        given = found
        out = convolution(t, given, module, flow.items * padded)
        if padded != flow.length:
            out = t.slice(out, flow.items * flow.length * body.size)
        out = native_layer_norm(t, out, body.size, ())
        found = activation(t, out, body.activation)
        t.touch(out, given)
    return dropout(t, t.add(x, found), body.dropout)
