"""Attention as torch's kernels run it: what each one keeps.

cuDNN and flash keep no scores; the memory-efficient kernel keeps the mask too; math keeps s x s
tensors. What a kernel needs only while it runs is ``memplan.graph.attention.scratch``.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import (
    Shape,
    batched_matmul,
    merged_heads,
    repeat_heads,
    spread_head,
)
from memplan.graph.attention.scratch import (
    FLASH_HEAD_MULTIPLE,
    cudnn_backward_scratch,
    cudnn_forward_scratch,
    efficient_backward_scratch,
    efficient_forward_scratch,
    flash3_backward_scratch,
    flash_backward_scratch,
    flash_forward_scratch,
)
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.elementwise import dropout
from memplan.training.choices_of_kernels.kernels import AttentionKernel
from memplan.units import round_up

EFFICIENT_STATISTICS_MULTIPLE = 32
"""The memory-efficient kernel pads its log-sum-exp to a multiple of this many rows."""


def flash(t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """Flash attention: keeps q, k, v, its output and an fp32 log-sum-exp per row and head."""
    head_dim = shape.spec.head_dim
    padding = -head_dim % FLASH_HEAD_MULTIPLE
    if padding:
        query, key, value = (_pad(t, x, head_dim, padding) for x in (query, key, value))
    out = t.tensor(query.numel, query.dtype)
    # Padded heads lie before the rows: backward copies the result and its gradient into rows.
    copies = (out.storage.num_bytes, out.storage.num_bytes, RESULT) if padding else ()
    out.by_head = query.by_head and not padding
    statistics = t.tensor(shape.rows * shape.spec.num_heads, DType.FP32)
    third = t.kernels.attention is AttentionKernel.FLASH3
    random_state = () if third else _random_state(t)
    inner = flash3_backward_scratch(shape) if third else flash_backward_scratch(shape, out)
    t.record(
        OperationKind.FLASH_ATTENTION, (query, key, value), (out, statistics, *random_state),
        saves=(key, query, value, statistics, out, *random_state),
        gradients=(Gradient.FRESH,) * 3,
        forward_scratch_bytes=() if third else flash_forward_scratch(t, shape),
        backward_scratch_bytes=() if t.decomposed else (*copies, *inner),
        flops=_score_flops(shape),
    )  # fmt: skip
    if padding:
        out = t.contiguous(t.slice(out, shape.rows * shape.spec.num_heads * head_dim))
    return out


def _random_state(t: Tape) -> tuple[Tensor, Tensor]:
    """Seed and offset from which backward draws the dropout again, there even without one."""
    return t.tensor(2, DType.INT64), t.tensor(1, DType.INT64)


def _pad(t: Tape, x: Tensor, head_dim: int, padding: int) -> Tensor:
    out = t.tensor(x.numel // head_dim * (head_dim + padding), x.dtype)
    t.record(OperationKind.PAD, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def cudnn(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape, mask: Tensor | None
) -> Tensor:
    """cuDNN's attention: as flash, and takes masks, which it keeps.

    Seed and offset are made before its results, and are there until it returns
    (aten/src/ATen/native/transformers/cuda/attention.cu).
    """
    mask = _additive(t, mask, shape, query.dtype)
    random_state = (t.tensor(1, DType.INT64), t.tensor(1, DType.INT64))
    t.record(OperationKind.TO, (), random_state)
    out = t.tensor(shape.outputs, query.dtype)
    out.by_head = query.by_head
    statistics = t.tensor(shape.rows * shape.spec.num_heads, DType.FP32)
    inputs = (query, key, value) if mask is None else (query, key, value, mask)
    t.record(
        OperationKind.CUDNN_ATTENTION, inputs, (out, statistics),
        saves=(*inputs[3:], key, query, value, statistics, out, *random_state),
        gradients=(Gradient.FRESH,) * 3 + (Gradient.NONE,) * (mask is not None),
        forward_scratch_bytes=cudnn_forward_scratch(t),
        backward_scratch_bytes=cudnn_backward_scratch(t, shape, key),
        flops=_score_flops(shape),
    )  # fmt: skip
    t.touch(*random_state)
    return out


def efficient(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape, mask: Tensor | None
) -> Tensor:
    """Memory-efficient attention: as flash, with a mask in the queries' dtype, kept too.

    Its seed and offset are in CPU RAM (aten/src/ATen/native/transformers/cuda/attention.cu,
    ``_efficient_attention_forward``); torch's fake kernel makes them on the GPU.
    """
    mask = _additive(t, mask, shape, query.dtype)
    if mask is not None:
        mask = _aligned(t, mask, shape)
        if mask.requires_grad:
            mask = _expanded(t, mask, shape)
    out = t.tensor(shape.outputs, query.dtype)
    padded = -(-shape.queries // EFFICIENT_STATISTICS_MULTIPLE) * EFFICIENT_STATISTICS_MULTIPLE
    statistics = t.tensor(shape.batch * shape.spec.num_heads * padded, DType.FP32)
    random_state = _random_state(t) if t.decomposed else ()
    inputs: tuple[Tensor, ...] = (query, key, value)
    if mask is not None:
        inputs += (mask,)
    gradients: tuple[int, ...] = (Gradient.FRESH,) * 3
    if mask is not None:
        gradients += (Gradient.FRESH if mask.requires_grad else Gradient.NONE,)
    t.record(
        OperationKind.EFFICIENT_ATTENTION, inputs, (out, statistics, *random_state),
        saves=(*inputs[3:], key, query, value, statistics, out, *random_state),
        gradients=gradients,
        forward_scratch_bytes=efficient_forward_scratch(t, query.dtype, shape),
        backward_scratch_bytes=efficient_backward_scratch(t, query.dtype, shape, out),
        flops=_score_flops(shape),
    )  # fmt: skip
    return out


def _additive(t: Tape, mask: Tensor | None, shape: Shape, dtype: DType) -> Tensor | None:
    """The mask as something to add to the scores, in autocast's dtype."""
    if mask is None:
        return None
    if mask.dtype is DType.BOOL:
        return _mask_to_bias(t, mask, shape, dtype)
    return mask if t.autocast is None else t.cast(mask, t.autocast)


MASK_MULTIPLE = 8
"""Rows of a mask for the memory-efficient kernel begin at a multiple of this many elements (torch 2.13,
aten/src/ATen/native/transformers/attention.cpp, ``pad_bias`` and ``preprocess_mask``)."""
MASK_GRADIENT_MULTIPLE = 16
"""Those of its gradient (transformers/cuda/attention_backward.cu, ``alignTo``)."""


def _aligned(t: Tape, mask: Tensor, shape: Shape) -> Tensor:
    """A mask whose rows do not is copied into longer ones, of which it is a view."""
    keys = shape.keys
    if not keys % MASK_MULTIPLE:
        return mask
    padded = t.tensor(mask.numel // keys * round_up(keys, MASK_MULTIPLE), mask.dtype)
    t.record(OperationKind.PAD, (mask,), (padded,), gradients=(Gradient.FRESH,))
    return t.slice(padded, mask.numel)


def _expanded(t: Tape, mask: Tensor, shape: Shape) -> Tensor:
    """A view for every sequence of the batch, whose gradient is summed over them.

    It is as large as that gradient is made, in rows of ``MASK_GRADIENT_MULTIPLE``.
    """
    row = round_up(shape.keys, MASK_GRADIENT_MULTIPLE)
    if shape.batch == 1 and row == shape.keys:
        return mask
    out = t.view(mask, shape.scores // shape.keys * row)
    kind = Gradient.ALIAS if shape.batch == 1 else Gradient.FRESH
    t.record(OperationKind.EXPAND, (mask,), (out,), gradients=(kind,))
    return out


def _mask_to_bias(t: Tape, mask: Tensor, shape: Shape, dtype: DType) -> Tensor:
    """torch's ``convert_boolean_attn_mask``: an additive copy for every sequence of the batch."""
    numel = shape.batch * shape.queries * shape.keys
    additive = t.tensor(numel, dtype)
    negated = allocated_bytes(numel, DType.BOOL) if t.decomposed else 0
    t.record(OperationKind.MASK_TO_BIAS, (mask,), (additive,), forward_scratch_bytes=negated)
    return additive


def math(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    mask: Tensor | None = None,
    *,
    spread: bool = False,
) -> Tensor:
    """The math kernel: scores written out, 16 bits in fp32, with a causal mask of its own.

    ``spread``: one key/value head is multiplied by all query heads, as any product of tensors would.

    ``_scaled_dot_product_attention_math`` in aten/src/ATen/native/transformers/attention.cpp.
    Autocast has cast the inputs and is off inside (aten/src/ATen/autocast_mode.h).
    """
    spec, dtype = shape.spec, query.dtype
    mask = _additive(t, mask, shape, dtype)
    autocast, t.autocast = t.autocast, None
    given = (query, key, value)
    accurate = [t.cast(x, DType.FP32) for x in given]
    query, key, value = _scaled(t, accurate[0]), accurate[1], accurate[2]
    if mask is None and spec.causal and shape.queries > 1:
        mask = _causal_bias(t, shape)
    heads_of = spread_head if spread else merged_heads
    if not spread and key.numel < shape.batch * shape.keys * spec.num_heads * spec.head_dim:
        key, value = repeat_heads(t, key, shape), repeat_heads(t, value, shape)
    scaled_key = _scaled(t, key)
    left, right = _turned(t, query, shape), heads_of(t, scaled_key, shape)
    scores = batched_matmul(t, left, right, shape.scores, spec.head_dim)
    t.touch(scaled_key)
    if mask is not None:
        scores = _add_in_place(t, scores, mask)
    weights = dropout(t, _safe_softmax(t, scores, shape.rows * spec.num_heads), spec.dropout)
    returned = t.cast(weights, dtype)
    merged = heads_of(t, value, shape)
    out = batched_matmul(t, weights, merged, shape.outputs, shape.keys)
    out = _split_into_heads(t, out, shape)
    result = t.cast(out, dtype)
    t.touch(*given, *accurate, query, key, value, weights, returned, out, result)
    t.autocast = autocast
    if mask is not None:
        t.touch(mask)
    return result


def _split_into_heads(t: Tape, out: Tensor, shape: Shape) -> Tensor:
    """What a product of heads gave, heads apart again: of several sequences its gradient is copied into rows."""
    if shape.batch == 1:
        return out
    seen = t.view(out, out.numel)
    seen.by_head = out.by_head
    t.record(OperationKind.VIEW, (out,), (seen,), gradients=(Gradient.FRESH,))
    return seen


def _turned(t: Tape, query: Tensor, shape: Shape) -> Tensor:
    """Queries as a batched product takes them; their gradient stays as it comes, since it is only scaled."""
    if t.decomposed or query.by_head or shape.heads_split:
        return merged_heads(t, query, shape)
    return query if 1 in (shape.batch, shape.queries) else t.contiguous(query)


def _scaled(t: Tape, x: Tensor) -> Tensor:
    out = t.scale(x)
    out.by_head = x.by_head
    return out


def _add_in_place(t: Tape, scores: Tensor, mask: Tensor) -> Tensor:
    """``scores.add_(mask)``; the gradient of a trained mask is summed over what it was spread over."""
    out = t.view(scores, scores.numel)
    spread = mask.numel < scores.numel and mask.dtype is not scores.dtype
    summed = allocated_bytes(mask.numel, scores.dtype) if spread else Gradient.FRESH
    kind = summed if mask.requires_grad else Gradient.NONE
    t.record(OperationKind.ADD_IN_PLACE, (scores, mask), (out,), gradients=(Gradient.ALIAS, kind))
    return out


def _causal_bias(t: Tape, shape: Shape) -> Tensor:
    ones = t.tensor(shape.queries * shape.keys, DType.BOOL)
    t.record(OperationKind.ONES, (), (ones,))
    lower = t.tensor(ones.numel, DType.BOOL)
    t.record(OperationKind.TRIL, (ones,), (lower,))
    bias = t.tensor(ones.numel, DType.FP32)
    t.record(OperationKind.WHERE, (lower,), (bias,))
    return bias


def _safe_softmax(t: Tape, scores: Tensor, rows: int) -> Tensor:
    """Softmax whose fully masked rows are zero: CUDA looks for them in a comparison of the scores."""
    out = t.tensor(scores.numel, scores.dtype)
    compared: tuple[int, ...] = ()
    product = 0
    if not t.decomposed:
        sizes = (scores.numel, rows, 1)
        compared = tuple(allocated_bytes(size, DType.BOOL) for size in sizes)
        product = out.storage.num_bytes
    t.record(
        OperationKind.SAFE_SOFTMAX, (scores,), (out,), saves=(out,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=compared, backward_scratch_bytes=product,
    )  # fmt: skip
    return out


def _score_flops(shape: Shape) -> int:
    spec = shape.spec
    return 2 * shape.scores * (spec.head_dim + (spec.value_head_dim or spec.head_dim))
