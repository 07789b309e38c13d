"""Bias, activation, dropout and residual sum: each chain one kernel, or in the steps it stands for."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.megatron.context import MegatronContext
from memplan.graph.operations.elementwise import drop, dropout_probability
from memplan.model.networks import Activation


def bias_dropout_add(
    c: MegatronContext, x: Tensor, bias: Parameter | None, residual: Tensor, probability: float
) -> Tensor:
    """``residual + dropout(x + bias)`` (core/fusions/fused_bias_dropout.py).

    As one kernel it makes the sum and, where anything is dropped, a one-byte mask.
    """
    t = c.tape
    drops = dropout_probability(t, probability) > 0.0
    if not c.settings.bias_dropout_fusion or t.decomposed:
        given = shifted = x
        if bias is not None:
            shifted = t.tensor(given.numel, given.dtype)
            t.record(
                OperationKind.ADD,
                (given, bias),
                (shifted,),
                gradients=(Gradient.ALIAS, Gradient.SUMMED),
            )
        out = t.add(residual, drop(t, shifted) if drops else shifted)
        t.touch(shifted, given)
        return out
    out = t.tensor(residual.numel, residual.dtype)
    mask = (t.tensor(x.numel, DType.BOOL),) if drops else ()
    inputs: tuple[Tensor, ...] = (x, residual)
    gradients: tuple[int, ...] = (Gradient.FRESH if drops else Gradient.ALIAS, Gradient.ALIAS)
    if bias is not None:
        inputs, gradients = (*inputs, bias), (*gradients, Gradient.FRESH)
    t.record(
        OperationKind.BIAS_DROPOUT_ADD, inputs, (*mask, out), saves=mask, gradients=gradients,
        in_python=True,
    )  # fmt: skip
    return out


def activated(
    c: MegatronContext, x: Tensor, bias: Parameter | None, activation: Activation
) -> Tensor:
    """A plain network's activation of ``x + bias``.

    GELU keeps x in one kernel with its bias (core/fusions/fused_bias_gelu.py), without a bias torch's own runs. A squared ReLU is
    compiled for itself and keeps its input, to which a bias is added before (``squared_relu`` of core/activations.py, mlp.py).
    """
    t = c.tape
    kind = OperationKind.RELU2 if activation is Activation.RELU_SQUARED else OperationKind.GELU
    if bias is None:
        return t.elementwise(kind, x)
    if kind is not OperationKind.GELU or not c.settings.bias_gelu_fusion:
        shifted = t.tensor(x.numel, x.dtype)
        t.record(
            OperationKind.ADD, (x, bias), (shifted,), gradients=(Gradient.ALIAS, Gradient.SUMMED)
        )
        out = t.elementwise(kind, shifted)
        t.touch(x)
        return out
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.GELU, (x, bias), (out,), saves=(x, bias),
        gradients=(Gradient.FRESH, Gradient.SUMMED),
        forward_scratch_bytes=_steps(out, GELU_FORWARD) if t.decomposed else (),
        backward_scratch_bytes=_steps(out, GELU_BACKWARD) if t.decomposed else (),
        in_python=True,
    )  # fmt: skip
    return out


def swiglu(c: MegatronContext, x: Tensor) -> Tensor:
    """``silu(x1) * x2`` of the two halves of one tensor, which it keeps.

    (core/fusions/fused_bias_swiglu.py; unfused, core/transformer/mlp.py, ``glu``)
    """
    t = c.tape
    if not c.settings.bias_swiglu_fusion:
        gate, up = t.split(x, x.numel // 2, x.numel // 2)
        # ``silu(gate) * (up + glu_linear_offset)``
        out = t.mul(t.elementwise(OperationKind.SILU, gate), t.shift(up))
        t.touch(x)
        return out
    out = t.tensor(x.numel // 2, x.dtype)
    t.record(
        OperationKind.FUSED_GATE, (x,), (out,), saves=(x,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=(out.storage.num_bytes, RESULT) if t.decomposed else (),
        backward_scratch_bytes=_steps(out, SWIGLU_BACKWARD) if t.decomposed else (),
        in_python=True,
    )  # fmt: skip
    return out


MADE = 1
"""A temporary of the result's size, in the lists below."""
# x + bias; a half of it; scaled; a cube in three steps; the tanh's argument; the tanh; one plus it.
GELU_FORWARD = (
    MADE, MADE, MADE, MADE, MADE, ~3, MADE, ~4, MADE, ~2, ~6, MADE, ~8, MADE, ~11, RESULT, ~0,
)  # fmt: skip
_CURVE = (MADE, MADE, MADE, MADE, ~2, MADE, ~3, MADE, ~1, ~5, MADE, ~7)
"""x + bias (0), and the tanh (10)."""
GELU_BACKWARD = (
    *_CURVE, MADE, MADE, MADE, ~13, MADE, MADE, ~16, MADE, ~17, MADE, ~14, ~19, MADE, ~12, ~21,
    MADE, MADE, ~27, MADE, ~24, ~28, RESULT,
)  # fmt: skip
# sigmoid, times the gradient; one less it, times x1, plus one; the product, times x2; silu; its product.
SWIGLU_BACKWARD = (
    MADE, MADE, ~0, MADE, MADE, ~3, MADE, ~4, MADE, ~6, MADE, ~1, ~8, MADE, ~10, MADE, MADE, ~15,
    RESULT,
)  # fmt: skip


def _steps(out: Tensor, steps: tuple[int, ...]) -> tuple[int, ...]:
    """The same with the bytes of the result's size."""
    size = out.storage.num_bytes
    return tuple(size if step == MADE else step for step in steps)
