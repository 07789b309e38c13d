"""Attention masks: the tensors that transformers builds once per step for all layers.

``sdpa_mask`` and ``eager_mask`` of transformers 5.23 (``masking_utils``) compare row and column numbers
into boolean matrices. Eager attention turns the result into an additive mask for every sequence of the
batch, in the dtype of the embeddings; sdpa reads the boolean one, or none where the kernel's own causal
mode does.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.model.attention import AttentionSpec
from memplan.model.layers import StackSpec


def places(t: Tape, batch: int, queries: int, keys: int) -> list[Tensor]:
    """Numbers of sequences, heads, queries and keys, which ``sdpa_mask`` compares and holds until it returns."""
    found = []
    for count in (batch, 1):
        numbers = t.tensor(count, DType.INT64)
        t.record(OperationKind.ARANGE, (), (numbers,))
        found.append(numbers)
    for count in (queries, keys):
        first, moved = (t.tensor(count, DType.INT64) for _ in range(2))
        t.record(OperationKind.ARANGE, (), (first,))
        t.record(OperationKind.ADD_SCALAR, (first,), (moved,))
        found.append(moved)
    return found


def causal_pattern(t: Tape, batch: int, queries: int, keys: int) -> Tensor:
    """``kv <= q``: one boolean matrix for the whole batch."""
    numbers = places(t, batch, queries, keys)
    pattern = t.tensor(queries * keys, DType.BOOL)
    t.record(OperationKind.LE, (), (pattern,))
    t.touch(*numbers)
    return pattern


def additive_mask(t: Tape, pattern: Tensor, batch: int, dtype: DType) -> Tensor:
    """Zero or the dtype's lowest number, written out for each sequence (``eager_mask``)."""
    mask = t.tensor(pattern.numel * batch, dtype)
    number = allocated_bytes(1, dtype)
    t.record(
        OperationKind.WHERE, (pattern,), (mask,),
        forward_scratch_bytes=(number, number, RESULT, ~1, ~0),
    )  # fmt: skip
    return mask


def attentions(stack: StackSpec) -> list[AttentionSpec]:
    """What the scores of each run that has some are made of."""
    found = [run.layer.attention for run in stack.runs]
    plain = [spec for spec in found if isinstance(spec, AttentionSpec)]
    if len(plain) == len(found):
        return plain
    from memplan.model.latent import LatentAttentionSpec  # only for rarer layers
    from memplan.model.mixers import MixerSpec

    scores = [
        spec if isinstance(spec, AttentionSpec) else spec.scores
        for spec in found
        if isinstance(spec, (AttentionSpec, LatentAttentionSpec, MixerSpec))
    ]
    return [each for each in scores if each is not None]
