"""FNet's mixing: the real part of a Fourier transform over tokens and channels (``torch.fft.fftn``)."""

from memplan.dtypes import DType
from memplan.errors import UnsupportedOperationError
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.mixers import FourierSpec


def fourier_transform(
    t: Tape,
    x: Tensor,
    spec: FourierSpec,  # noqa: ARG001  (as all that mix tokens)
    context: StackContext,  # noqa: ARG001
) -> Tensor:
    """A copy in complex numbers, two fp32 each, its transform, of which the real part is a view.

    Raises ``UnsupportedOperationError`` for 16-bit hidden states, which cuFFT does not know.
    """
    if x.dtype is not DType.FP32:
        msg = (
            "torch.fft knows no 16-bit numbers on GPUs: FNet trains in fp32 without autocast; choose "
            "`precision=fp32`"
        )
        raise UnsupportedOperationError(msg)
    complex_states, out = t.tensor(2 * x.numel, DType.FP32), t.tensor(2 * x.numel, DType.FP32)
    # The gradient's real part is a view again, so that nothing is made for it.
    t.record(OperationKind.TO, (x,), (complex_states,), gradients=(Gradient.ALIAS,))
    t.record(OperationKind.FFT, (complex_states,), (out,), gradients=(Gradient.FRESH,))
    real = t.view(out, x.numel)
    t.record(OperationKind.VIEW, (out,), (real,), gradients=(Gradient.FRESH,))
    return real
