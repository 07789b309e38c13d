"""Mixtures of experts, as transformers 5.23 trains them on CUDA.

``integrations/moe.py`` sorts the pairs of token and expert by expert, copies each token's row once
for every expert it goes to, runs all experts' matrices in two grouped products
(``grouped_mm_experts_forward``), weights the rows, puts them back in order and sums each token's.
So most of it has ``tokens x experts per token`` rows, and each layer's experts are two weights.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor


def sum_of_rows(t: Tape, x: Tensor, numel: int) -> Tensor:
    """Sum each token's rows, in fp32 under autocast; backward spreads the gradient and copies it out to
    every row, which casting it does already."""
    dtype = DType.FP32 if t.autocast is not None else x.dtype
    kinds = Gradient.FRESH, Gradient.ALIAS
    if dtype is not x.dtype:
        kinds = Gradient.SEEN, Gradient.FRESH
    rows = t.view(x, x.numel)
    t.record(OperationKind.VIEW, (x,), (rows,), gradients=kinds[:1])
    out = t.tensor(numel, dtype)
    t.record(OperationKind.SUM, (rows,), (out,), gradients=kinds[1:])
    return out
