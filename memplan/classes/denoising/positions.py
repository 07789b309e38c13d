"""Fixed positions that are made in fp64, and tables that a time is added to."""

from memplan.classes.denoising.base import chunked
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.functional import expanded, made_from
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.run import Run


def made_in_fp64(run: Run, numel: int, *given: Handle) -> Handle:
    """A table of that format, from others of it: as large as twice the numbers in fp32."""
    shape = (2 * numel,)
    if given:
        return made_from(OperationKind.CAT, shape, DType.FP32, *given)
    return made_by(run, OperationKind.CAT, shape, DType.FP32)


def added_twice(module: Module, table: Weight, temb: Handle) -> tuple[Handle, Handle]:
    """``(table + temb[:, None]).chunk(2, dim=1)``: a shift and a scale."""
    batch, size = temb.shape
    both = expanded(temb.unsqueeze(1), (batch, 2, size))
    shift, scale = chunked(module.operand(table).view(1, 2, size) + both, 2, dim=1)
    return shift, scale
