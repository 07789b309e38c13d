"""Short causal convolutions over the tokens, as transformers 5.23 runs them without other packages.

``causal_conv1d_fn`` pads both ends by the kernel less one and cuts the end off again, so backward
makes the gradient of the longer tensor first.
"""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.functional import activated
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.strides import is_contiguous
from memplan.model.networks import Activation


class CausalConv1d(Conv1d):
    """A depthwise convolution that looks back."""

    def __init__(self, channels: int, kernel: int, *, bias: bool = False) -> None:
        super().__init__(channels, channels, kernel, groups=channels, bias=bias)
        self.kernel = kernel

    def forward(self, x: Handle, activation: Activation | None = None) -> Handle:
        """``causal_conv1d_fn``."""
        out = self.padded(x).narrow(x.shape[-1])
        if activation is not None:
            out = activated(out, activation)
        return out.to(x.dtype)

    def padded(self, x: Handle) -> Handle:
        """``F.conv1d(x.to(weight.dtype), ..., padding=kernel - 1)``: a result a little longer.

        What does not lie channel by channel the kernels copy, forward and backward.
        """
        run = x.run
        weight = self.parameter(self.weight)
        weight.viewed = True  # squeezed, and made whole again
        given = x = x.to(weight.dtype)
        inputs: list[Tensor] = [run.cast_weight(weight)]
        if "bias" in self.weights:
            inputs.append(run.cast_weight(self.parameter(self.weights["bias"])))
        if run.autocast is not None:
            x = x.to(run.autocast)
        inputs.insert(1, x.record)  # the kernel makes the weight's gradient first
        batch, channels, length = x.shape
        made = empty(run, (batch, channels, length + self.kernel - 1), x.dtype)
        copy = allocated_bytes(x.numel, x.dtype)
        copied = not run.decomposed and not is_contiguous(x.shape, x.strides)
        again = (copy, *(RESULT,) * sum(each.requires_grad for each in inputs))
        run.record(
            OperationKind.CONVOLUTION, inputs, (made.record,), saves=inputs[:2],
            gradients=(Gradient.FRESH,) * len(inputs), flops=2 * made.numel * self.kernel,
            forward_scratch_bytes=(copy, RESULT) if copied else (),
            backward_scratch_bytes=again if copied else (),
        )  # fmt: skip
        del given  # a call's arguments live until it returns, whatever autocast makes of them
        return x.leads_to(made, in_rows(x.shape))
