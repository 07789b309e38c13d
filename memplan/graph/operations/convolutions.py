"""Convolutions as torch runs them: the input and the weight are kept as the kernel took them."""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient, Operation
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes


def convolve(
    t: Tape,
    x: Tensor,
    weight: Tensor,
    bias: Parameter | None,
    positions: int,
    channels: int,
    *,
    reads_rows: bool = False,
    channels_last: bool = False,
    gives_last: bool = False,
) -> Tensor:
    """Whose result has so many ``positions`` over the batch; its weight may have been computed.

    What it ``reads_rows`` of lies otherwise than in rows, and is copied for the kernels, in backward once
    more, and no more of it than it reads (torch 2.13, ATen/native/Convolution.cpp, ``input.contiguous``).

    Where the input's channels come last (``channels_last``), the kernels take the weight so, forward and
    backward, and give its gradient so (ATen/native/cudnn/ConvShared.cpp, ``weight->contiguous``). What is given so
    (``gives_last``) has its bias's gradient summed over positions (ATen/native/Convolution.cpp, ``grad_output.sum``).
    """
    addend = t.cast_weight(bias) if bias is not None else None
    factor, given = weight, x
    if isinstance(weight, Parameter):
        factor = t.cast_weight(weight)
    if t.autocast is not None:
        factor, given = t.cast(factor, t.autocast), t.cast(x, t.autocast)
    out = t.tensor(positions * channels, given.dtype)
    inputs: tuple[Tensor, ...] = (given, factor)
    if addend is not None:
        inputs += (addend,)
    copied: tuple[int, ...] = ()
    if reads_rows and not t.decomposed:
        copied = (allocated_bytes(given.numel, given.dtype),)
    again = copied
    gradients = [Gradient.FRESH] * len(inputs)
    if addend is not None and gives_last and not t.decomposed:
        gradients[2] = Gradient.SUMMED
    turned: tuple[int, ...] = ()
    if channels_last and not t.decomposed:
        turned = (RESULT, factor.storage.num_bytes)
        again = (*turned, ~1, RESULT) if given.requires_grad else ()
        gradients[1] = Gradient.TURNED
    elif again:
        again = _beside_results(again, sum(each.requires_grad for each in (given, factor)))
    t.record(
        OperationKind.CONVOLUTION, inputs, (out,), saves=(given, factor), gradients=gradients,
        forward_scratch_bytes=(*copied, RESULT) if copied else turned, backward_scratch_bytes=again,
        flops=2 * positions * weight.numel,
    )  # fmt: skip
    t.touch(x)
    return out


def copy_gradient(operation: Operation) -> None:
    """What arrives lies otherwise than the kernels take it, and is copied for them; the bias's gradient is
    the sum of it as it came: of positions where its channels come last, else of rows."""
    inside = operation.backward_scratch or (RESULT,) * sum(
        each.requires_grad for each in operation.inputs[:2]
    )
    size = operation.outputs[0].storage.num_bytes
    operation.backward_scratch = size, *(each - (each < 0) for each in inside), ~0
    if len(operation.inputs) > 2:
        *others, of_bias = operation.gradients
        came = Gradient.FRESH if of_bias is Gradient.SUMMED else Gradient.SUMMED
        operation.gradients = (*others, came)


def copy_gradient_first(convolution: Operation) -> None:
    """Note that what arrives in backward is no row, and is copied; the bias's gradient is the sum of it as it came."""
    given, factor, *addend = convolution.inputs
    copied = [each for each in convolution.backward_scratch[:1] if each > 0]
    copied.append(convolution.outputs[0].storage.num_bytes)
    results = sum(each.requires_grad for each in (given, factor))
    convolution.backward_scratch = _beside_results(tuple(copied), results)
    if addend and convolution.gradients:
        convolution.gradients = (*convolution.gradients[:-1], Gradient.SUMMED)


def _beside_results(copies: tuple[int, ...], num_results: int) -> tuple[int, ...]:
    """Copies that are there until the results are, the last one freed first."""
    gone = (~number for number in reversed(range(len(copies))))
    return (*copies, *(RESULT,) * num_results, *gone)
