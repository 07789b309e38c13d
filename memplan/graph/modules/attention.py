"""transformers' attention functions on handles: sdpa, eager, and what stands around them.

(transformers 5.23, integrations/sdpa_attention.py, models/llama/modeling_llama.py)
"""

from collections.abc import Callable
from functools import lru_cache

from memplan.dtypes import DType
from memplan.graph.attention.eager import eager_fused
from memplan.graph.attention.head_layout import Shape as Sizes
from memplan.graph.attention.kernels import cudnn, efficient, flash
from memplan.graph.attention.kernels import math as written_out
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.selective import recomputes_core_attention, region_since
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.basic import dropout
from memplan.graph.modules.functional import spread_copy
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layouts import Rule, always, in_rows
from memplan.graph.modules.run import Run
from memplan.graph.modules.strides import dense_strides
from memplan.graph.operations.elementwise import dropout_probability, softmax
from memplan.model.attention import AttentionSpec, Projection
from memplan.training.choices_of_kernels.kernels import AttentionKernel, Packing
from memplan.training.choices_of_kernels.sdpa import MAX_FLASH_HEAD_DIM, ScoreKernel, SdpaCall
from memplan.training.splitting.context_parallel import ContextParallelKind

Attended = tuple[Handle, Handle | None]
"""What comes of it, of (batch, tokens, heads, width), and the weights where the function made some."""
Attend = Callable[[Handle, Handle, Handle, Handle | None, float], Attended]
"""Queries, keys and values of (batch, heads, tokens, width), a mask, the dropout of the weights."""


def in_heads(x: Handle, head_dim: int) -> Handle:
    """``x.view(batch, tokens, -1, head_dim).transpose(1, 2)``: (batch, heads, tokens, width)."""
    batch, length, _ = x.shape
    return x.view(batch, length, -1, head_dim).transpose(1, 2)


def attention_function(run: Run, eager: Attend | None = None, *, causal: bool = True) -> Attend:
    """The function that a class's attention calls: by the kernels, and over shared sequences.

    ``eager`` is the class's own where it has another than Llama's.
    """
    chosen: Attend = sdpa_attention if causal else two_sided_attention
    if run.kernels.attention is AttentionKernel.EAGER:
        chosen = fused_attention if run.kernels.fused_elementwise else eager or eager_attention
    group = run.options.context_parallel
    if group is not None and group.kind is ContextParallelKind.ALL_TO_ALL:
        from memplan.graph.modules.exchange import exchanged  # only where sequences are shared

        return exchanged(chosen, group.degree)
    return chosen


def two_sided_attention(
    query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
) -> Attended:
    """``sdpa_attention_forward`` of a module whose ``is_causal`` is false."""
    return sdpa_attention(query, key, value, mask, probability, causal=False)


def sdpa_attention(
    query: Handle,
    key: Handle,
    value: Handle,
    mask: Handle | None,
    probability: float,
    *,
    causal: bool = True,
) -> Attended:
    """``sdpa_attention_forward``: grouped heads are left to the kernel, or written out for every query head."""
    groups = query.shape[1] // key.shape[1]
    fits = query.shape[-1] == value.shape[-1] <= MAX_FLASH_HEAD_DIM
    kept = groups > 1 and mask is None and fits
    if groups > 1 and not kept and not query.run.kernels.attention.is_package:
        key = key.repeat_heads(groups)
        value = value.repeat_heads(groups)
    out = scaled_dot_product_attention(
        query, key, value, mask, probability, grouped=kept, causal=causal
    )
    out = out.transpose(1, 2).contiguous()
    return out, None


def eager_attention(
    query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
) -> Attended:
    """``eager_attention_forward``: scores, an fp32 softmax cast back, dropout, the weighted values."""
    return _written_out(query, key, value, mask, probability, softcap=False)


def capped_attention(
    query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
) -> Attended:
    """Gemma 2's: the same with scores that go through a tanh."""
    return _written_out(query, key, value, mask, probability, softcap=True)


def unwidened_attention(
    query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
) -> Attended:
    """BERT's: the softmax names no format.

    (transformers 5.23, models/bert/modeling_bert.py, ``eager_attention_forward``)
    """
    return _written_out(query, key, value, mask, probability, softcap=False, widened=False)


def biased_attention(
    query: Handle,
    key: Handle,
    value: Handle,
    mask: Handle | None,
    bias: Handle,
    probability: float,
) -> Attended:
    """T5's: a bias for every distance is added before the mask.

    (transformers 5.23, models/t5/modeling_t5.py, ``eager_attention_forward``)
    """
    return _written_out(
        query, key, value, mask, probability, softcap=False, widened=False, bias=bias
    )


def _written_out(
    query: Handle,
    key: Handle,
    value: Handle,
    mask: Handle | None,
    probability: float,
    *,
    softcap: bool,
    widened: bool = True,
    bias: Handle | None = None,
) -> Attended:
    run = query.run
    start = len(run.segment.operations)
    groups = query.shape[1] // key.shape[1]
    keys = key.repeat_heads(groups)
    values = value.repeat_heads(groups)
    weights = matmul(query, keys.transpose(2, 3)) * 1.0
    if softcap:
        weights = weights / 50.0
        weights = weights.tanh()
        weights = weights * 50.0
    for added in (bias, mask):
        if added is not None:
            weights = weights + added
    if widened:
        weights = weights.like(softmax(run, weights.record, dtype=DType.FP32)).to(query.dtype)
    else:
        weights = weights.like(softmax(run, weights.record))
    weights = dropout(weights, probability)
    out = matmul(weights, values)
    out = out.transpose(1, 2).contiguous()
    if recomputes_core_attention(run.options):
        run.segment.regions.append(region_since(run.segment, start))
    return out, weights


def fused_attention(
    query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
) -> Attended:
    """Megatron's: one kernel scales, masks and normalizes the scores."""
    del mask
    run = query.run
    batch, heads, length, width = query.shape
    start = len(run.segment.operations)
    spec = score_spec(heads, key.shape[1], width, value.shape[-1], probability)
    sizes = Sizes(batch, length, key.shape[2], spec)
    out = eager_fused(run, query.laid(), key.laid(), value.laid(), sizes)
    if recomputes_core_attention(run.options):
        run.segment.regions.append(region_since(run.segment, start))
    return Handle(run, out, (batch, length, heads, value.shape[-1])), None


@lru_cache(maxsize=256)
def score_spec(
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    probability: float,
    *,
    causal: bool = True,
) -> AttentionSpec:
    """What the kernels' formulas ask of a call."""
    return AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, projection=Projection.SEPARATE,
        causal=causal, dropout=probability,
        value_head_dim=value_dim if value_dim != head_dim else None,
    )  # fmt: skip


def scaled_dot_product_attention(
    query: Handle,
    key: Handle,
    value: Handle,
    mask: Handle | None,
    probability: float,
    *,
    grouped: bool = False,
    spread: bool = False,
    causal: bool = True,
) -> Handle:
    """The kernel that the card's dispatcher takes; what it gives lies as the queries do.

    ``spread``: a single key head is handed over as it is, for all heads of queries.
    """
    run = query.run
    batch, heads, length, width = query.shape
    spec = score_spec(heads, key.shape[1], width, value.shape[-1], probability, causal=causal)
    kernel = _kernel_of(query, key, value, mask, probability, grouped=grouped, spread=spread)
    if run.autocast is not None:
        if mask is not None and mask.dtype is not DType.BOOL:
            mask = mask.to(run.autocast)
        value, key, query = (each.to(run.autocast) for each in (value, key, query))
    sizes = _sizes(run, batch, length, key.shape[2], spec)
    added = None if mask is None else mask.record
    given = query.laid(), key.laid(), value.laid()
    out = _through(run, kernel, given, sizes, added, spread=spread)
    del given
    made_width = value.shape[-1]
    if out.by_head:
        made = Handle(run, out, (batch, heads, length, made_width))
    else:
        made = Handle(run, out, (batch, length, heads, made_width)).transpose(1, 2)
    for each in (query, key, value):
        each.leads_to(made, _of_kernel(kernel, each))
    return made


def _of_kernel(kernel: ScoreKernel, x: Handle) -> Rule:
    """How a gradient lies: what is written out gives those of products, in rows; a kernel as it is given heads, but the
    efficient one by tokens (ATen/native/transformers/cuda/attention_backward.cu)."""
    if kernel is ScoreKernel.MATH:
        return in_rows(x.shape)
    _, heads, length, width = x.shape
    if kernel is ScoreKernel.EFFICIENT:
        return always((heads * length * width, width, heads * width, 1))
    return always(dense_strides(x.shape, x.strides))


def _kernel_of(
    query: Handle,
    key: Handle,
    value: Handle,
    mask: Handle | None,
    probability: float,
    *,
    grouped: bool,
    spread: bool,
) -> ScoreKernel:
    run = query.run
    if run.kernels.attention.is_package:
        return ScoreKernel.FLASH
    call = SdpaCall(
        dtype=run.autocast or query.dtype, head_dim=query.shape[-1],
        value_head_dim=value.shape[-1], queries=query.shape[2], keys=key.shape[2],
        masked=mask is not None, trained_mask=mask is not None and mask.requires_grad,
        dropout=dropout_probability(run, probability) > 0, grouped=grouped, spread=spread,
    )  # fmt: skip
    return run.sdpa_kernel(call)


def _sizes(run: Run, batch: int, queries: int, keys: int, spec: AttentionSpec) -> Sizes:
    """Of the call; the package is told each sequence of one row."""
    if run.kernels.attention.is_package and run.options.packing is Packing.PADDING_FREE:
        batch = run.options.num_sequences
        queries //= batch
        return Sizes(batch, queries, queries, spec, is_varlen=True)
    return Sizes(batch, queries, keys, spec)


def _through(
    run: Run,
    kernel: ScoreKernel,
    given: tuple[Tensor, Tensor, Tensor],
    sizes: Sizes,
    mask: Tensor | None,
    *,
    spread: bool,
) -> Tensor:
    group = run.options.context_parallel
    if group is not None and group.kind is ContextParallelKind.RING:
        from memplan.graph.attention.ring import ring_attention  # only where sequences are shared

        return ring_attention(run, group, kernel, *given, sizes)
    if kernel is ScoreKernel.FLASH:
        return flash(run, *given, sizes)
    if kernel is ScoreKernel.CUDNN:
        return cudnn(run, *given, sizes, mask)
    if kernel is ScoreKernel.EFFICIENT:
        return efficient(run, *given, sizes, mask)
    return run.contiguous(written_out(run, *given, sizes, mask, spread=spread))


def matmul(left: Handle, right: Handle) -> Handle:
    """``torch.matmul`` of heads: autocast's casts, what ``reshape`` has to copy, the product, a view of it."""
    run = left.run
    batch, heads, rows, inner = left.shape
    columns = right.shape[-1]
    cast_left = left
    if run.autocast is not None:
        right = right.to(run.autocast)
        cast_left = left.to(run.autocast)
    first, second = _merged(cast_left, batch), _merged(right, batch)
    made = empty(run, (batch * heads, rows, columns), first.dtype)
    one, two = first.record, second.record
    saves = ([two] if one.requires_grad else []) + ([one] if two.requires_grad else [])
    run.record(
        OperationKind.MATMUL, (one, two), (made.record,), saves=saves,
        gradients=(Gradient.VIEW, Gradient.VIEW),
        flops=2 * batch * heads * rows * columns * inner,
    )  # fmt: skip
    for each in (first, second):
        each.leads_to(made, in_rows(each.shape))
    del each, cast_left, left
    return made.view(batch, heads, rows, columns)


def _merged(x: Handle, sequences: int) -> Handle:
    """Batch and heads as one dimension, in a view or a copy; one that all sequences share is copied for each."""
    batch, heads, rows, columns = x.shape
    if batch != sequences:
        x = spread_copy(x, (sequences, heads, rows, columns))
    return x.reshape(sequences * heads, rows, columns)
