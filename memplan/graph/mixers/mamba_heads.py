"""Mamba's first mixer in heads: what they scan is projected and scanned for each head by itself.

(transformers 5.23, ``ZambaMambaMixer``)
"""

from dataclasses import replace

from memplan.dtypes import DType
from memplan.graph.mixers.convolution import causal_convolution
from memplan.graph.mixers.mamba import Scanned, in_rows, selective_scan
from memplan.graph.mixers.rates import decay_rate
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation
from memplan.graph.operations.products import linear
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor
from memplan.model.mixers import MambaHeadsSpec
from memplan.model.parameters import WeightRole
from memplan.training.kernels import ScanKernel


def mamba_heads(t: Tape, x: Tensor, spec: MambaHeadsSpec, context: StackContext) -> Tensor:
    """Projection, short convolution, parameters and scan of each head, the output projection."""
    head, inner, hidden = spec.head, spec.inner, context.hidden_size
    projected = linear(t, x, "mamba.in_proj", hidden, 2 * inner, bias=head.bias)
    mixed, gate = t.split(projected, projected.numel // 2, projected.numel // 2)
    given = t.contiguous(mixed)
    if t.kernels.scan is ScanKernel.PACKAGE:
        from memplan.graph.mixers.scan_kernels import convolved_in_kernel  # only where installed

        states = convolved_in_kernel(t, given, replace(head, inner=inner))
    else:
        convolved = causal_convolution(
            t, given, "mamba.conv1d", inner, head.kernel, batch=context.batch,
            bias=head.convolution_bias,
        )  # fmt: skip
        states = t.cast(activation(t, convolved, head.activation), given.dtype)
        t.touch(given)
    width = head.rank + 2 * head.state
    weight = t.parameter("mamba.x_proj_weight", spec.num_heads, width, head.inner)
    narrow = _by_heads(t, weight, states, spec, context)
    tokens = context.batch * context.seq_len * spec.num_heads
    parts = t.split(narrow, tokens * head.rank, tokens * head.state, tokens * head.state)
    weight = t.parameter("mamba.dt_proj_weight", spec.num_heads, head.inner, head.rank)
    step = _by_heads(t, weight, parts[0], spec, context, in_place=True)
    bias = t.parameter("mamba.dt_proj_bias", spec.num_heads, head.inner, role=WeightRole.OTHER)
    addend = t.cast(bias, DType.FP32)
    # Made of fp32 numbers, which neither class nor checkpoint ever casts.
    rate = decay_rate(t, spec.num_heads, head.inner, head.state, dtype=DType.FP32)
    skip = t.parameter("mamba.D", spec.num_heads, head.inner)

    def of_head(whole: Tensor) -> Tensor:
        return t.slice(whole, whole.numel // spec.num_heads)

    scanned = []
    for _ in range(spec.num_heads):
        own, ahead, fading, keys, queries = map(of_head, (states, step, rate, *parts[1:]))
        through = t.cast(of_head(skip), DType.FP32)
        read = Scanned(own, ahead, fading, keys, queries, through, of_head(gate), of_head(addend))
        scanned.append(selective_scan(t, read, head, context, in_rows=True))
    joined = t.concatenate(*scanned)
    turned = t.cast(joined, x.dtype)
    rows = in_rows(t, turned, context.batch)
    out = linear(t, rows, "mamba.out_proj", inner, hidden, bias=head.bias)
    t.touch(projected, states, narrow, step, addend, rate, *scanned, joined, x)
    return out


def _by_heads(
    t: Tape,
    weight: Parameter,
    x: Tensor,
    spec: MambaHeadsSpec,
    context: StackContext,
    *,
    in_place: bool = False,
) -> Tensor:
    """A product of each head's weight with its states, of every sequence.

    Of more than one sequence the weights are written out for each, and so are the states unless they lie
    there as the product wants them.
    """
    rows, columns = weight.shape[1:]
    factor: Tensor = weight
    if t.autocast is not None:
        factor, x = t.cast(weight, t.autocast), t.cast(x, t.autocast)
    if context.batch > 1:
        whole = t.tensor(weight.numel * context.batch, factor.dtype)
        t.record(OperationKind.EXPAND, (factor,), (whole,), gradients=(Gradient.FRESH,))
        factor = whole
        x = x if in_place else t.contiguous(x)
    tokens = context.batch * context.seq_len * spec.num_heads
    out = t.tensor(tokens * rows, x.dtype)
    t.record(
        OperationKind.MATMUL, (factor, x), (out,), saves=(x, factor),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * tokens * rows * columns,
    )  # fmt: skip
    return out
