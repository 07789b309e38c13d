"""Which way attention goes: written out in Python, or through the kernel that would really run.

Which kernel torch's dispatcher picks is ``memplan.training.choices_of_kernels.sdpa``.
"""

from memplan.dtypes import DType
from memplan.fast_dataclass import replace
from memplan.graph.attention.eager import eager, eager_fused
from memplan.graph.attention.head_layout import Shape, expand_heads, splits_heads
from memplan.graph.attention.kernels import cudnn, efficient, flash, math
from memplan.graph.core.selective import recomputes_core_attention, region_since
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import dropout_probability
from memplan.training.choices_of_kernels.kernels import Packing
from memplan.training.choices_of_kernels.sdpa import MAX_FLASH_HEAD_DIM, ScoreKernel, SdpaCall
from memplan.training.splitting.context_parallel import ContextParallelKind


def attend(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    mask: Tensor | None,
) -> Tensor:
    """Scores, softmax and the weighted values, through the kernel that would really run."""
    group = t.options.context_parallel
    if group is not None and group.kind is ContextParallelKind.ALL_TO_ALL:
        from memplan.graph.attention.exchange import exchanged_attention  # only then

        def attended(query: Tensor, key: Tensor, value: Tensor, whole: Shape) -> Tensor:
            return _attend(t, query, key, value, whole, mask)

        return exchanged_attention(t, group, query, key, value, shape, attended)
    return _attend(t, query, key, value, shape, mask)


def _attend(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    mask: Tensor | None,
) -> Tensor:
    if splits_heads(t, shape.spec):
        return _written_out(t, query, key, value, shape, mask)
    if t.kernels.attention.is_package:
        if t.options.packing is Packing.PADDING_FREE:
            shape = _apart(t, shape)
        return _through(t, ScoreKernel.FLASH, query, key, value, shape, None)
    grouped = shape.groups > 1
    if grouped and not _keeps_groups(shape, mask):
        key, value = expand_heads(t, key, shape), expand_heads(t, value, shape)
        grouped = False
    return sdpa(t, query, key, value, shape, mask, grouped=grouped)


def _apart(t: Tape, shape: Shape) -> Shape:
    """The sequences of one row as the package's ``varlen`` functions see them."""
    number = t.options.num_sequences
    length = shape.queries // number
    return replace(shape, batch=number, queries=length, keys=length, is_varlen=True)


def _keeps_groups(shape: Shape, mask: Tensor | None) -> bool:
    """Whether grouped heads are left to the kernel: ``use_gqa_in_sdpa`` of transformers 5.23."""
    return mask is None and shape.spec.head_dim == shape.value_head_dim <= MAX_FLASH_HEAD_DIM


def _written_out(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    mask: Tensor | None,
) -> Tensor:
    start = len(t.segment.operations)
    if t.kernels.fused_elementwise:
        out = eager_fused(t, query, key, value, shape)
    else:
        out = eager(t, query, key, value, shape, mask)
    if recomputes_core_attention(t.options):
        t.segment.regions.append(region_since(t.segment, start))
    return out


def sdpa(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    mask: Tensor | None,
    *,
    grouped: bool = False,
    spread: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` through the kernel that the card's dispatcher takes.

    ``grouped``: key/value heads were not written out for every query head; ``spread``: there is one,
    which is handed over as it is.
    """
    call = SdpaCall(
        dtype=t.autocast or query.dtype,
        head_dim=shape.spec.head_dim,
        value_head_dim=shape.value_head_dim,
        queries=shape.queries,
        keys=shape.keys,
        masked=mask is not None,
        trained_mask=mask is not None and mask.requires_grad,
        dropout=dropout_probability(t, shape.spec.dropout) > 0,
        grouped=grouped,
        spread=spread,
    )
    return _through(t, t.sdpa_kernel(call), query, key, value, shape, mask, spread=spread)


def _by_kernel(
    t: Tape,
    kernel: ScoreKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    mask: Tensor | None,
    *,
    spread: bool,
) -> Tensor:
    group = t.options.context_parallel
    if group is not None and group.kind is ContextParallelKind.RING:
        from memplan.graph.attention.ring import ring_attention  # only then

        return ring_attention(t, group, kernel, query, key, value, shape)
    if kernel is ScoreKernel.FLASH:
        return flash(t, query, key, value, shape)
    if kernel is ScoreKernel.CUDNN:
        return cudnn(t, query, key, value, shape, mask)
    if kernel is ScoreKernel.EFFICIENT:
        return efficient(t, query, key, value, shape, mask)
    return t.contiguous(math(t, query, key, value, shape, mask, spread=spread))


def _through(
    t: Tape,
    kernel: ScoreKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    mask: Tensor | None,
    *,
    spread: bool = False,
) -> Tensor:
    held = (query, key, value)
    cast: tuple[Tensor, ...] = (value, key, query)
    given_mask = mask
    if t.autocast is not None:
        if mask is not None and mask.dtype is not DType.BOOL:
            mask = t.cast(mask, t.autocast)
        value, key, query = cast = tuple(t.cast(x, t.autocast) for x in reversed(held))
    out = _by_kernel(t, kernel, query, key, value, shape, mask, spread=spread)
    # Autocast's copies go when the function returns, before what it found is copied into rows.
    t.touch(*reversed(cast))
    if out.by_head:
        out = t.contiguous(out)
    if mask is not None:
        t.touch(mask)
    t.touch(*held)
    if given_mask is not None:
        t.touch(given_mask)
    return out
