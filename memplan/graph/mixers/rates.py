"""How fast states fade: what both of Mamba's mixers make of ``A_log``."""

from memplan.dtypes import DType
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor


def decay_rate(t: Tape, *shape: int, dtype: DType | None = None) -> Tensor:
    """``-exp(A_log)`` in fp32 (``MambaMixer.forward``); ``dtype`` where the class fixes the weight's."""
    full = t.cast(t.parameter("mamba.A_log", *shape, dtype=dtype), DType.FP32)
    return t.scale(t.elementwise(OperationKind.EXP, full), OperationKind.NEG)
