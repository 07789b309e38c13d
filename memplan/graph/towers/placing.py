"""Positions that are added to the patches of pictures, each way that classes make them."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.lookups import embedding_lookup
from memplan.model.towers.patches import PatchesBody, Positions


def positions(t: Tape, body: PatchesBody, items: int, patches: int) -> Tensor:
    """What is added to the patches of all pictures, or to each picture's."""
    rows = items * patches
    match body.positions:
        case Positions.PARAMETER:
            return t.parameter(body.position_module)
        case Positions.AXES:
            return _by_axis(t, body, rows)
        case Positions.TABLE | Positions.NONE:
            count = patches + len(body.tokens)
            t.hold_buffer(allocated_bytes(count, DType.INT64))
            return embedding_lookup(t, t.parameter(f"{body.position_module}.weight"), count)


def _numbers(t: Tape, count: int, dtype: DType = DType.INT64) -> Tensor:
    made = t.tensor(count, dtype)
    t.record(OperationKind.ARANGE, (), (made,))
    return made


def _by_axis(t: Tape, body: PatchesBody, rows: int) -> Tensor:
    """``Gemma4VisionPatchEmbedder``: two look-ups in halves of one weight, zeros where there is padding."""
    table = t.parameter(body.position_module)
    numbers = _numbers(t, 2 * rows)
    found = []
    for _ in range(2):
        out = t.tensor(rows * body.size, table.dtype)
        t.record(
            OperationKind.EMBEDDING, (table, numbers), (out,), saves=(numbers,),
            gradients=(Gradient.FRESH, Gradient.NONE),
            backward_scratch_bytes=(table.storage.num_bytes // 2, RESULT),
        )  # fmt: skip
        found.append(out)
    both = t.add(*found)
    padding = t.tensor(rows, DType.BOOL)
    t.record(OperationKind.EQ, (), (padding,))
    out = t.tensor(both.numel, both.dtype)
    t.record(
        OperationKind.WHERE, (both, padding), (out,), saves=(padding,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out
