"""Rotary positions: tables of cosines and sines, and turning queries and keys by them."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
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
        product = times_complex(t, x, table)
        flat = t.view(product, product.numel)
        t.record(OperationKind.VIEW_AS_REAL, (product,), (flat,), gradients=(Gradient.FRESH,))
        results.append(t.cast(flat, original.dtype))
    t.touch(*full)
    return results[0], results[1]


def times_complex(t: Tape, x: Tensor, table: Tensor) -> Tensor:
    """Numbers in pairs times a table of complex ones; backward multiplies by its conjugate, which is written out first.

    (torch 2.13, aten/src/ATen/ConjugateFallback.cpp, ``resolve_conj``)
    """
    product = t.mul(x, table)
    if not t.decomposed:
        t.segment.operations[-1].backward_scratch = table.storage.num_bytes, RESULT, ~0
    return product


def complex_table(t: Tape, positions: int, dim: int) -> Tensor:
    """Cosines and sines as one table of complex numbers, two fp32 each: of radii that are ones, then scaled."""
    angles, ones = (t.tensor(positions * (dim // 2), DType.FP32) for _ in range(2))
    t.record(OperationKind.MUL, (), (angles,))
    t.record(OperationKind.ONES, (), (ones,))
    unscaled = t.tensor(positions * dim, DType.FP32)
    t.record(OperationKind.POLAR, (ones, angles), (unscaled,))
    table = t.scale(unscaled)
    t.touch(angles, unscaled)
    return table
