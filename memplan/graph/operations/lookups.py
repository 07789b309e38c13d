"""Rows looked up in a table, and what its gradient takes on its way."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.overlay import BASE_LAYER
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter, Tensor, allocated_bytes
from memplan.model.parameters import WeightRole


def embedding(
    t: Tape,
    name: str,
    num_rows: int,
    width: int,
    num_ids: int,
    ids: Tensor | None = None,
    *,
    turned: bool = False,
) -> Tensor:
    """Look ids up in a table: keeps the ids; the table's gradient is dense."""
    weight = t.parameter(f"{name}.weight", num_rows, width, role=WeightRole.TABLE)
    return embedding_lookup(t, weight, num_ids, ids, turned=turned)


def embedding_lookup(
    t: Tape, weight: Parameter, num_ids: int, ids: Tensor | None = None, *, turned: bool = False
) -> Tensor:
    """Look ids up in a table that is already declared.

    What is found is ``turned`` then: its gradient comes the other way round, and is copied first. Ids of one row
    that stand for all sequences are copied for each of them, before they are read.
    """
    out = t.tensor(num_ids * weight.shape[-1], weight.dtype)
    inputs: tuple[Tensor, ...] = (weight,) if ids is None else (weight, ids)
    own = Gradient.FRESH if weight.ranks == 1 else Gradient.WHOLE
    gradients: tuple[int, ...] = (own, Gradient.NONE)[: len(inputs)]
    scratch = embedding_backward_scratch(
        t, num_ids, weight.num_weights, weight.shape[-1], weight.dtype,
        DType.INT64 if ids is None else ids.dtype,
    )  # fmt: skip
    if turned and not t.decomposed:
        scratch = behind_copy(out.storage.num_bytes, scratch)
    if ids is not None and ids.numel < num_ids and not t.decomposed:
        scratch = behind_copy(allocated_bytes(num_ids, ids.dtype), scratch)
    t.record(
        OperationKind.EMBEDDING, inputs, (out,), saves=inputs[1:], gradients=gradients,
        backward_scratch_bytes=scratch,
    )  # fmt: skip
    if t.adaptation is not None:
        adapted = weight.module.removesuffix(BASE_LAYER)
        if adapted in t.adapted:
            return t.adaptation.beside_embedding(t, out, weight, ids, adapted)
    return out


def behind_copy(copied_bytes: int, scratch: tuple[int, ...]) -> tuple[int, ...]:
    """A formula's temporaries where it copies its gradient first, which is given back last.

    >>> behind_copy(512, (1024, ~0, 0, 1024))
    (512, 1024, -2, 0, 1024)
    """
    moved = (step - 1 if step < 0 else step for step in scratch or (RESULT,))
    return (copied_bytes, *moved)


UNSORTED_IDS = 3072
"""Up to so many ids the kernel adds rows where they belong, one by one."""

ROWS_PER_THREAD = 10
LEAST_PIECES = 3
"""Rows of a small table are summed at once where there are more pieces of tens for each."""


def embedding_backward_scratch(
    t: Tape, num_ids: int, num_weights: int, width: int, dtype: DType, id_dtype: DType = DType.INT64
) -> tuple[int, ...]:
    """What the gradient of a table of rows of ``width`` takes on its way.

    Ids are sorted, and rows of equal ids summed in pieces in fp32, of which there are at most
    ``n / 10 + min(n, V)`` (aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu). Of a small
    table's rows many pieces are added up at once, in fp32, with a number for each piece in its place:
    torch 2.13's CUDA build was asked for 40 sizes.

    >>> from memplan.graph.core.options import TapeOptions
    >>> t = Tape(TapeOptions())
    >>> max(embedding_backward_scratch(t, 4096, 152064 * 3584, 3584, DType.BF16))
    64583680
    """
    if t.decomposed or num_ids <= UNSORTED_IDS:
        return ()
    num_rows = num_weights // width
    used = min(num_ids, num_rows)
    pieces = num_ids // ROWS_PER_THREAD + used
    numbers = allocated_bytes(pieces, id_dtype)
    sums = [allocated_bytes(pieces * width, DType.FP32)]
    if num_ids // ROWS_PER_THREAD > LEAST_PIECES * used and t.has_few_rows(num_rows):
        whole = allocated_bytes(num_weights, DType.FP32)
        sums = [numbers] if dtype is DType.FP32 else [numbers, whole]
    ids, marks = allocated_bytes(num_ids, id_dtype), allocated_bytes(used, id_dtype)
    sorting = t.sort_scratch_bytes(num_ids, largest_key=num_rows)
    small = ALLOCATION_ROUNDING
    return (
        ids, ids, ids, sorting, ~3, ~2, RESULT, ids, small, ids, 3 * small, ~10, ~9,
        marks, marks, 3 * small, ~15, small, numbers, *sums,
    )  # fmt: skip
