"""Masks and positions that a model makes once for all layers.

(transformers 5.23, masking_utils.py: ``create_causal_mask``, ``create_sliding_window_causal_mask``)
"""

from collections.abc import Callable
from functools import partial
from math import prod

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Storage, Tensor, allocated_bytes
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.run import Run
from memplan.graph.modules.strides import Shape
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Packing


def causal_mask(
    run: Run,
    batch: int,
    length: int,
    *,
    window: int | None = None,
    eager: bool = False,
    blocks: bool = False,
    written: bool = False,
) -> Handle | None:
    """The mask of layers with this window; None where the kernel has a mode of its own for it.

    The class is ``eager`` whose attention is never another; with ``blocks`` some tokens see one another;
    one that is ``written`` is read beside the kernel too (``allow_is_causal_skip=False``).
    """
    if run.kernels.attention.is_package:
        # It is told windows and lengths in numbers.
        return None
    eager = eager or run.kernels.attention is AttentionKernel.EAGER
    shape = batch, 1, length, length
    if blocks or run.options.packing is not Packing.NONE:
        made = _blocked if blocks else _packed
        pattern = made(run, shape, windowed=window is not None)
        return _filled(pattern, run.compute, shape) if eager else pattern
    if not (eager or written) and (window is None or length < window):
        return None
    ranges = _ranges(run, batch, length)
    pattern = causal_pattern(run, length) if window is None else _sliding(run, length)
    del ranges
    return _filled(pattern, run.compute, shape) if eager else pattern


def padding(run: Run, batch: int, length: int) -> Handle:
    """The ones themselves."""
    return made_by(run, OperationKind.ONES, (batch, length), DType.FP32)


def padded_mask(run: Run, batch: int, length: int) -> Handle | None:
    """The causal mask of a class that makes one of ones for its padding, though all tokens are there.

    (transformers 5.23, models/bart/modeling_bart.py, ``BartDecoder.forward``)
    """
    if run.kernels.attention is not AttentionKernel.EAGER:
        return None
    padding_mask = made_by(run, OperationKind.TO, (batch, length), DType.BOOL)
    ranges = _ranges(run, batch, length)
    shape = batch, 1, length, length
    pattern = _joined_masks(run, partial(causal_pattern, run, length), shape)
    del ranges
    mask = _filled(pattern, run.compute, shape)
    del padding_mask
    return mask


def two_sided_mask(run: Run, batch: int, length: int, *, window: int | None) -> Handle | None:
    """The mask of layers whose tokens see those behind them too: ``|q - kv| <= window``; distances are int64."""
    if run.kernels.attention.is_package or window is None or length < window:
        return None
    distances = made_by(run, OperationKind.SUB, (length, length), DType.INT64)
    absolute = distances.apart(OperationKind.ABS)
    del distances
    near = absolute.apart(OperationKind.LE, dtype=DType.BOOL)
    del absolute
    first = near.apart(OperationKind.BITWISE_AND)
    del near
    pattern = first.apart(OperationKind.BITWISE_AND)
    del first
    if run.kernels.attention is not AttentionKernel.EAGER:
        return pattern
    return pattern.apart(OperationKind.WHERE, dtype=run.compute, shape=(batch, 1, length, length))


def written_mask(
    ones: Handle, embeddings: Handle, *, queries: int | None = None, is_asked: bool = True
) -> Handle:
    """``create_bidirectional_mask`` of ones that a class makes itself: a mask of all pairs, in the embeddings' format.

    It looks first whether they hide anything, where it is asked to (``_ignore_bidirectional_mask_sdpa``). A batch
    without padding is spared the rest, and takes less than is said; one in which a sequence is padded is not.
    (transformers 5.23, masking_utils.py, ``sdpa_mask`` and ``eager_mask``)
    """
    run, kinds = ones.run, OperationKind
    batch, length = ones.shape
    padding_mask = ones if ones.dtype is DType.BOOL else ones.apart(kinds.TO, dtype=DType.BOOL)
    if is_asked:
        made_by(run, kinds.EQ, (1,), DType.BOOL)
    ranges = _ranges(run, batch, length, queries)
    shape = batch, 1, *ranges[2].shape, length
    pattern = _joined_masks(run, partial(ranges[2].apart, kinds.GE, dtype=DType.BOOL), shape)
    del ranges
    mask = _filled(pattern, embeddings.dtype, shape)
    del padding_mask
    return mask


def _ranges(run: Run, batch: int, length: int, queries: int | None = None) -> tuple[Handle, ...]:
    """Of sequences, heads, queries and keys: a mask is made from them, and its own place is behind theirs."""
    arange, add = OperationKind.ARANGE, OperationKind.ADD_SCALAR
    before = [made_by(run, arange, (each,), DType.INT64) for each in (batch, 1)]
    offset = [
        made_by(run, arange, (each,), DType.INT64).apart(add)
        for each in (length if queries is None else queries, length)
    ]
    return (*before, *offset)


def _filled(pattern: Handle, dtype: DType, shape: Shape) -> Handle:
    """``eager_mask``: zeros, and the format's least number where nothing is seen."""
    numbers = [made_by(pattern.run, OperationKind.ZEROS, (1,), dtype) for _ in range(2)]
    mask = pattern.apart(OperationKind.WHERE, dtype=dtype, shape=shape)
    del numbers
    return mask


def _joined_masks(run: Run, pattern: Callable[[], Handle], shape: Shape) -> Handle:
    """``and_masks`` of a pattern and of what is no padding."""
    kinds = OperationKind
    first = made_by(run, kinds.ONES, (1,), DType.BOOL)
    every = pattern()
    result = every.apart(kinds.BITWISE_AND)
    del every
    del first
    found = _looked_up(run, shape[0], shape[-1])
    joined = made_by(run, kinds.BITWISE_AND, shape, DType.BOOL)
    del found, result
    return joined


def _looked_up(run: Run, batch: int, length: int) -> Handle:
    """Of each token whether it is no padding, by two numbers; the second's row is copied where there are more sequences than one."""
    kinds, shape = OperationKind, (batch, length)
    numbers = [made_by(run, kinds.INDICES, shape, DType.INT64) for _ in range(1 + (batch > 1))]
    found = made_by(run, kinds.INDEX_SELECT, shape, DType.BOOL)
    del numbers
    return found


def causal_pattern(run: Run, length: int) -> Handle:
    """``kv <= q``: one matrix for the whole batch."""
    return made_by(run, OperationKind.LE, (length, length), DType.BOOL)


def _sliding(run: Run, length: int) -> Handle:
    """``kv > q - window`` and ``kv <= q``, each joined to what came before (``and_masks``)."""
    shape = length, length
    recent = made_by(run, OperationKind.GT, shape, DType.BOOL)
    first = recent.apart(OperationKind.BITWISE_AND)
    del recent
    causal = made_by(run, OperationKind.LE, shape, DType.BOOL)
    return first & causal


def _blocked(run: Run, shape: Shape, *, windowed: bool) -> Handle:
    """``or_masks`` of what came before and the same picture; then ``and_masks`` of that and what is near."""
    causal = causal_pattern(run, shape[-1])
    either = causal.apart(OperationKind.BITWISE_OR)
    del causal
    alike = made_by(run, OperationKind.EQ, shape, DType.BOOL)
    alike = alike.apart(OperationKind.BITWISE_AND)
    either = either.apart(OperationKind.BITWISE_OR, alike)
    del alike
    if not windowed:
        return either
    either = either.apart(OperationKind.BITWISE_AND)
    recent = made_by(run, OperationKind.GT, shape[-2:], DType.BOOL)
    return either & recent


def _packed(run: Run, shape: Shape, *, windowed: bool) -> Handle:
    """Sequences that lie in one row, told apart: each pair's numbers compared, then its positions."""
    same = made_by(run, OperationKind.EQ, shape, DType.BOOL)
    first = same.apart(OperationKind.BITWISE_AND)
    del same
    if not windowed:
        causal = made_by(run, OperationKind.LE, shape, DType.BOOL)
        return first & causal
    recent = made_by(run, OperationKind.GT, shape, DType.BOOL)
    inner = recent.apart(OperationKind.BITWISE_AND)
    del recent
    causal = made_by(run, OperationKind.LE, shape, DType.BOOL)
    causal = inner & causal
    del inner
    return first & causal


def position_ids(run: Run, batch: int, length: int) -> Handle:
    """Those of the batch, where it brings some, or one row for all: counted from what a cache has, which is nothing.

    A stage of a pipeline is a module of its own, and knows no cache.
    """
    if brings_positions(run) or run.options.stage is not None:
        return uncached_positions(run, batch, length)
    return (counted_positions(run, length) + 0).unsqueeze(0)


def uncached_positions(run: Run, batch: int, length: int) -> Handle:
    """The same of a class that knows no cache."""
    if brings_positions(run):
        return from_batch(run, (batch, length))
    return counted_positions(run, length).unsqueeze(0)


def brings_positions(run: Run) -> bool:
    """Whether the batch says which token stands where."""
    return run.options.packing is Packing.DOCUMENTS or run.options.context_parallel is not None


def counted_positions(run: Run, length: int) -> Handle:
    """``torch.arange``: one row of ids for all sequences."""
    return made_by(run, OperationKind.ARANGE, (length,), DType.INT64)


def positions_past_padding(run: Run, shape: Shape, *, cached: bool = True) -> Handle:
    """``create_position_ids_from_input_ids``: how many tokens came before that are no padding, counted in int64.

    Some copies of the function add those that a cache has (``cached``). (models/roberta/modeling_roberta.py)
    """
    kinds = OperationKind
    mask = made_by(run, kinds.NE, shape, DType.BOOL).apart(kinds.TO, dtype=DType.INT32)
    indices = made_by(run, kinds.CUMSUM, shape, DType.INT64)
    mask.apart(kinds.TO, dtype=DType.INT64)  # what the sum reads, made behind its result
    indices = indices.apart(kinds.TO, dtype=DType.INT32)
    if cached:
        indices = indices.apart(kinds.ADD_SCALAR)
    incremental_indices = indices.apart(kinds.MUL, mask)
    del indices
    found = incremental_indices.apart(kinds.TO, dtype=DType.INT64).apart(kinds.ADD_SCALAR)
    del mask, incremental_indices
    return found


def shifted_right(run: Run, shape: Shape) -> Handle:
    """``shift_tokens_right``: labels as a decoder reads them, copied into zeros, and -100 replaced.

    (transformers 5.23, models/bart/modeling_bart.py)
    """
    shifted = made_by(run, OperationKind.SHIFT_RIGHT, shape, DType.INT64)
    made_by(run, OperationKind.CLONE, (*shape[:-1], shape[-1] - 1), DType.INT64)
    shifted.apart(OperationKind.EQ, dtype=DType.BOOL)
    return shifted


def shifted_around(run: Run, shape: Shape) -> Handle:
    """The same where the last token that is no padding comes first (models/mbart/modeling_mbart.py)."""
    batch, kinds = shape[0], OperationKind
    shifted = made_by(run, kinds.SHIFT_RIGHT, shape, DType.INT64)
    shifted.apart(kinds.EQ, dtype=DType.BOOL)
    real = shifted.apart(kinds.NE, dtype=DType.BOOL)
    index_of_eos = made_by(run, kinds.SUM, (batch, 1), DType.INT64)
    real.apart(kinds.TO, dtype=DType.INT64)  # what the sum reads
    del real
    index_of_eos = index_of_eos.apart(kinds.ADD_SCALAR)
    decoder_start_tokens = made_by(run, kinds.GATHER, (batch, 1), DType.INT64)
    made_by(run, kinds.CLONE, (*shape[:-1], shape[-1] - 1), DType.INT64)
    del index_of_eos, decoder_start_tokens
    return shifted


def from_batch(run: Run, shape: Shape, dtype: DType = DType.INT64) -> Handle:
    """What the batch holds: no segment's."""
    numel = prod(shape)
    return Handle(run, Tensor(numel, dtype, Storage(allocated_bytes(numel, dtype), -1, 0)), shape)
