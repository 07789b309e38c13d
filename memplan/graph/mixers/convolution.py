"""Short causal convolutions over the tokens, as transformers 5.23 runs them without other packages.

``causal_conv1d_fn`` pads both ends by the kernel less one and cuts the end off again, so backward
makes the gradient of the longer tensor first.
"""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.mixers import ShortConvolutionSpec


def causal_convolution(
    t: Tape, x: Tensor, name: str, channels: int, kernel: int, *, batch: int, bias: bool = False
) -> Tensor:
    """A depthwise convolution that looks back; returns a view of a tensor a little longer.

    The weight is autocast's like a linear layer's; a 16-bit input is widened to its dtype first. The input
    lies token by token: the kernels copy it, forward and backward.
    """
    weight = t.parameter(f"{name}.weight", channels, 1, kernel)
    bias_weight = t.parameter(f"{name}.bias", channels) if bias else None
    given = t.cast(x, weight.dtype)
    factor = t.cast_weight(weight)
    addend = t.cast_weight(bias_weight) if bias_weight is not None else None
    read = given if t.autocast is None else t.cast(given, t.autocast)
    longer = x.numel + batch * channels * (kernel - 1)
    out = t.tensor(longer, read.dtype)
    inputs: tuple[Tensor, ...] = (read, factor)
    if addend is not None:
        inputs += (addend,)
    copy = allocated_bytes(read.numel, read.dtype)
    again = (copy, *(RESULT,) * sum(each.requires_grad for each in inputs))
    t.record(
        OperationKind.CONVOLUTION, inputs, (out,), saves=(read, factor),
        gradients=(Gradient.FRESH,) * len(inputs), flops=2 * longer * kernel,
        forward_scratch_bytes=() if t.decomposed else (copy, RESULT),
        backward_scratch_bytes=() if t.decomposed else again,
    )  # fmt: skip
    t.touch(given)
    return t.slice(out, x.numel)


def turned(t: Tape, x: Tensor, batch: int) -> Tensor:
    """A view with the channels before the tokens.

    The gradient of more than one sequence is copied back into rows.
    """
    if batch == 1:
        return x
    out = t.view(x, x.numel)
    t.record(OperationKind.TRANSPOSE, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def short_convolution(
    t: Tape, x: Tensor, spec: ShortConvolutionSpec, context: StackContext
) -> Tensor:
    """LFM2's: a product, a convolution and another product, between two linear layers."""
    hidden = context.hidden_size
    both = linear(t, x, "conv.in_proj", hidden, 3 * hidden, bias=spec.bias)
    size = x.numel
    before, after, states = t.split(turned(t, both, context.batch), size, size, size)
    product = t.mul(before, states)
    mixed = causal_convolution(
        t, product, "conv.conv", hidden, spec.kernel_size, batch=context.batch, bias=spec.bias
    )
    out = t.mul(after, mixed)
    out = linear(t, out, "conv.out_proj", hidden, hidden, bias=spec.bias)
    t.touch(x, both, mixed)
    return out
