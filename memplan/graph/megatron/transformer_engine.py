"""TransformerEngine's modules: norm and product in one, fused rotary embeddings, fused attention.

TransformerEngine 2.11, pytorch/module/layernorm_linear.py (``_LayerNormLinear``), linear.py (``_Linear``),
attention/rope.py (``FusedRoPEFunc``), attention/dot_product_attention/utils.py (``get_qkv_layout``).
Userbuffers (``tp_comm_overlap``) are off.
"""

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.kernels import cudnn, flash
from memplan.graph.attention.ring import ring_sends
from memplan.graph.attention.scratch import cudnn_backward_scratch, flash_backward_scratch
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.megatron.attention import core_attention, rotary
from memplan.graph.megatron.context import MegatronContext
from memplan.graph.megatron.narrow import Narrow, narrow_formats, narrow_product, narrow_sends
from memplan.graph.megatron.norms import norm_weights
from memplan.graph.megatron.parallel import column_sends, multiplied, row_sends
from memplan.graph.operations.elementwise import dropout_probability
from memplan.model.attention import AttentionSpec
from memplan.model.norms import NormSpec
from memplan.training.choices_of_kernels.fp8 import Fp8Formats
from memplan.training.choices_of_kernels.sdpa import ScoreKernel, SdpaCall
from memplan.training.splitting.exchange import ExchangeKind, Group, both_ways

FUSED_KERNELS = (ScoreKernel.CUDNN, ScoreKernel.FLASH)


def norm_linear(
    c: MegatronContext,
    x: Tensor,
    spec: NormSpec,
    name: str,
    weight: Parameter,
    bias: Parameter | None = None,
) -> Tensor:
    """Keeps its input, the normed input and its statistics, which are this rank's share.

    With sequence parallelism the normed input is gathered for the product, and in backward again; the
    whole input gradient stays until the function returns.
    """
    formats = narrow_formats(c)
    if formats is not None:
        return _narrow_norm_linear(c, formats, x, spec, name, weight, bias)
    t = c.tape
    out_features, width = weight.shape
    weights = norm_weights(c, spec, f"{name}.layer_norm", width)
    normed = t.tensor(x.numel, x.dtype)
    statistics = [t.tensor(x.numel // width, DType.FP32) for _ in weights]
    out = t.tensor(c.tokens * out_features, c.dtype)
    whole = x.storage.num_bytes * (c.degree if c.sequence else 1)
    inputs: tuple[Tensor, ...] = (x, *weights, weight)
    own = c.weight_gradient
    gradients: tuple[int, ...] = (Gradient.FRESH,) * (1 + len(weights)) + (own,)
    if bias is not None:
        inputs, gradients = (*inputs, bias), (*gradients, Gradient.FRESH)
    t.record(
        OperationKind.LINEAR, inputs, (normed, *statistics, out),
        saves=(x, normed, *statistics, weight), gradients=gradients,
        forward_scratch_bytes=(whole, RESULT) if c.sequence else (),
        backward_scratch_bytes=(whole, whole, x.storage.num_bytes, ~0, RESULT)
        if c.sequence else (whole, RESULT),
        flops=2 * c.tokens * width * out_features, in_python=True, sends=column_sends(c, width),
    )  # fmt: skip
    return out


def _narrow_norm_linear(
    c: MegatronContext,
    formats: Fp8Formats,
    x: Tensor,
    spec: NormSpec,
    name: str,
    weight: Parameter,
    bias: Parameter | None,
) -> Tensor:
    """The same in 8 bits: the normed input is there as codes alone, or in 16 bits until their scale is known."""
    t, narrow = c.tape, Narrow(c, formats, weight)
    out_features, width = weight.shape
    weights = norm_weights(c, spec, f"{name}.layer_norm", width)
    rows = x.numel // width
    kept = narrow.kept(rows, again=c.sequence)
    statistics = [t.tensor(rows, DType.FP32) for _ in weights]
    out = t.tensor(c.tokens * out_features, c.dtype)
    whole = x.storage.num_bytes * (c.degree if c.sequence else 1)
    forward = [
        *[x.storage.num_bytes] * formats.scales_first,
        *narrow.quantized(rows, again=c.sequence),
    ]
    backward = narrow.gradient(c.tokens)
    if c.sequence:
        forward += narrow.gathered(c.tokens)
        backward += [*narrow.gathered_back(c.tokens), whole, x.storage.num_bytes]
    else:
        backward.append(whole)
    inputs: tuple[Tensor, ...] = (x, *weights, weight)
    gradients: tuple[int, ...] = (Gradient.FRESH,) * (1 + len(weights)) + (c.weight_gradient,)
    if bias is not None:
        inputs, gradients = (*inputs, bias), (*gradients, Gradient.FRESH)
    t.record(
        OperationKind.LINEAR, inputs, (kept, *statistics, out), saves=(x, kept, *statistics, weight),
        gradients=gradients, forward_scratch_bytes=(*forward, RESULT) if forward else (),
        backward_scratch_bytes=(*backward, RESULT), flops=2 * c.tokens * width * out_features,
        in_python=True, sends=narrow_sends(c, formats, column_sends(c, width)),
    )  # fmt: skip
    return out


def column_linear(c: MegatronContext, x: Tensor, weight: Parameter) -> Tensor:
    """A product with this rank's columns whose input was normed elsewhere."""
    out_features, in_features = weight.shape
    whole = x.storage.num_bytes * c.degree
    formats = narrow_formats(c)
    if formats is not None:
        return narrow_product(
            c, formats, x, weight, c.tokens * out_features, rows=x.numel // in_features,
            flops=2 * c.tokens * in_features * out_features, gradient_rows=c.tokens,
            backward=(whole,) if c.sequence else (), sends=column_sends(c, in_features),
            is_gathered=c.sequence,
        )  # fmt: skip
    return multiplied(
        c, x, weight, c.tokens * out_features, flops=2 * c.tokens * in_features * out_features,
        forward_scratch_bytes=(whole, RESULT) if c.sequence else (),
        backward_scratch_bytes=(whole, whole, RESULT) if c.sequence else (),
        sends=column_sends(c, in_features),
    )  # fmt: skip


def whole_linear(
    c: MegatronContext, x: Tensor, name: str, out_features: int, in_features: int
) -> Tensor:
    """A product with a weight that is whole on every rank, of its share of the tokens (``duplicated``)."""
    weight = c.tape.parameter(f"{name}.weight", out_features, in_features)
    numel = c.stream_tokens * out_features
    formats, flops = narrow_formats(c), 2 * numel * in_features
    if formats is not None:
        return narrow_product(c, formats, x, weight, numel, flops=flops, rows=c.stream_tokens)
    return multiplied(c, x, weight, numel, flops=flops)


def linear(c: MegatronContext, x: Tensor, weight: Parameter) -> Tensor:
    """A product with this rank's rows; with sequence parallelism its gradient is gathered first."""
    out_features, in_features = weight.shape
    gathered: tuple[int, ...] = ()
    if c.sequence:
        gathered = (allocated_bytes(c.tokens * out_features, c.dtype), RESULT)
    formats = narrow_formats(c)
    if formats is not None:
        return narrow_product(
            c, formats, x, weight, c.stream_tokens * out_features, rows=c.tokens,
            flops=2 * c.tokens * in_features * out_features, forward=gathered[:1],
            sends=row_sends(c, out_features),
        )  # fmt: skip
    return multiplied(
        c, x, weight, c.stream_tokens * out_features,
        flops=2 * c.tokens * in_features * out_features, forward_scratch_bytes=gathered,
        backward_scratch_bytes=gathered, sends=row_sends(c, out_features),
    )  # fmt: skip


def turned(c: MegatronContext, x: Tensor) -> Tensor:
    """Rotary embeddings: one kernel into a new tensor, which keeps the angles alone."""
    t = c.tape
    assert c.frequencies is not None
    if not c.settings.apply_rope_fusion:
        return rotary(c, x)
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.ROTARY, (x, c.frequencies), (out,), saves=(c.frequencies,),
        gradients=(Gradient.FRESH, Gradient.NONE), in_python=True,
    )  # fmt: skip
    return out


def fused_attention(
    c: MegatronContext, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> Tensor:
    """cuDNN's attention on Hopper and Blackwell, flash elsewhere: keeps q, k, v and its output.

    What neither takes, as in fp32 or on older cards, has its scores written out
    (``UnfusedDotProductAttention``). Keys and values that are no regular views of one tensor, as beside turned keys, are copied first.
    """
    regular = query.storage is key.storage is value.storage and spec.num_heads == spec.num_kv_heads
    if not regular:
        query, key, value = (_own(c, each) for each in (query, key, value))
    if c.context == 1:
        if c.tape.sdpa_kernel(_call(c, spec)) not in FUSED_KERNELS:
            return core_attention(c, query, key, value, spec)
        return _attended(c, query, key, value, spec)
    if c.is_ring:
        return _ring(c, query, key, value, spec)
    heads, groups = spec.num_heads // c.context, spec.num_kv_heads // c.context
    local = replace(spec, num_heads=heads, num_kv_heads=groups)
    query, key, value = _to_heads(c, query, key, value)
    return _to_tokens(c, _attended(c, query, key, value, local))


def _ring(
    c: MegatronContext, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> Tensor:
    """Keys and values of all ranks one after another, the partial results corrected and added up.

    Kept are the queries, the keys and values that came last, the output and its log-sums. The rank whose
    tokens see all others' is looked at: each of its partial results is whole (``AttnFuncWithCPAndKVP2P``).
    """
    t = c.tape
    kernel = attention_kernel(c, spec)
    shape = Shape(c.batch, c.seq_len, c.seq_len, spec)
    both = t.tensor(key.numel + value.numel, c.dtype)
    out = t.tensor(query.numel, c.dtype)
    sums = t.tensor(c.tokens * spec.num_heads, DType.FP32)
    came, partial = (c.context - 1) * both.storage.num_bytes, out.storage.num_bytes
    kind = OperationKind.FLASH_ATTENTION
    inner: tuple[int, ...] = () if t.decomposed else flash_backward_scratch(shape, out)
    if kernel is ScoreKernel.CUDNN:
        kind, inner = OperationKind.CUDNN_ATTENTION, (cudnn_backward_scratch(t, shape, key),)
    step = partial + both.storage.num_bytes
    t.record(
        kind, (query, key, value), (both, out, sums), saves=(query, both, out, sums),
        gradients=(Gradient.FRESH,) * 3, in_python=True,
        forward_scratch_bytes=(came, c.context * partial, RESULT),
        # Two buffers of keys, values and their gradients; a step's own gradients and its scratch.
        backward_scratch_bytes=(4 * both.storage.num_bytes, step, *filter(None, inner), RESULT),
        flops=4 * c.tokens * c.seq_len * c.context * spec.num_heads * spec.head_dim,
        sends=ring_sends(both.storage.num_bytes, both.storage.num_bytes, c.context),
    )  # fmt: skip
    t.touch(query, key, value)
    return out


def _attended(
    c: MegatronContext, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> Tensor:
    t = c.tape
    tokens = c.seq_len * c.context
    shape = Shape(c.batch, tokens, tokens, spec)
    if attention_kernel(c, spec) is ScoreKernel.CUDNN:
        return cudnn(t, query, key, value, shape, None)
    return flash(t, query, key, value, shape)


def attention_kernel(c: MegatronContext, spec: AttentionSpec) -> ScoreKernel:
    """cuDNN's or flash's.

    Raises ``SetupError`` where the card has neither for these heads.
    """
    kernel = c.tape.sdpa_kernel(_call(c, spec))
    if kernel is ScoreKernel.FLASH and spec.value_head_dim not in (None, spec.head_dim):
        # flash-attention's second version takes heads of one size alone.
        return ScoreKernel.CUDNN
    if kernel in FUSED_KERNELS:
        return kernel
    msg = (
        "engine_options: transformer_impl: TransformerEngine's kernels of latent attention, and of shared "
        "sequences, need compute capability 8.0, 16 bits and heads of up to 256 numbers"
    )
    raise SetupError(msg)


def _to_heads(c: MegatronContext, *given: Tensor) -> tuple[Tensor, ...]:
    """Some heads of all tokens in place of all heads of some: copies are sent, and what comes is sorted.

    (TransformerEngine 2.11, context_parallel.py, ``flash_attn_a2a_communicate``: what is sent stays until
    all of it has come)
    """
    t = c.tape
    outs = tuple(t.tensor(each.numel, each.dtype) for each in given)
    sent = sum(each.storage.num_bytes for each in outs)
    t.record(
        OperationKind.ALL_TO_ALL, given, outs, gradients=(Gradient.FRESH,) * len(given),
        forward_scratch_bytes=(sent, RESULT), backward_scratch_bytes=(sent, *(RESULT,) * len(given)),
        in_python=True, sends=both_ways(ExchangeKind.ALL_TO_ALL, sent, Group.SHARED),
    )  # fmt: skip
    return outs


def _to_tokens(c: MegatronContext, x: Tensor) -> Tensor:
    """Back: sorted, sent, and laid head by head of each token."""
    t = c.tape
    out = t.tensor(x.numel, x.dtype)
    size = out.storage.num_bytes
    t.record(
        OperationKind.ALL_TO_ALL, (x,), (out,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=(size, size, RESULT), backward_scratch_bytes=(size, size, RESULT),
        in_python=True, sends=both_ways(ExchangeKind.ALL_TO_ALL, size, Group.SHARED),
    )  # fmt: skip
    return out


def _call(c: MegatronContext, spec: AttentionSpec) -> SdpaCall:
    """What decides between cuDNN's kernel and flash: the same as where torch prefers cuDNN's."""
    return SdpaCall(
        dtype=c.dtype, head_dim=spec.head_dim, value_head_dim=spec.head_dim, queries=c.seq_len * c.context,
        keys=c.seq_len * c.context, masked=False, trained_mask=False,
        dropout=dropout_probability(c.tape, spec.dropout) > 0.0, grouped=False,
    )  # fmt: skip


def _own(c: MegatronContext, x: Tensor) -> Tensor:
    """A copy, where it is a part of another tensor."""
    whole = c.tape.tensor(x.numel, x.dtype).storage.num_bytes
    return x if x.storage.num_bytes == whole else c.tape.contiguous(x)
