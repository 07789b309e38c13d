"""Convolutions along the tokens, which are the last dimension."""

from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.strides import is_contiguous
from memplan.graph.operations.convolutions import convolve


class Conv1d(Module):
    """``torch.nn.Conv1d`` that gives as many tokens as it is given."""

    gives_rows = False
    """Its gradient comes token by token, and is copied."""

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
        """One kernel, whose gradients lie in rows."""
        batch, _, length = x.shape
        weight = self.parameter(self.weight)
        bias = self.parameter(self.weights["bias"]) if "bias" in self.weights else None
        made = convolve(
            x.run, x.record, weight, bias, batch * length, self.out_channels,
            reads_rows=not is_contiguous(x.shape, x.strides), gives_rows=self.gives_rows,
        )  # fmt: skip
        shape = batch, self.out_channels, length
        return x.leads_to(Handle(x.run, made, shape), in_rows(x.shape))
