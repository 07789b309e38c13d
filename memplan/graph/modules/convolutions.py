"""Convolutions along the tokens, which are the last dimension."""

from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layouts import always
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.strides import dense_strides
from memplan.graph.operations.convolutions import convolve


class Conv1d(Module):
    """``torch.nn.Conv1d`` that gives as many tokens as it is given, and lies as what it is given.

    Kernels take the weight and the gradient so (ATen/native/cudnn/ConvShared.cpp,
    ``cudnn_conv_suggest_memory_format``); a weight that spans one token lies either way.
    """

    gives_rows = False
    """Its gradient does not come as what it is given lies, and is copied."""

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
            gives_rows=self.gives_rows,
        )  # fmt: skip
        shape = batch, self.out_channels, length
        lies = always(dense_strides(x.shape, x.strides))
        return x.leads_to(Handle(x.run, made, shape, dense_strides(shape, x.strides)), lies)
