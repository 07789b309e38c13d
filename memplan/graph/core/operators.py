"""The table of operators: what each keeps for its backward pass, and what that takes on its way.

A row is a fact with its source. Functions of one tensor stand here; whatever records one, a model's class, a
writer of a spec or a traced module, goes by its row. A second rule for a kind is a second row with a name.

References
----------
.. [1] torch 2.13, tools/autograd/derivatives.yaml: a formula that reads ``result`` keeps the result, one that
   reads ``self`` the argument; each step of a formula is a tensor.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind


class Kept(Enum):
    """What a function keeps for its backward pass."""

    ARGUMENT = "argument"
    RESULT = "result"
    NOTHING = "nothing"

    __hash__ = object.__hash__


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A function of each element of one tensor."""

    kept: Kept
    copies: int = 0
    """Tensors of the result's size that its backward formula makes before the gradient it returns."""
    decomposed_copies: int = 0
    """The same of torch's reference decomposition, which fake tensors run; they stay until it returns."""
    source: str
    """The formula, or the kernel."""


def _result(source: str, **copies: int) -> Function:
    return Function(kept=Kept.RESULT, source=source, **copies)


def _argument(source: str, **copies: int) -> Function:
    return Function(kept=Kept.ARGUMENT, source=source, **copies)


FUNCTIONS: Final[Mapping[OperationKind, Function]] = {
    OperationKind.EXP: _result("grad * result.conj() [1]_"),
    OperationKind.FUSED_SOFTMAX: _result("Megatron-core 0.16.1, fusions/fused_softmax.py"),
    OperationKind.EXPM1: _result("grad * (result.conj() + 1) [1]_"),
    OperationKind.RECIPROCAL: _result("-grad * (result * result).conj() [1]_"),
    OperationKind.RELU: _result("threshold_backward(grad, result, 0) [1]_"),
    OperationKind.RSQRT: _result("-0.5 * grad * result.pow(3).conj() [1]_", copies=2),
    OperationKind.SIGMOID: _result("sigmoid_backward(grad, result) [1]_"),
    OperationKind.SQRT: _result("grad / (2 * result.conj()) [1]_"),
    OperationKind.TANH: _result("tanh_backward(grad, result) [1]_"),
    OperationKind.CLAMP: _argument("clamp_backward(grad, self, min, max) [1]_"),
    OperationKind.COS: _argument("grad * -self.sin().conj() [1]_"),
    OperationKind.EXPM1: _argument(
        "grad * (result.conj() + 1) [1]_, written as exp of the argument"
    ),
    OperationKind.GELU: _argument("gelu_backward(grad, self, approximate) [1]_"),
    OperationKind.HARDSWISH: _argument("hardswish_backward(grad, self) [1]_"),
    OperationKind.LOG: _argument("grad.div(self.conj()) [1]_"),
    OperationKind.RELU2: _argument("liger_kernel 0.8.5, ops/relu_squared.py"),
    OperationKind.SILU: _argument("silu_backward(grad, self) [1]_", decomposed_copies=5),
    OperationKind.SIN: _argument("grad * self.cos().conj() [1]_"),
    OperationKind.SOFTPLUS: _argument("softplus_backward(grad, self, beta, threshold) [1]_"),
    OperationKind.CLONE: Function(kept=Kept.NOTHING, source="grad [1]_"),
}
"""By kind. Written for CUDA's kernels."""

JITTED = _argument(
    "Megatron-core 0.16.1, fusions/fused_bias_gelu.py and its like: one kernel each way"
)
"""Any activation in one kernel with what stands around it."""
