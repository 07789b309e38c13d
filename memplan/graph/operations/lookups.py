"""Rows looked up in a table, and what its gradient takes on its way."""

from memplan.dtypes import DType
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.overlay import BASE_LAYER
from memplan.graph.segments import RESULT, Gradient
from memplan.graph.sorting import sort_scratch_bytes
from memplan.graph.tape import Tape
from memplan.graph.tensors import ALLOCATION_ROUNDING, Parameter, Tensor, allocated_bytes
from memplan.model.parameters import WeightRole


def embedding(
    t: Tape, name: str, num_rows: int, width: int, num_ids: int, ids: Tensor | None = None
) -> Tensor:
    """Look ids up in a table: keeps the ids; the table's gradient is dense."""
    weight = t.parameter(f"{name}.weight", num_rows, width, role=WeightRole.TABLE)
    return embedding_lookup(t, weight, num_ids, ids)


def embedding_lookup(t: Tape, weight: Parameter, num_ids: int, ids: Tensor | None = None) -> Tensor:
    """Look ids up in a table that is already declared."""
    out = t.tensor(num_ids * weight.shape[-1], weight.dtype)
    inputs: tuple[Tensor, ...] = (weight,) if ids is None else (weight, ids)
    own = Gradient.FRESH if weight.ranks == 1 else Gradient.WHOLE
    gradients: tuple[int, ...] = (own, Gradient.NONE)[: len(inputs)]
    width = weight.shape[-1]
    rows = weight.num_weights // width
    scratch = () if t.decomposed else embedding_backward_scratch(num_ids, rows, width)
    t.record(
        OperationKind.EMBEDDING, inputs, (out,), saves=inputs[1:], gradients=gradients,
        backward_scratch_bytes=scratch,
    )  # fmt: skip
    if t.adaptation is not None:
        adapted = weight.module.removesuffix(BASE_LAYER)
        if adapted in t.adapted:
            return t.adaptation.beside_embedding(t, out, weight, ids, adapted)
    return out


UNSORTED_IDS = 3072
"""Up to so many ids the kernel adds rows where they belong, one by one."""

ROWS_PER_THREAD = 10


def embedding_backward_scratch(num_ids: int, num_rows: int, width: int) -> tuple[int, ...]:
    """What the gradient of a table takes on its way.

    Ids are sorted, and rows of equal ids summed in pieces in fp32, of which there are at most
    ``n / 10 + min(n, V)`` (aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu).

    >>> max(embedding_backward_scratch(4096, 152064, 3584))
    64583680
    """
    if num_ids <= UNSORTED_IDS:
        return ()
    pieces = num_ids // ROWS_PER_THREAD + min(num_ids, num_rows)
    ids = allocated_bytes(num_ids, DType.INT64)
    sorting = sort_scratch_bytes(num_ids, largest_key=num_rows)
    small = ALLOCATION_ROUNDING
    return (
        ids, ids, ids, sorting, ~3, ~2, RESULT, ids, small, ids, 3 * small, ~10, ~9,
        ids, ids, 3 * small, ~15, small, allocated_bytes(pieces, DType.INT64),
        allocated_bytes(pieces * width, DType.FP32),
    )  # fmt: skip
