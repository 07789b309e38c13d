"""Mamba's first mixer, token by token, as transformers 5.23 trains it without other packages.

``mamba_selective_scan`` makes a state of every channel for each token in a Python loop, and three
tensors of channels x tokens x states before it; nearly all is kept for backward, in fp32. Mamba,
Falcon-Mamba and Jamba share the function.
"""

from typing import NamedTuple

from memplan.dtypes import DType
from memplan.graph.mixers.convolution import causal_convolution
from memplan.graph.mixers.iteration import Turns
from memplan.graph.mixers.rates import decay_rate
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import base_product, linear
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.mixers import MambaSpec
from memplan.model.networks import Activation
from memplan.model.parameters import WeightRole
from memplan.training.kernels import ScanKernel


def mamba_mixer(t: Tape, x: Tensor, spec: MambaSpec, context: StackContext) -> Tensor:
    """Projection, short convolution, parameters of the scan, the scan, the output projection."""
    if t.kernels.scan is ScanKernel.PACKAGE and spec.is_one_function:
        from memplan.graph.mixers.scan_kernels import mamba_in_kernels  # only where installed

        return mamba_in_kernels(t, x, spec, context)
    inner, hidden, batch = spec.inner, context.hidden_size, context.batch
    projected = linear(t, x, "mamba.in_proj", hidden, 2 * inner, bias=spec.bias)
    rate = decay_rate(t, inner, spec.state)
    half = projected.numel // 2
    mixed, gate = t.split(projected, half, half)
    if t.kernels.scan is ScanKernel.PACKAGE:
        from memplan.graph.mixers.scan_kernels import convolved_in_kernel  # only where installed

        states = convolved_in_kernel(t, mixed, spec)
    else:
        convolved = causal_convolution(
            t, mixed, "mamba.conv1d", inner, spec.kernel, batch=batch, bias=spec.convolution_bias
        )
        states = t.cast(activation(t, convolved, spec.activation), mixed.dtype)
    step, keys, queries = _scan_parameters(t, states, spec, context)
    given = t.cast(t.parameter("mamba.dt_proj.bias", inner, role=WeightRole.OTHER), DType.FP32)
    skip = t.cast(t.parameter("mamba.D", inner), DType.FP32)
    scanned = Scanned(states, step, rate, keys, queries, skip, gate, given)
    out = selective_scan(t, scanned, spec, context)
    narrow = t.cast(out, x.dtype if t.autocast is None else t.autocast)
    rows = in_rows(t, narrow, batch)
    if rows is not narrow:
        t.touch(narrow)
    result = linear(t, rows, "mamba.out_proj", inner, hidden, bias=spec.bias)
    t.touch(projected, rate, states, step, out, x)
    return result


def in_rows(t: Tape, x: Tensor, batch: int) -> Tensor:
    """Channels before tokens, as a product takes them: of more than one sequence a copy."""
    return x if batch == 1 else t.contiguous(x)


def _scan_parameters(
    t: Tape, states: Tensor, spec: MambaSpec, context: StackContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Time steps of every channel, and what tokens write to and read from a state."""
    tokens = context.batch * context.seq_len
    flat = in_rows(t, states, context.batch)
    narrow = linear(t, flat, "mamba.x_proj", spec.inner, spec.rank + 2 * spec.state)
    sizes = (tokens * spec.rank, tokens * spec.state, tokens * spec.state)
    step, keys, queries = t.split(narrow, *sizes)
    if spec.norm is not None:
        for width in () if spec.norm.weight else (spec.inner, spec.state, spec.state):
            t.buffer(width, t.options.weights)
        step = norm(t, step, spec.norm, "mamba.dt_layernorm", spec.rank)
        keys = norm(t, keys, spec.norm, "mamba.b_layernorm", spec.state)
        queries = norm(t, queries, spec.norm, "mamba.c_layernorm", spec.state)
    weight = t.matrix("mamba.dt_proj.weight", spec.inner, spec.rank)
    wide = base_product(t, step, weight)
    turned = t.contiguous(wide)
    t.touch(wide, narrow)
    return turned, keys, queries


class Scanned(NamedTuple):
    """What a scan reads, in the order of ``selective_scan_fn``'s arguments."""

    states: Tensor
    step: Tensor
    rate: Tensor
    keys: Tensor
    queries: Tensor
    skip: Tensor
    gate: Tensor
    bias: Tensor


def selective_scan(
    t: Tape, given: Scanned, spec: MambaSpec, context: StackContext, *, in_rows: bool = False
) -> Tensor:
    """``mamba_selective_scan``; ``in_rows``: what is written and read lies state by state already."""
    if t.kernels.scan is ScanKernel.PACKAGE:
        from memplan.graph.mixers.scan_kernels import scanned_in_kernel  # only where installed

        return scanned_in_kernel(t, given, spec, context, in_rows=in_rows)
    states, keys, queries = given.states, given.keys, given.queries
    step = time_step(t, given.step, t.cast(given.bias, given.step.dtype))
    size = states.numel * spec.state
    decay = t.elementwise(OperationKind.EXP, outer(t, given.rate, step, size))
    written = outer(t, step, t.cast(keys, DType.FP32), size)
    entering = outer(t, written, t.cast(states, DType.FP32), size)
    out, reads = selective_loop(t, decay, entering, queries, states, context.seq_len)
    residual = t.mul(states, given.skip)
    summed = t.add(out, residual)
    t.touch(out)
    result = t.mul(summed, activation(t, given.gate, Activation.SILU))
    t.touch(entering, decay, written, step, given.skip, given.bias, keys, queries, *reads)
    return result


def time_step(t: Tape, step: Tensor, bias: Tensor) -> Tensor:
    """The softplus of a projected step and a bias for each channel."""
    shifted = t.tensor(step.numel, step.dtype)
    t.record(
        OperationKind.ADD, (step, bias), (shifted,), gradients=(Gradient.ALIAS, Gradient.FRESH)
    )
    t.touch(bias)
    full = shifted if t.autocast is None else t.cast(shifted, DType.FP32)
    out = t.elementwise(OperationKind.SOFTPLUS, full)
    t.touch(shifted)
    return out


def outer(t: Tape, left: Tensor, right: Tensor, numel: int) -> Tensor:
    """A product in which either factor, or both, are broadcast to ``numel`` elements."""
    out = t.tensor(numel, DType.FP32)
    saves = [right] if left.requires_grad else []
    if right.requires_grad:
        saves.append(left)
    whole = out.storage.num_bytes
    t.record(
        OperationKind.MUL, (left, right), (out,), saves=saves,
        gradients=tuple(
            Gradient.FRESH if each.numel == numel and each.dtype is DType.FP32 else whole
            for each in (left, right)
        ),
    )  # fmt: skip
    return out


def selective_loop(
    t: Tape, decay: Tensor, entering: Tensor, queries: Tensor, states: Tensor, tokens: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One state after another, each read by its token; all results stacked in the end.

    Returns those one by one too, which a list holds.
    """
    size, dtype = decay.numel // tokens, states.dtype
    state = t.tensor(size, dtype)
    t.record(OperationKind.ZEROS, (), (state,))
    turns = Turns(t, tokens)
    parts = []
    for turn in turns:
        kept = t.mul(t.slice(decay, size), state)
        following = t.add(kept, t.slice(entering, size))
        t.touch(kept, state)
        state = following
        narrow = t.cast(state, t.autocast or dtype)
        read = t.tensor(states.numel // tokens, narrow.dtype)
        token = t.slice(queries, queries.numel // tokens)
        t.record(
            OperationKind.MATMUL, (narrow, token), (read,), saves=(token, narrow),
            gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * size,
        )  # fmt: skip
        turns.collect(read, turn)
        parts.append(t.slice(read, read.numel))
    out = t.tensor(states.numel, parts[0].dtype)
    t.record(OperationKind.CAT, parts, (out,), gradients=(Gradient.ALIAS,) * len(parts))
    turns.close()
    return out, tuple(turns.collected)
