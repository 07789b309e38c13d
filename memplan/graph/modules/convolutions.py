"""Convolutions along the tokens, which are the last dimension."""

from functools import partial

from memplan.errors import SetupError
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layouts import Straightened, always
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.strides import is_contiguous, row_strides
from memplan.graph.operations.convolutions import convolve, copy_gradient_first


class Conv1d(Module):
    """``torch.nn.Conv1d``.

    What does not lie in rows is copied for the kernel, in backward once more, and so is a gradient that arrives
    otherwise; what it gives lies in rows, and so does the gradient of what it is given (torch 2.13,
    ATen/native/Convolution.cpp, ``_convolution``, ``convolution_backward``: "avoid accidentally going through NHWC
    for permuted 3d input").
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        self.out_channels = out_channels
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.add_weight(out_channels, in_channels // groups, kernel)
        if bias:
            self.bias = Weight(out_channels)

    def add_weight(self, *shape: int) -> None:
        """Declare the kernel's weight."""
        self.weight = Weight(*shape)

    def factor(self) -> Tensor:
        """What is multiplied by."""
        return self.parameter(self.weight)

    def forward(self, x: Handle) -> Handle:
        """One kernel."""
        return self.convolved(x, self.factor())

    def convolved(self, x: Handle, weight: Tensor) -> Handle:
        """With a weight that may have been computed."""
        run, batch, length = x.run, x.shape[0], self.fewer(x.shape[2])
        bias = self.parameter(self.weights["bias"]) if "bias" in self.weights else None
        made = convolve(
            run, x.record, weight, bias, batch * length, self.out_channels,
            reads_rows=not is_contiguous(x.shape, x.strides),
        )  # fmt: skip
        shape = batch, self.out_channels, length
        operation = run.segment.operations[-1]
        copies = None if run.decomposed else Straightened(partial(copy_gradient_first, operation))
        lies = always(row_strides(x.shape))
        return x.leads_to(Handle(run, made, shape, row_strides(shape)), lies, copies)

    def fewer(self, length: int) -> int:
        """Positions behind it.

        Raises ``SetupError`` where there are none.
        """
        found = (length + 2 * self.padding - self.kernel) // self.stride + 1
        if found < 1:
            msg = f"audio_seconds: clips are too short for this model, whose windows of {self.kernel} find none"
            raise SetupError(msg)
        return found
