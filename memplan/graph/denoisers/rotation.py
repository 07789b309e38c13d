"""Rotary embeddings of neighbouring pairs (diffusers 0.42, ``apply_rotary_emb`` and Wan's own)."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import written


def pairs_of(t: Tape, x: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second of each pair (``unbind``): views."""
    first, second = t.split(x, x.numel // 2, x.numel // 2)
    return first, second


def turned(t: Tape, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """``x * cos + rotated * sin`` in fp32, cast back."""
    cos, sin = tables
    first, second = pairs_of(t, x)
    other = t.concatenate(t.scale(second, OperationKind.NEG), first)
    other.by_head = x.by_head
    straight = t.mul(t.cast(x, DType.FP32), cos)
    crossed = t.mul(t.cast(other, DType.FP32), sin)
    out = t.cast(t.add(straight, crossed), x.dtype)
    out.by_head = x.by_head
    t.touch(other, x)
    return out


def turned_in_place(t: Tape, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Wan's: both halves are written into an empty tensor."""
    cos, sin = (t.view(table, table.numel // 2) for table in tables)
    first, second = pairs_of(t, x)
    out = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.EMPTY, (), (out,))
    kept = t.mul(first, cos)
    gone = t.mul(second, sin)
    out = written(t, out, _difference(t, kept, gone))
    out = written(t, out, t.add(t.mul(first, sin), t.mul(second, cos)))
    t.touch(x)
    return out


def _difference(t: Tape, left: Tensor, right: Tensor) -> Tensor:
    out = t.tensor(left.numel, left.dtype)
    gradients = (Gradient.ALIAS, Gradient.FRESH)
    t.record(OperationKind.SUB, (left, right), (out,), gradients=gradients)
    return out
