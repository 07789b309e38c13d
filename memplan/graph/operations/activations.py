"""Activations, each as its class writes it down."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.operators import JITTED
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.model.networks import Activation
from memplan.training.choices_of_kernels.kernels import FeedForwardKernel


def activation_module(t: Tape, x: Tensor, kind: Activation, name: str) -> Tensor:
    """A nonlinearity that is a module of its own, as transformers' ``ACT2FN`` makes them."""
    t.enter(name)
    out = activation(t, x, kind)
    t.leave(name)
    return out


def activation(t: Tape, x: Tensor, kind: Activation) -> Tensor:
    """A nonlinearity, in the steps its implementation takes."""
    if t.kernels.fused_elementwise:
        return t.elementwise(OperationKind(kind.value), x, function=JITTED)
    if kind is Activation.SILU:
        return t.elementwise(OperationKind.SILU, x)
    if kind is Activation.RELU:
        return t.elementwise(OperationKind.RELU, x)
    if kind in {Activation.GELU, Activation.GELU_TANH}:
        return t.elementwise(OperationKind.GELU, x)
    if kind is Activation.HARDSWISH:
        return t.elementwise(OperationKind.HARDSWISH, x)
    if kind is Activation.TANH:
        return t.elementwise(OperationKind.TANH, x)
    if kind is Activation.GELU_PYTHON:
        return gelu_python(t, x)
    if kind is Activation.GELU_NEW:
        return gelu_new(t, x)
    if kind is Activation.GELU_FAST:
        return gelu_fast(t, x)
    if kind is Activation.QUICK_GELU:
        return t.mul(x, t.elementwise(OperationKind.SIGMOID, t.scale(x)))
    if kind is Activation.RELU_SQUARED and t.kernels.feed_forward is FeedForwardKernel.FUSED:
        # liger_kernel 0.8.5, ops/relu_squared.py
        return t.elementwise(OperationKind.RELU2, x)
    if kind is Activation.RELU_SQUARED:
        rectified = t.elementwise(OperationKind.RELU, x)
        out = t.square(rectified if t.autocast is None else t.cast(rectified, DType.FP32))
        t.touch(rectified)
        return out
    return bloom_gelu(t, x)


def gelu_python(t: Tape, x: Tensor) -> Tensor:
    """The exact GELU written out: a half of x, times one plus an error function.

    The error function's derivative is an expression of four intermediate tensors, made before its
    result (tools/autograd/derivatives.yaml, ``erf``).
    """
    half, inner = t.scale(x), t.scale(x)
    curve = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.ERF, (inner,), (curve,), saves=(inner,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(*(curve.storage.num_bytes,) * 4, RESULT),
    )  # fmt: skip
    return t.mul(half, t.shift(curve))


def gelu_new(t: Tape, x: Tensor) -> Tensor:
    """GPT-2's tanh GELU: eight elementwise operations, of which four keep something."""
    half = t.scale(x)
    cube = t.square(x if t.autocast is None else t.cast(x, DType.FP32))
    inner = t.scale(t.add(x, t.scale(cube)))
    curve = t.shift(t.elementwise(OperationKind.TANH, inner))
    out = t.mul(half, curve)
    t.touch(x)
    return out


def gelu_fast(t: Tape, x: Tensor) -> Tensor:
    """The tanh GELU written with products only."""
    half = t.scale(x)
    inner = t.mul(t.scale(x), t.shift(t.mul(t.scale(x), x)))
    curve = t.shift(t.elementwise(OperationKind.TANH, inner))
    return t.mul(half, curve)


def bloom_gelu(t: Tape, x: Tensor) -> Tensor:
    """BLOOM's autograd function: keeps its input only.

    Its formulas are written out in Python: each product and sum is a tensor that goes when the next
    one has read it (``bloom_gelu_forward``, ``bloom_gelu_back``).
    """
    out = t.tensor(x.numel, x.dtype)
    size = out.storage.num_bytes
    # 0.5 x · (1 + tanh(0.797 x · (1 + 0.0447 x x))): half, scaled, a cube in three steps, the tanh.
    curve = (size, size, size, ~1, size, ~2, size, ~0, ~4, size, ~6)
    forward = (size, *_later(curve, 1), size, ~10, RESULT, ~0)
    # The derivative: half of x · ((1 - tanh²)(0.797 + 0.107 x x)) + half of (1 + tanh).
    backward = (
        *curve, size, size, size, ~12, size, size, ~15, size, ~16, size, ~13, ~18, size, ~11, ~20,
        size, size, ~26, size, ~23, ~27, RESULT, ~9,
    )  # fmt: skip
    t.record(
        OperationKind.BLOOM_GELU, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=forward, backward_scratch_bytes=backward,
    )  # fmt: skip
    return out


def _later(scratch: tuple[int, ...], steps: int) -> tuple[int, ...]:
    """The same temporaries behind others."""
    return tuple(step if step >= 0 else step - steps for step in scratch)
