"""Attention as its kernels run it: what each keeps, and which one torch's dispatcher picks.

``scaled_dot_product_attention`` chooses in the order flash, memory-efficient, math
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Flash wants 16 bits, no mask, equal head
sizes up to 256 and sm_80; the memory-efficient kernel takes masks and fp32 but no grouped queries;
math takes everything and keeps s x s tensors.
"""

from enum import Enum

from memplan.dtypes import DType
from memplan.graph.operations import dropout, softmax
from memplan.graph.segments import RESULT, Gradient
from memplan.graph.selective import recomputes_core_attention, region_since
from memplan.graph.tape import Tape
from memplan.graph.tensors import ALLOCATION_ROUNDING, Tensor, allocated_bytes
from memplan.model.attention import AttentionSpec
from memplan.records import dataclass
from memplan.training.kernels import AttentionKernel
from memplan.units import ceil_div, round_up

MAX_FLASH_HEAD_DIM = 256
"""Largest head that flash attention takes (csrc/flash_attn/flash_api.cpp)."""
FLASH_HEAD_MULTIPLE = 8
"""Heads are padded to a multiple of this before flash attention."""
EFFICIENT_STATISTICS_MULTIPLE = 32
"""The memory-efficient kernel pads its log-sum-exp to a multiple of this many rows."""


class ScoreKernel(Enum):
    """What computes the scores in the end."""

    EAGER = "eager"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


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


def choose_kernel(t: Tape, shape: Shape, dtype: DType, *, masked: bool) -> ScoreKernel:
    """Return the kernel that a call of this shape ends in."""
    own = shape.spec.softcap or shape.spec.own_eager
    if t.kernels.attention is AttentionKernel.EAGER or own:
        return ScoreKernel.EAGER
    if t.kernels.attention is AttentionKernel.FLASH:
        return ScoreKernel.FLASH
    half = (t.autocast or dtype).is_half
    head_dim = shape.spec.head_dim
    equal = shape.spec.value_head_dim in {None, head_dim}
    fits = half and not masked and equal and head_dim <= MAX_FLASH_HEAD_DIM
    if fits:
        t.flash_decides = True
        if t.options.flash_available:
            return ScoreKernel.FLASH
    if shape.groups > 1 and not masked and head_dim <= MAX_FLASH_HEAD_DIM:
        return ScoreKernel.MATH
    return ScoreKernel.EFFICIENT


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
    masked = mask is not None or bias is not None
    kernel = choose_kernel(t, shape, query.dtype, masked=masked)
    if kernel is ScoreKernel.EAGER:
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
    if bias is not None:
        from memplan.graph.relative import bias_mask  # only for T5 and its kin

        mask = bias_mask(t, bias, shape.spec, shape.queries * shape.keys)
    if shape.groups > 1 and kernel is ScoreKernel.EFFICIENT:
        key, value = expand_heads(t, key, shape), expand_heads(t, value, shape)
    held = (query, key, value)
    cast: tuple[Tensor, ...] = (value, key, query)
    given_mask = mask
    if t.autocast is not None:
        if mask is not None and mask.dtype is not DType.BOOL:
            mask = t.cast(mask, t.autocast)
        value, key, query = cast = tuple(t.cast(x, t.autocast) for x in reversed(held))
    if kernel is ScoreKernel.FLASH:
        out = flash(t, query, key, value, shape)
        if out.by_head:
            out = t.contiguous(out)
    elif kernel is ScoreKernel.EFFICIENT:
        out = efficient(t, query, key, value, shape, mask)
    else:
        out = t.contiguous(math(t, query, key, value, shape))
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
    out.by_head = query.by_head and not padding
    statistics = t.tensor(shape.rows * shape.spec.num_heads, DType.FP32)
    random_state = _random_state(t)
    t.record(
        "flash_attention", (query, key, value), (out, statistics, *random_state),
        saves=(key, query, value, statistics, out, *random_state),
        gradients=(Gradient.FRESH,) * 3,
        backward_scratch_bytes=flash_backward_scratch(t, shape, out),
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


def flash_backward_scratch(t: Tape, shape: Shape, out: Tensor | None = None) -> tuple[int, ...]:
    """Blocks of scratch inside flash attention's backward kernel [bytes].

    An fp32 row statistic, an fp32 accumulator of dq with rows padded to 128 and heads to a multiple
    of 32, and dk and dv expanded to every query head (csrc/flash_attn/flash_api.cpp,
    ``mha_bwd``). It is counted as ``kernel_scratch``, not where the tape imitates fake tensors.
    """
    if t.decomposed:
        return ()
    spec = shape.spec
    rows = shape.batch * (-(-shape.queries // 128) * 128)
    heads = spec.num_heads
    accumulator = rows * heads * (-(-spec.head_dim // 32) * 32) * 4
    blocks: tuple[int, ...] = (rows * heads * 4, accumulator)
    if shape.groups > 1:
        expanded = shape.batch * shape.keys * heads * spec.head_dim * DType.BF16.num_bytes
        blocks += (expanded, expanded)
    inner = tuple(round_up(size, ALLOCATION_ROUNDING) for size in blocks)
    if out is not None and out.by_head:
        # ``_flash_attention_backward`` wants its output in rows.
        return (out.storage.num_bytes, RESULT, *inner)
    return inner


def efficient(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape, mask: Tensor | None
) -> Tensor:
    """Memory-efficient attention: as flash, with a mask in the queries' dtype, kept too."""
    if mask is not None and mask.dtype is DType.BOOL:
        mask = _mask_to_bias(t, mask, shape, query.dtype)
    elif mask is not None and t.autocast is not None:
        mask = t.cast(mask, t.autocast)
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
        gradients=gradients, backward_scratch_bytes=efficient_backward_scratch(t, shape, out),
        flops=_score_flops(shape),
    )  # fmt: skip
    return out


EFFICIENT_TILE = 64
"""Rows and columns of the tiles in which the queries' gradient is summed in fp32."""
EFFICIENT_TILE_HEADER_BYTES = 16
"""A lock and a counter before each tile (``GradQTempStorage``)."""


def efficient_backward_scratch(t: Tape, shape: Shape, out: Tensor) -> tuple[int, ...]:
    """Blocks of scratch inside memory-efficient attention's backward kernel [bytes].

    One number for each row and head, which in fp32 is a sum of the product of output and gradient,
    and the queries' gradient in tiles (transformers/cuda/attention_backward.cu,
    ``_efficient_attention_backward``; mem_eff_attention/kernel_backward.h, ``workspace_elements_gq``).
    """
    if t.decomposed:
        return ()
    spec = shape.spec
    delta = allocated_bytes(shape.rows * spec.num_heads, DType.FP32)
    tiles = ceil_div(shape.queries, EFFICIENT_TILE) * ceil_div(spec.head_dim, EFFICIENT_TILE)
    tile = EFFICIENT_TILE * EFFICIENT_TILE * DType.FP32.num_bytes + EFFICIENT_TILE_HEADER_BYTES
    workspace = round_up(shape.batch * spec.num_heads * tiles * tile, ALLOCATION_ROUNDING)
    if out.dtype is DType.FP32:
        return (out.storage.num_bytes, delta, delta, ~1, ~0, workspace, ~2)
    return (delta, workspace, ~0)


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
    t.record(
        "mask_to_bias",
        (mask,),
        (additive,),
        forward_scratch_bytes=allocated_bytes(numel, DType.BOOL),
    )
    return additive


def math(t: Tape, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """The math kernel: scores written out, 16 bits in fp32, with a causal mask of its own.

    ``_scaled_dot_product_attention_math`` in aten/src/ATen/native/transformers/attention.cpp.
    Autocast has cast the inputs and is off inside (aten/src/ATen/autocast_mode.h).
    """
    autocast, t.autocast = t.autocast, None
    spec, dtype = shape.spec, query.dtype
    given = (query, key, value)
    accurate = [t.cast(x, DType.FP32) for x in given]
    query, key, value = t.scale(accurate[0]), accurate[1], accurate[2]
    mask = _causal_bias(t, shape) if spec.causal else None
    if shape.groups > 1:
        key, value = repeat_heads(t, key, shape), repeat_heads(t, value, shape)
    right, left = t.scale(key), merged_heads(t, query, shape)
    scores = batched_matmul(t, left, right, shape.scores, spec.head_dim)
    if mask is not None:
        scores = t.add(scores, mask)
    weights = dropout(t, _safe_softmax(t, scores), spec.dropout)
    out = batched_matmul(t, weights, value, shape.outputs, shape.keys)
    result = t.cast(out, dtype)
    if dtype is not DType.FP32:
        t.cast(weights, dtype)
    t.touch(*given, *accurate, query, key, out, result)
    t.autocast = autocast
    if mask is not None:
        t.touch(mask)
    return result


def _causal_bias(t: Tape, shape: Shape) -> Tensor:
    ones = t.tensor(shape.queries * shape.keys, DType.BOOL)
    t.record("ones", (), (ones,))
    lower = t.tensor(ones.numel, DType.BOOL)
    t.record("tril", (ones,), (lower,))
    bias = t.tensor(ones.numel, DType.FP32)
    t.record("where", (lower,), (bias,))
    return bias


def _safe_softmax(t: Tape, scores: Tensor) -> Tensor:
    """Softmax whose fully masked rows are zero: CUDA compares the scores and copies the result."""
    out = t.tensor(scores.numel, scores.dtype)
    scratch = 0
    if not t.decomposed:
        scratch = allocated_bytes(scores.numel, DType.BOOL) + out.storage.num_bytes
    t.record(
        "safe_softmax", (scores,), (out,), saves=(out,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=scratch,
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


def splits_heads(t: Tape, shape: Shape, dtype: DType, *, masked: bool) -> bool:
    """Whether the scores are products of heads written out, whose gradients lie head by head."""
    return choose_kernel(t, shape, dtype, masked=masked) is ScoreKernel.EAGER


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
    if shape.batch == 1 or shape.spec.num_heads == 1:
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
