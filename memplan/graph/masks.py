"""Attention masks: the tensors that transformers builds once per step for all layers.

``sdpa_mask`` and ``eager_mask`` of transformers 5.23 (``masking_utils``) compare row and column numbers
into boolean matrices. Eager attention turns the result into an additive mask for every sequence of the
batch, in the dtype of the embeddings; sdpa reads the boolean one, or none where the kernel's own causal
mode does.
"""

from memplan.dtypes import DType
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor


def causal_pattern(t: Tape, queries: int, keys: int) -> Tensor:
    """``kv <= q``: one boolean matrix for the whole batch."""
    pattern = t.tensor(queries * keys, DType.BOOL)
    t.record("le", (), (pattern,))
    return pattern


def sliding_pattern(t: Tape, queries: int, keys: int) -> Tensor:
    """``kv > q - window`` and ``kv <= q``, each joined to what came before (``and_masks``)."""
    recent, first, causal, both = (t.tensor(queries * keys, DType.BOOL) for _ in range(4))
    t.record("gt", (), (recent,))
    t.record("bitwise_and", (recent,), (first,))
    t.record("le", (), (causal,))
    t.record("bitwise_and", (first, causal), (both,))
    return both


def two_sided_pattern(t: Tape, length: int) -> Tensor:
    """``|q - kv| <= window``, joined to what came before; distances are int64."""
    distances, absolute = (t.tensor(length * length, DType.INT64) for _ in range(2))
    near, first, both = (t.tensor(length * length, DType.BOOL) for _ in range(3))
    t.record("sub", (), (distances,))
    t.record("abs", (distances,), (absolute,))
    t.record("le", (absolute,), (near,))
    t.record("bitwise_and", (near,), (first,))
    t.record("bitwise_and", (first,), (both,))
    return both


def additive_mask(t: Tape, pattern: Tensor, batch: int, dtype: DType) -> Tensor:
    """Zero or the dtype's lowest number, written out for each sequence (``eager_mask``)."""
    mask = t.tensor(pattern.numel * batch, dtype)
    t.record("where", (pattern,), (mask,))
    return mask
