"""Convolutions along the tokens, which are the last dimension."""

from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layouts import always
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.strides import is_contiguous, row_strides
from memplan.graph.operations.convolutions import convolve


class Conv1d(Module):
    """``torch.nn.Conv1d`` that gives as many tokens as it is given.

    What does not lie in rows is copied for the kernel, in backward once more; what it gives lies in rows, and so
    does the gradient of what it is given (torch 2.13, ATen/native/Convolution.cpp, ``_convolution``,
    ``convolution_backward``: "avoid accidentally going through NHWC for permuted 3d input").
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        self.out_channels = out_channels
        self.weight = Weight(out_channels, in_channels // groups, kernel)
        if bias:
            self.bias = Weight(out_channels)

    def forward(self, x: Handle) -> Handle:
        """One kernel."""
        batch, _, length = x.shape
        weight = self.parameter(self.weight)
        bias = self.parameter(self.weights["bias"]) if "bias" in self.weights else None
        made = convolve(
            x.run, x.record, weight, bias, batch * length, self.out_channels,
            reads_rows=not is_contiguous(x.shape, x.strides),
        )  # fmt: skip
        shape = batch, self.out_channels, length
        lies = always(row_strides(x.shape))
        return x.leads_to(Handle(x.run, made, shape, row_strides(shape)), lies)
