"""ALiBi: slopes times positions, added to the scores instead of position embeddings.

O. Press, N. A. Smith, and M. Lewis, "Train short, test long," 2021. arXiv:2108.12409.
"""

from memplan.dtypes import DType
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.attention import AttentionForm, AttentionSpec


def add_alibi(t: Tape, spec: AttentionSpec, context: StackContext) -> None:
    """Make the stack's bias (and MPT's own mask), where its attention adds one."""
    if spec.form is AttentionForm.ALIBI_PRODUCT:
        context.alibi = _per_sequence(t, spec, context)
    if spec.form is AttentionForm.ALIBI_SUM:
        context.alibi = _full_length(t, spec)
        context.mask = _pattern_of(t, context.mask)


def _per_sequence(t: Tape, spec: AttentionSpec, context: StackContext) -> Tensor:
    """``BloomModel``: a row for each head, repeated for the batch, then cast."""
    row = t.tensor(spec.num_heads * context.seq_len, DType.FP32)
    t.record(OperationKind.MUL, (), (row,))
    rows = t.tensor(context.batch * spec.num_heads * context.seq_len, DType.FP32)
    t.record(OperationKind.REPEAT, (row,), (rows,))
    bias = t.cast(rows, t.compute)
    t.touch(row, rows)
    t.hold(bias)
    return bias


def _full_length(t: Tape, spec: AttentionSpec) -> Tensor:
    """``build_mpt_alibi_tensor``: fp32, for the longest sequence the config allows."""
    bias = t.tensor(spec.num_heads * spec.buffer_positions, DType.FP32)
    t.record(OperationKind.MUL, (), (bias,))
    t.hold(bias)
    return bias


def _pattern_of(t: Tape, mask: Tensor | None) -> Tensor | None:
    """``MptModel`` turns the additive mask into a boolean one again."""
    if mask is None:
        return None
    mask.storage.held = False
    pattern = t.tensor(mask.numel, DType.BOOL)
    t.record(OperationKind.TO, (mask,), (pattern,))
    t.hold(pattern)
    return pattern
