"""Attention as its kernels run it: what each one keeps, and what it needs besides.

Which kernel torch's dispatcher picks is ``memplan.training.sdpa``. cuDNN and flash keep no scores;
the memory-efficient kernel keeps the mask too; math keeps s x s tensors.
"""

from memplan.dtypes import DType
from memplan.graph.operations import dropout, dropout_probability, softmax
from memplan.graph.segments import RESULT, Gradient
from memplan.graph.selective import recomputes_core_attention, region_since
from memplan.graph.tape import Tape
from memplan.graph.tensors import ALLOCATION_ROUNDING, Tensor, allocated_bytes
from memplan.model.attention import AttentionSpec
from memplan.records import dataclass
from memplan.training.kernels import AttentionKernel
from memplan.training.sdpa import MAX_FLASH_HEAD_DIM, ScoreKernel, SdpaCall
from memplan.units import round_up

FLASH_HEAD_MULTIPLE = 8
"""Heads are padded to a multiple of this before flash attention."""
EFFICIENT_STATISTICS_MULTIPLE = 32
"""The memory-efficient kernel pads its log-sum-exp to a multiple of this many rows."""
NARROW_TILE, WIDE_TILE = 64, 128
"""Rows and columns of the memory-efficient kernel's tiles; heads beyond the latter are wide."""
KEY_BLOCKS = 200
"""Blocks of keys over all heads that have gradients of their own in that kernel, at most."""
CUDNN_FORWARD_BYTES = 256
"""Workspace of cuDNN's forward plan (cuDNN 9.20)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one attention call [elements]."""

    batch: int
    queries: int
    keys: int
    spec: AttentionSpec
    heads_split: bool = False
    """``as_heads`` was recorded behind the projections, so that their gradients are laid out there."""

    @property
    def rows(self) -> int:
        """Query rows over the batch."""
        return self.batch * self.queries

    @property
    def scores(self) -> int:
        """Elements of the full score matrix of all heads."""
        return self.batch * self.spec.num_heads * self.queries * self.keys

    @property
    def outputs(self) -> int:
        """Elements that come out for all heads."""
        spec = self.spec
        return self.rows * spec.num_heads * (spec.value_head_dim or spec.head_dim)

    @property
    def groups(self) -> int:
        """Query heads for each key/value head."""
        return self.spec.num_heads // self.spec.num_kv_heads

    @property
    def value_head_dim(self) -> int:
        """Size of a value's head."""
        return self.spec.value_head_dim or self.spec.head_dim


def attend(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    mask: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Scores, softmax and the weighted values, through the kernel that would really run.

    ``bias`` is a position bias, heads x queries x keys.
    """
    if splits_heads(t, shape.spec):
        return _written_out(t, query, key, value, shape, mask, bias)
    if bias is not None:
        from memplan.graph.relative import bias_mask  # only for T5 and its kin

        mask = bias_mask(t, bias, shape.spec, shape.queries * shape.keys)
    if t.kernels.attention is AttentionKernel.FLASH:
        return _through(t, ScoreKernel.FLASH, query, key, value, shape, None)
    grouped = shape.groups > 1
    if grouped and not _keeps_groups(shape, mask):
        key, value = expand_heads(t, key, shape), expand_heads(t, value, shape)
        grouped = False
    return sdpa(t, query, key, value, shape, mask, grouped=grouped)


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
    bias: Tensor | None,
) -> Tensor:
    start = len(t.segment.operations)
    if shape.spec.own_eager:
        from memplan.graph.sinks import sink_attention  # only for gpt-oss and MiMo-V2

        out = sink_attention(t, query, key, value, shape, mask)
    elif t.kernels.fused_elementwise:
        out = eager_fused(t, query, key, value, shape)
    else:
        out = eager(t, query, key, value, shape, mask, bias)
    if recomputes_core_attention(t):
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
) -> Tensor:
    """``scaled_dot_product_attention`` through the kernel that the card's dispatcher takes.

    ``grouped``: key/value heads were not written out for every query head.
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
    )
    return _through(t, t.sdpa_kernel(call), query, key, value, shape, mask)


def _through(
    t: Tape,
    kernel: ScoreKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    mask: Tensor | None,
) -> Tensor:
    held = (query, key, value)
    cast: tuple[Tensor, ...] = (value, key, query)
    given_mask = mask
    if t.autocast is not None:
        if mask is not None and mask.dtype is not DType.BOOL:
            mask = t.cast(mask, t.autocast)
        value, key, query = cast = tuple(t.cast(x, t.autocast) for x in reversed(held))
    if kernel is ScoreKernel.FLASH:
        out = flash(t, query, key, value, shape)
    elif kernel is ScoreKernel.CUDNN:
        out = cudnn(t, query, key, value, shape, mask)
    elif kernel is ScoreKernel.EFFICIENT:
        out = efficient(t, query, key, value, shape, mask)
    else:
        out = t.contiguous(math(t, query, key, value, shape, mask))
    if out.by_head:
        out = t.contiguous(out)
    t.touch(*reversed(cast))
    if mask is not None:
        t.touch(mask)
    t.touch(*held)
    if given_mask is not None:
        t.touch(given_mask)
    return out


def expand_heads(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """``repeat_kv``: a copy of keys or values for every query head; of a single head, a view."""
    if shape.groups == 1:
        return x
    if shape.spec.num_kv_heads > 1:
        return repeat_heads(t, x, shape)
    out = t.view(x, x.numel * shape.groups)
    t.record("expand", (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def repeat_heads(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """``repeat_interleave``: a copy of keys or values for every query head."""
    out = t.tensor(x.numel * shape.groups, x.dtype)
    t.record("repeat_kv", (x,), (out,), gradients=(Gradient.FRESH,))
    out.by_head = True
    return out


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
    random_state = _random_state(t)
    t.record(
        "flash_attention", (query, key, value), (out, statistics, *random_state),
        saves=(key, query, value, statistics, out, *random_state),
        gradients=(Gradient.FRESH,) * 3,
        backward_scratch_bytes=() if t.decomposed else (*copies, *flash_backward_scratch(shape, out)),
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
    t.record("pad", (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def flash_backward_scratch(shape: Shape, out: Tensor) -> tuple[int, ...]:
    """Blocks of scratch inside flash attention's backward kernel [bytes].

    An fp32 row statistic, an fp32 accumulator of dq with rows padded to 128 and heads to a multiple
    of 32, and dk and dv expanded to every query head (csrc/flash_attn/flash_api.cpp,
    ``mha_bwd``). It is counted as ``kernel_scratch``, not where the tape imitates fake tensors.
    """
    spec = shape.spec
    rows = shape.batch * (-(-shape.queries // 128) * 128)
    heads = spec.num_heads
    accumulator = rows * heads * (-(-spec.head_dim // 32) * 32) * 4
    blocks: tuple[int, ...] = (rows * heads * 4, accumulator)
    if shape.groups > 1:
        expanded = shape.batch * shape.keys * heads * spec.head_dim * DType.BF16.num_bytes
        blocks += (expanded, expanded)
    inner = tuple(_rounded(size) for size in blocks)
    if out.by_head:
        # ``_flash_attention_backward`` wants its output in rows.
        return (out.storage.num_bytes, RESULT, *inner)
    return inner


def cudnn(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape, mask: Tensor | None
) -> Tensor:
    """cuDNN's attention: as flash, and takes masks, which it keeps."""
    random_state = (t.tensor(1, DType.INT64), t.tensor(1, DType.INT64))
    mask = _additive(t, mask, shape, query.dtype)
    out = t.tensor(shape.outputs, query.dtype)
    out.by_head = query.by_head
    statistics = t.tensor(shape.rows * shape.spec.num_heads, DType.FP32)
    inputs = (query, key, value) if mask is None else (query, key, value, mask)
    t.record(
        "cudnn_attention", inputs, (out, statistics, *random_state),
        saves=(*inputs[3:], key, query, value, statistics, out, *random_state),
        gradients=(Gradient.FRESH,) * 3 + (Gradient.NONE,) * (mask is not None),
        forward_scratch_bytes=0 if t.decomposed else _rounded(CUDNN_FORWARD_BYTES),
        backward_scratch_bytes=_rounded(cudnn_backward_scratch_bytes(t, shape, key)),
        flops=_score_flops(shape),
    )  # fmt: skip
    return out


def cudnn_backward_scratch_bytes(t: Tape, shape: Shape, key: Tensor) -> int:
    """Workspace of cuDNN's backward plan [bytes]: an fp32 dq, a sum for each row of it, and where
    key heads serve several query heads, dk and dv of every query head.

    cuDNN 9.20 asks for as much, on cards described to it, and what it asks for in the forward pass.
    """
    if t.decomposed:
        return 0
    spec = shape.spec
    rows = shape.rows * spec.num_heads
    found = 4 * rows * (spec.head_dim + 1) + CUDNN_FORWARD_BYTES
    heads = key.numel // (shape.batch * shape.keys * spec.head_dim)
    if heads < spec.num_heads:
        widths = spec.head_dim + shape.value_head_dim
        found += 2 * shape.batch * shape.keys * spec.num_heads * widths
    return found


def efficient(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape, mask: Tensor | None
) -> Tensor:
    """Memory-efficient attention: as flash, with a mask in the queries' dtype, kept too."""
    mask = _additive(t, mask, shape, query.dtype)
    if mask is not None and mask.requires_grad:
        mask = _expanded(t, mask, shape)
    out = t.tensor(shape.outputs, query.dtype)
    padded = -(-shape.queries // EFFICIENT_STATISTICS_MULTIPLE) * EFFICIENT_STATISTICS_MULTIPLE
    statistics = t.tensor(shape.batch * shape.spec.num_heads * padded, DType.FP32)
    random_state = _random_state(t)
    inputs: tuple[Tensor, ...] = (query, key, value)
    if mask is not None:
        inputs += (mask,)
    gradients: tuple[int, ...] = (Gradient.FRESH,) * 3
    if mask is not None:
        gradients += (Gradient.FRESH if mask.requires_grad else Gradient.NONE,)
    t.record(
        "efficient_attention", inputs, (out, statistics, *random_state),
        saves=(*inputs[3:], key, query, value, statistics, out, *random_state),
        gradients=gradients,
        forward_scratch_bytes=_rounded(efficient_forward_scratch_bytes(t, query.dtype, shape)),
        backward_scratch_bytes=efficient_backward_scratch(t, query.dtype, shape, out),
        flops=_score_flops(shape),
    )  # fmt: skip
    return out


def efficient_forward_scratch_bytes(t: Tape, dtype: DType, shape: Shape) -> int:
    """An fp32 output, where heads are too large for the registers and the result is narrower."""
    if t.decomposed or not dtype.is_half or not _is_wide(shape):
        return 0
    return 4 * shape.outputs


def efficient_backward_scratch(t: Tape, dtype: DType, shape: Shape, out: Tensor) -> tuple[int, ...]:
    """Blocks of scratch in the memory-efficient kernel's backward pass [bytes].

    A number for each row and an fp32 dq in tiles; where heads are wide and the
    gradients narrower than fp32, dk and dv in fp32 too (transformers/cuda/mem_eff_attention/
    kernel_backward.h, ``workspace_size``).
    """
    if t.decomposed:
        return ()
    heads = shape.batch * shape.spec.num_heads
    head_dim, values = shape.spec.head_dim, shape.value_head_dim
    wide = dtype.is_half and _is_wide(shape)
    tile = NARROW_TILE if not wide else WIDE_TILE
    columns = NARROW_TILE if not dtype.is_half or wide or head_dim <= NARROW_TILE else WIDE_TILE
    found = _padded(shape.queries, tile) * _padded(head_dim, columns)
    if wide:
        blocks = min(-(-shape.keys // NARROW_TILE), max(1, KEY_BLOCKS // heads))
        keys = blocks * NARROW_TILE
        found += keys * (_padded(head_dim, WIDE_TILE) + _padded(values, WIDE_TILE))
    sums, workspace = (_rounded(4 * heads * size) for size in (shape.queries, found))
    if dtype is DType.FP32:
        # The product of output and gradient first, whose rows are then summed.
        return (out.storage.num_bytes, sums, sums, ~1, ~0, workspace, ~2)
    return (sums, workspace, ~0)


def _is_wide(shape: Shape) -> bool:
    return max(shape.spec.head_dim, shape.value_head_dim) > WIDE_TILE


def _rounded(num_bytes: int) -> int:
    return round_up(num_bytes, ALLOCATION_ROUNDING)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _additive(t: Tape, mask: Tensor | None, shape: Shape, dtype: DType) -> Tensor | None:
    """The mask as something to add to the scores, in autocast's dtype."""
    if mask is None:
        return None
    if mask.dtype is DType.BOOL:
        return _mask_to_bias(t, mask, shape, dtype)
    return mask if t.autocast is None else t.cast(mask, t.autocast)


def _expanded(t: Tape, mask: Tensor, shape: Shape) -> Tensor:
    """A view for every sequence of the batch; the gradient is summed over them."""
    if shape.batch == 1:
        return mask
    out = t.view(mask, shape.scores)
    t.record("expand", (mask,), (out,), gradients=(Gradient.FRESH,))
    return out


def _mask_to_bias(t: Tape, mask: Tensor, shape: Shape, dtype: DType) -> Tensor:
    """torch's ``convert_boolean_attn_mask``: an additive copy for every sequence of the batch."""
    numel = shape.batch * shape.queries * shape.keys
    additive = t.tensor(numel, dtype)
    negated = allocated_bytes(numel, DType.BOOL) if t.decomposed else 0
    t.record("mask_to_bias", (mask,), (additive,), forward_scratch_bytes=negated)
    return additive


def math(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape, mask: Tensor | None = None
) -> Tensor:
    """The math kernel: scores written out, 16 bits in fp32, with a causal mask of its own.

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
    if key.numel < shape.batch * shape.keys * spec.num_heads * spec.head_dim:
        key, value = repeat_heads(t, key, shape), repeat_heads(t, value, shape)
    left, right = query, _scaled(t, key)
    left, right = merged_heads(t, left, shape), merged_heads(t, right, shape)
    scores = batched_matmul(t, left, right, shape.scores, spec.head_dim)
    if mask is not None:
        scores = _add_in_place(t, scores, mask)
    weights = dropout(t, _safe_softmax(t, scores, shape.rows * spec.num_heads), spec.dropout)
    returned = t.cast(weights, dtype)
    merged = merged_heads(t, value, shape)
    out = batched_matmul(t, weights, merged, shape.outputs, shape.keys)
    result = t.cast(out, dtype)
    t.touch(*given, *accurate, query, key, value, returned, out, result)
    t.autocast = autocast
    if mask is not None:
        t.touch(mask)
    return result


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
    t.record("add_", (scores, mask), (out,), gradients=(Gradient.ALIAS, kind))
    return out


def _causal_bias(t: Tape, shape: Shape) -> Tensor:
    ones = t.tensor(shape.queries * shape.keys, DType.BOOL)
    t.record("ones", (), (ones,))
    lower = t.tensor(ones.numel, DType.BOOL)
    t.record("tril", (ones,), (lower,))
    bias = t.tensor(ones.numel, DType.FP32)
    t.record("where", (lower,), (bias,))
    return bias


def _safe_softmax(t: Tape, scores: Tensor, rows: int) -> Tensor:
    """Softmax whose fully masked rows are zero: CUDA looks for them in a comparison of the scores."""
    out = t.tensor(scores.numel, scores.dtype)
    compared = product = 0
    if not t.decomposed:
        compared = allocated_bytes(scores.numel, DType.BOOL) + allocated_bytes(rows, DType.BOOL)
        product = out.storage.num_bytes
    t.record(
        "safe_softmax", (scores,), (out,), saves=(out,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=compared, backward_scratch_bytes=product,
    )  # fmt: skip
    return out


def eager(
    t: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    mask: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """transformers' ``eager_attention_forward``: fp32 softmax, cast back, dropout."""
    spec = shape.spec
    held: tuple[Tensor, ...] = (query, key, value)
    key, value = expand_heads(t, key, shape), expand_heads(t, value, shape)
    held += (key, value)
    if spec.upcast_reordered:
        query, key = merged_heads(t, query, shape), merged_heads(t, key, shape)
        scores = _reordered_scores(t, query, key, shape)
    else:
        scores = t.scale(_heads_product(t, query, key, shape, shape.scores, spec.head_dim))
    if spec.softcap:
        scores = t.scale(t.elementwise("tanh", t.scale(scores), saves_output=True))
    for added in (bias, mask):
        if added is not None:
            scores = t.add(scores, added)
    weights = softmax(t, scores, dtype=DType.FP32 if spec.fp32_softmax else None)
    if spec.fp32_softmax:
        weights = t.cast(weights, held[0].dtype)
        t.touch(scores)
    elif spec.weights_like_values:
        weights = t.cast(weights, held[2].dtype)
    else:
        t.touch(scores)
    weights = dropout(t, weights, spec.dropout)
    out = _heads_product(t, weights, value, shape, shape.outputs, shape.keys, first_merged=True)
    out = t.contiguous(out) if shape.batch == 1 else t.scale(out, "clone")
    t.touch(*held)
    if spec.names_weights:
        t.linger(weights)
    return out


def _heads_product(
    t: Tape,
    left: Tensor,
    right: Tensor,
    shape: Shape,
    numel: int,
    inner: int,
    *,
    first_merged: bool = False,
) -> Tensor:
    """``torch.matmul`` of heads: autocast's casts, then its own copies, then the product.

    Both live until it returns, the copies a little shorter.
    """
    cast_right = t.cast(right, t.autocast) if t.autocast is not None else right
    cast_left = t.cast(left, t.autocast) if t.autocast is not None else left
    merged_left = cast_left if first_merged else merged_heads(t, cast_left, shape)
    merged_right = merged_heads(t, cast_right, shape)
    out = batched_matmul(t, merged_left, merged_right, numel, inner)
    for made, source in ((merged_right, cast_right), (merged_left, cast_left)):
        if made is not source:
            t.touch(made)
    for made, source in ((cast_left, left), (cast_right, right)):
        if made is not source:
            t.touch(made)
    return out


def _reordered_scores(t: Tape, query: Tensor, key: Tensor, shape: Shape) -> Tensor:
    """GPT-2's ``reorder_and_upcast_attn``: an fp32 ``baddbmm`` outside autocast.

    It is given a blank tensor, and makes another one for its result.
    """
    sources = query, key
    blank = t.tensor(shape.scores, DType.FP32)
    t.record("empty", (), (blank,))
    query, key = t.cast(query, DType.FP32), t.cast(key, DType.FP32)
    scores = t.tensor(shape.scores, DType.FP32)
    t.record(
        "baddbmm", (query, key), (scores,), saves=(query, key), gradients=(Gradient.FRESH,) * 2,
        flops=2 * shape.scores * shape.spec.head_dim,
    )  # fmt: skip
    t.touch(blank, *sources)
    return scores


def eager_fused(t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """Megatron's core attention: one kernel scales, masks and normalizes the scores."""
    spec = shape.spec
    scores = batched_matmul(t, query, key, shape.scores, spec.head_dim)
    weights = t.elementwise("fused_softmax", scores, saves_output=True)
    weights = dropout(t, weights, spec.dropout)
    return t.contiguous(batched_matmul(t, weights, value, shape.outputs, shape.keys))


def splits_heads(t: Tape, spec: AttentionSpec) -> bool:
    """Whether the scores are products of heads written out, whose gradients lie head by head."""
    return bool(t.kernels.attention is AttentionKernel.EAGER or spec.softcap or spec.own_eager)


def as_heads(t: Tape, x: Tensor, num_heads: int) -> Tensor:
    """A projection's rows seen as heads; where there are several, the gradient is copied into rows."""
    out = t.view(x, x.numel)
    gradient = Gradient.ALIAS if num_heads == 1 else Gradient.FRESH
    t.record("view", (x,), (out,), gradients=(gradient,))
    return out


def merged_heads(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """A projection's view with the heads before the rows, as a batched product wants it.

    Batch and heads do not merge into one dimension, so more than one sequence is copied; the
    gradient is copied back into rows either way.
    """
    if x.by_head:
        return x
    if t.autocast is not None:
        x = t.cast(x, t.autocast)
    if shape.heads_split:
        return x if shape.batch == 1 else t.contiguous(x)
    single = x.numel == shape.batch * shape.spec.num_heads * shape.spec.head_dim
    if shape.batch == 1 or shape.spec.num_heads == 1 or single:
        return t.slice(x, x.numel)
    return t.scale(x, "clone")


def batched_matmul(
    t: Tape,
    left: Tensor,
    right: Tensor,
    numel: int,
    inner: int,
    *,
    backward_scratch_bytes: tuple[int, ...] = (),
) -> Tensor:
    """``left @ right`` of two activations: both are kept."""
    if t.autocast is not None:
        right = t.cast(right, t.autocast)
        left = t.cast(left, t.autocast)
    out = t.tensor(numel, left.dtype)
    saves = []
    if left.requires_grad:
        saves.append(right)
    if right.requires_grad:
        saves.append(left)
    t.record(
        "matmul", (left, right), (out,), saves=saves, gradients=(Gradient.FRESH, Gradient.FRESH),
        backward_scratch_bytes=backward_scratch_bytes, flops=2 * numel * inner,
    )  # fmt: skip
    return out


def _score_flops(shape: Shape) -> int:
    spec = shape.spec
    return 2 * shape.scores * (spec.head_dim + (spec.value_head_dim or spec.head_dim))
