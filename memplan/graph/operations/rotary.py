"""Rotary positions: tables of cosines and sines, and turning queries and keys by them."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes


def rotary(t: Tape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin``: keeps the tables only."""
    straight = t.mul(x, cos)
    first, second = t.slice(x, x.numel // 2), t.slice(x, x.numel - x.numel // 2)
    turned = t.concatenate(t.scale(second, OperationKind.NEG), first)
    t.touch(turned)
    return t.add(straight, t.mul(turned, sin))


def rotary_in_place(t: Tape, x: Tensor, cos: Tensor, sin: Tensor, *, by_row: bool) -> Tensor:
    """Liger's: one kernel turns ``x`` where it lies, and its gradient in backward; keeps the tables.

    What does not lie row after row is copied first, and so is its gradient (``by_row`` says whether it
    does): liger_kernel 0.8.5, ops/rope.py, ``rope_forward``.
    """
    whole = allocated_bytes(x.numel, x.dtype) == x.storage.num_bytes
    out = t.view(x, x.numel) if whole and not x.by_head else t.tensor(x.numel, x.dtype)
    gradient = Gradient.ALIAS if by_row else Gradient.FRESH
    t.record(
        OperationKind.ROTARY, (x, cos, sin), (out,), saves=(cos, sin),
        gradients=(gradient, Gradient.NONE, Gradient.NONE), in_python=True,
    )  # fmt: skip
    return out


def rotary_as_complex(t: Tape, query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 copies times a table of complex numbers, cast back: torchtitan's and DeepSeek-V2's.

    torchtitan 0.3.0, models/common/rope.py, ``ComplexRoPE``; transformers 5.23,
    models/deepseek_v2, ``apply_rotary_emb``.
    """
    full = t.cast(query, DType.FP32), t.cast(key, DType.FP32)
    results: list[Tensor] = []
    for original, x in zip((query, key), full, strict=True):
        product = t.mul(x, table)
        flat = t.view(product, product.numel)
        t.record(OperationKind.VIEW_AS_REAL, (product,), (flat,), gradients=(Gradient.FRESH,))
        results.append(t.cast(flat, original.dtype))
    t.touch(*full)
    return results[0], results[1]


def complex_table(t: Tape, positions: int, dim: int) -> Tensor:
    """Cosines and sines as one table of complex numbers, two fp32 each."""
    angles = t.tensor(positions * (dim // 2), DType.FP32)
    t.record(OperationKind.MUL, (), (angles,))
    table = t.tensor(positions * dim, DType.FP32)
    scratch = angles.storage.num_bytes + table.storage.num_bytes
    t.record(OperationKind.POLAR, (angles,), (table,), forward_scratch_bytes=scratch)
    t.touch(angles)
    return table
