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
from memplan.graph.stack_context import StackContext
from memplan.model.attention import AttentionSpec
from memplan.model.layers import StackSpec
from memplan.model.spec import ModelSpec
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Packing


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


def sliding_pattern(t: Tape, queries: int, keys: int) -> Tensor:
    """``kv > q - window`` and ``kv <= q``, each joined to what came before (``and_masks``)."""
    recent, first, causal, both = (t.tensor(queries * keys, DType.BOOL) for _ in range(4))
    t.record(OperationKind.GT, (), (recent,))
    t.record(OperationKind.BITWISE_AND, (recent,), (first,))
    t.record(OperationKind.LE, (), (causal,))
    t.record(OperationKind.BITWISE_AND, (first, causal), (both,))
    return both


def packed_pattern(t: Tape, elements: int, *, window: bool) -> Tensor:
    """Sequences that lie in one row, told apart: each pair's numbers compared, then its positions.

    ``packed_sequence_compatibility_function``: joined to what came before at each step, one matrix for
    each row of the batch.
    """
    same, first = (t.tensor(elements, DType.BOOL) for _ in range(2))
    t.record(OperationKind.EQ, (), (same,))
    t.record(OperationKind.BITWISE_AND, (same,), (first,))
    inner = None
    if window:
        recent, inner = (t.tensor(elements, DType.BOOL) for _ in range(2))
        t.record(OperationKind.GT, (), (recent,))
        t.record(OperationKind.BITWISE_AND, (recent,), (inner,))
    causal = t.tensor(elements, DType.BOOL)
    t.record(OperationKind.LE, (), (causal,))
    if inner is not None:
        both = t.tensor(elements, DType.BOOL)
        t.record(OperationKind.BITWISE_AND, (inner, causal), (both,))
        causal = both
    pattern = t.tensor(elements, DType.BOOL)
    t.record(OperationKind.BITWISE_AND, (first, causal), (pattern,))
    return pattern


def two_sided_pattern(t: Tape, length: int) -> Tensor:
    """``|q - kv| <= window``, joined to what came before; distances are int64."""
    distances, absolute = (t.tensor(length * length, DType.INT64) for _ in range(2))
    near, first, both = (t.tensor(length * length, DType.BOOL) for _ in range(3))
    t.record(OperationKind.SUB, (), (distances,))
    t.record(OperationKind.ABS, (distances,), (absolute,))
    t.record(OperationKind.LE, (absolute,), (near,))
    t.record(OperationKind.BITWISE_AND, (near,), (first,))
    t.record(OperationKind.BITWISE_AND, (first,), (both,))
    return both


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
    from memplan.model.mixers import WITH_SCORES

    with_scores = (LatentAttentionSpec, *WITH_SCORES)
    scores = [
        spec if isinstance(spec, AttentionSpec) else spec.scores
        for spec in found
        if isinstance(spec, (AttentionSpec, *with_scores))
    ]
    return [each for each in scores if each is not None]


def attention_masks(
    t: Tape, model: ModelSpec, stack: StackSpec, context: StackContext
) -> tuple[Tensor | None, Tensor | None]:
    """The causal mask and the sliding one, where a layer needs it and its kernel has no mode for it.

    With sdpa a window that the sequence does not fill is left to the kernel's causal mode
    (transformers' ``_ignore_causal_mask_sdpa``).
    """
    if not attentions(stack):
        return None, None
    if not all(spec.causal for spec in attentions(stack)):
        return padding_mask(t, stack), two_sided_mask(t, stack, context)
    if t.kernels.attention.is_package and not any(spec.own_eager for spec in attentions(stack)):
        # The package is told windows and lengths in numbers.
        return None, None
    eager = t.kernels.attention is AttentionKernel.EAGER or model.eager_attention_only
    if t.options.packing is not Packing.NONE or stack.block_masks:
        return _packed_masks(t, stack, context, eager=eager)
    windows = [spec.sliding_window for spec in attentions(stack) if spec.sliding_window]
    length = context.seq_len
    full = sliding = None
    if eager and (stack.mixed_masks or len(windows) < len(attentions(stack))):
        full = additive_mask(
            t, causal_pattern(t, context.batch, length, length), context.batch, t.compute
        )
        t.hold(full)
    needed = eager or stack.window_block_masks or length >= min(windows, default=0)
    if windows and needed:
        own = stack.chunked_mask or stack.window_block_masks
        if own:
            sliding = packed_pattern(t, context.batch * length**2, window=True)
        else:
            sliding = sliding_pattern(t, length, length)
        if eager:
            copies = 1 if own else context.batch
            sliding = additive_mask(t, sliding, copies, t.compute)
        t.hold(sliding)
    return full, sliding


def _packed_masks(
    t: Tape, stack: StackSpec, context: StackContext, *, eager: bool
) -> tuple[Tensor | None, Tensor | None]:
    """A mask of every row of the batch: no kernel has a mode for several sequences in one."""
    elements = context.batch * context.seq_len**2
    found: list[Tensor | None] = []
    windows = [spec.sliding_window is not None for spec in attentions(stack)]
    for window in (False, True):
        mask = None
        if window in windows:
            mask = packed_pattern(t, elements, window=window)
            if eager:
                mask = additive_mask(t, mask, 1, t.compute)
            t.hold(mask)
        found.append(mask)
    return found[0], found[1]


def two_sided_mask(t: Tape, stack: StackSpec, context: StackContext) -> Tensor | None:
    """What an encoder's layers with a window are given, unless the sequence is shorter than it.

    Their ``sliding_window`` counts the neighbours on either side.
    """
    windows = [spec.sliding_window for spec in attentions(stack) if spec.sliding_window]
    if not windows or context.seq_len < min(windows):
        return None
    mask = two_sided_pattern(t, context.seq_len)
    if t.kernels.attention is AttentionKernel.EAGER:
        mask = additive_mask(t, mask, context.batch, t.compute)
    t.hold(mask)
    return mask


def padding_mask(t: Tape, stack: StackSpec) -> Tensor | None:
    """What LayoutLM adds to the scores of every sequence: a row of its keys."""
    if not any(spec.padding_mask for spec in attentions(stack)):
        return None
    mask = t.tensor(t.options.batch_size * t.options.seq_len, t.compute)
    t.record(OperationKind.MASK, (), (mask,))
    t.hold(mask)
    return mask
