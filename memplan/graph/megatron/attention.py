"""Self-attention: one matrix for queries, keys and values, scores written out or by a fused kernel.

Megatron-core 0.16.1, core/transformer/attention.py (``SelfAttention``), dot_product_attention.py, core/fusions/fused_softmax.py,
core/models/common/embeddings/rope_utils.py, core/extensions/transformer_engine.py (``TEDotProductAttention``); TransformerEngine
2.11, pytorch/attention/dot_product_attention/utils.py (``get_qkv_layout``).
"""

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.kernels import cudnn, flash
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.megatron.config import Backend, MegatronModule, TransformerConfig
from memplan.graph.megatron.layers import Norm, WithBias
from memplan.graph.megatron.recomputation import checkpoint
from memplan.graph.modules.basic import dropout
from memplan.graph.modules.functional import (
    batched_product,
    masked_fill_in_place,
    repeat_interleave,
    softmax,
    strided,
)
from memplan.graph.modules.fused import megatron, transformer_engine
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.rotary import concatenate
from memplan.graph.operations.elementwise import dropout_probability
from memplan.model.attention import AttentionSpec
from memplan.model.norms import NormSpec
from memplan.training.choices_of_kernels.sdpa import ScoreKernel, SdpaCall
from memplan.training.splitting.megatron import RecomputeModule, TransformerImpl

Heads = tuple[Handle, Handle, Handle]
"""Queries, keys and values of (tokens, sequences, heads, width)."""
FUSED_SOFTMAX_TOKENS = 4096
"""The most keys that the fused kernel takes (core/fusions/fused_softmax.py, ``is_kernel_available``)."""
FUSED_SOFTMAX_ROWS = 4
"""It takes so many matrices of scores at a time, or twice as many of short rows."""
SHORT_ROW = 128
SHORTEST_ROW = 16
FUSED_KERNELS = (ScoreKernel.CUDNN, ScoreKernel.FLASH)


class SelfAttention(MegatronModule):
    def __init__(
        self, config: TransformerConfig, spec: AttentionSpec, backend: Backend, norm: NormSpec
    ) -> None:
        self.config, self.head_dim = config, spec.head_dim
        self.is_turned = spec.rotary is not None
        self.checkpoint_core_attention = config.settings.recomputes(RecomputeModule.CORE_ATTN)
        heads = config.share(spec.num_heads, f"{config.name}'s number of heads")
        groups = config.share(spec.num_kv_heads, f"{config.name}'s number of key/value heads")
        self.heads, self.groups = heads, groups
        hidden = config.hidden_size
        local = replace(spec, num_heads=heads, num_kv_heads=groups)
        self.core_attention = backend.core_attention(config, local)
        self.linear_proj = backend.row(config, heads * spec.head_dim, hidden, bias=spec.output_bias)
        self.linear_qkv = backend.normed_column(
            config, hidden, (heads + 2 * groups) * spec.head_dim, bias=spec.query_bias,
            skip_bias_add=False, norm=norm,
        )  # fmt: skip
        self.norms_heads = spec.query_key_norm is not None
        if spec.query_key_norm is not None:
            self.q_layernorm = Norm(spec.query_key_norm, spec.head_dim)
            self.k_layernorm = Norm(spec.query_key_norm, spec.head_dim)

    def forward(self, hidden_states: Handle, rotary_pos_emb: Handle | None) -> WithBias:
        # What was split keeps a name of its own.
        qkv_output = self.get_query_key_value_tensors(hidden_states)
        query, key, value = qkv_output
        if self.is_turned:
            assert rotary_pos_emb is not None
            query = apply_rotary_pos_emb(self.config, query, rotary_pos_emb)
            key = apply_rotary_pos_emb(self.config, key, rotary_pos_emb)
        core_attn_out = checkpoint(
            self.core_attention, query, key, value, active=self.checkpoint_core_attention
        )
        output, bias = self.linear_proj(core_attn_out)
        return output, bias

    def get_query_key_value_tensors(self, hidden_states: Handle) -> Heads:
        """They lie group by group; the queries of several are copied."""
        mixed_qkv, _ = self.linear_qkv(hidden_states)
        length, batch, _ = mixed_qkv.shape
        mixed_qkv = mixed_qkv.view(length, batch, self.groups, -1)
        width = self.head_dim
        query, key, value = mixed_qkv.split(self.heads // self.groups * width, width, width)
        query = query.reshape(length, batch, -1, width)
        if self.norms_heads:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        return query, key, value


def apply_rotary_pos_emb(config: TransformerConfig, t: Handle, freqs: Handle) -> Handle:
    """One kernel, which TransformerEngine has, or torch's steps (``_apply_rotary_pos_emb_bshd``)."""
    settings = config.settings
    if settings.apply_rope_fusion and settings.transformer_impl is not TransformerImpl.LOCAL:
        return transformer_engine.turned(t, freqs)
    rot_dim = freqs.shape[-1]
    # Nothing passes by, and has a gradient as large as the whole.
    t, t_pass = t.narrow(rot_dim), t.narrow(t.shape[-1] - rot_dim)
    cos_ = (freqs.unary(OperationKind.COS) * 1.0).to(t.dtype)
    sin_ = (freqs.unary(OperationKind.SIN) * 1.0).to(t.dtype)
    t = (t * cos_) + (rotate_half(t) * sin_)
    return concatenate(t, t_pass)


def rotate_half(x: Handle) -> Handle:
    """The second half negated, before the first one."""
    x1, x2 = x.split(x.shape[-1] // 2, x.shape[-1] // 2)
    return concatenate(-x2, x1)


class DotProductAttention(MegatronModule):
    """Scores into a new tensor beside a blank one of the global buffer, softmax, dropout, product."""

    def __init__(self, config: TransformerConfig, spec: AttentionSpec) -> None:
        self.config, self.spec = config, spec

    def forward(self, query: Handle, key: Handle, value: Handle) -> Handle:
        return self.written_out(query, key, value)

    def written_out(self, query: Handle, key: Handle, value: Handle) -> Handle:
        """The function's variables hold the scores, and keys and values repeated for their queries, until it returns."""
        length, batch, heads, _ = query.shape
        times = heads // key.shape[2]
        if times > 1:
            key = repeat_interleave(key, times, dim=2)
            value = repeat_interleave(value, times, dim=2)
        query = query.reshape(length, batch * heads, -1)
        key = key.view(length, batch * heads, -1)
        matmul_result = megatron.scores(query, key)
        attention_scores = matmul_result.view(batch, heads, length, length)
        attention_probs = self.scale_mask_softmax(attention_scores)
        attention_probs = dropout(attention_probs, self.spec.dropout)
        value = value.view(length, batch * heads, -1)
        attention_probs = attention_probs.view(batch * heads, length, length)
        context = batched_product(attention_probs, value.transpose(0, 1))
        context = context.view(batch, heads, length, -1)
        context = context.permute(2, 0, 1, 3).contiguous()
        context = context.view(length, batch, -1)
        return context

    def scale_mask_softmax(self, x: Handle) -> Handle:
        """One kernel; of what that does not take, torch's own steps, the scores in fp32 where that is asked for."""
        settings, dtype = self.config.settings, x.dtype
        if settings.masked_softmax_fusion and is_kernel_available(x):
            return megatron.scaled_masked_softmax(x)
        ones = made_by(self.run, OperationKind.ZEROS, x.shape[-2:], DType.FP32)
        mask = ones.apart(OperationKind.TRIU)
        del ones  # it goes when ``torch.triu`` has returned
        mask = mask.apart(OperationKind.TO, dtype=DType.BOOL)
        if settings.attention_softmax_in_fp32 and dtype is not DType.FP32:
            x = x.float()
            masked = masked_fill_in_place(x, mask)
        else:
            masked = strided(megatron.view_filled_where(x, mask), x)
        probs = softmax(masked)
        return probs.to(dtype)


def is_kernel_available(x: Handle) -> bool:
    """Whether the fused kernel takes the scores (``is_kernel_available``, ``get_batch_per_block``)."""
    batch, heads, _, keys = x.shape
    together = FUSED_SOFTMAX_ROWS * (2 if keys <= SHORT_ROW else 1)
    divides = keys % FUSED_SOFTMAX_ROWS == 0 and batch * heads % together == 0
    return x.dtype.is_half and SHORTEST_ROW < keys <= FUSED_SOFTMAX_TOKENS and divides


class TEDotProductAttention(DotProductAttention):
    """cuDNN's attention on Hopper and Blackwell, flash elsewhere: keeps q, k, v and its output.

    What neither takes, as in fp32 or on older cards, has its scores written out
    (``UnfusedDotProductAttention``). Keys and values that are no regular views of one tensor, as beside turned keys, are copied
    first.
    """

    def forward(self, query: Handle, key: Handle, value: Handle) -> Handle:
        config = self.config
        regular = query.record.storage is key.record.storage is value.record.storage
        if not regular or query.shape[2] != key.shape[2]:
            query = query.contiguous()
            key = key.contiguous()
            value = value.contiguous()
        if config.context == 1:
            if self.kernel(query, value) in FUSED_KERNELS:
                return self.attended(query, key, value)
            return self.written_out(query, key, value)
        if config.is_ring:
            sizes, kernel = self.sizes(query, key), self.kernel(query, value, config.context)
            return transformer_engine.ring(kernel, query, key, value, sizes, config.context)
        query, key, value = transformer_engine.to_heads(config.context, query, key, value)
        attended = self.attended(query, key, value)
        return transformer_engine.to_tokens(config.context, attended)

    def kernel(self, query: Handle, value: Handle, ranks: int = 1) -> ScoreKernel:
        """cuDNN's or flash's, where the card has any for these heads: the same as where torch prefers cuDNN's."""
        tokens, width = query.shape[0] * ranks, query.shape[3]
        call = SdpaCall(
            dtype=query.dtype, head_dim=width, value_head_dim=width, queries=tokens, keys=tokens,
            masked=False, trained_mask=False, grouped=False,
            dropout=dropout_probability(self.run, self.spec.dropout) > 0.0,
        )  # fmt: skip
        kernel = self.run.sdpa_kernel(call)
        if kernel is ScoreKernel.FLASH and value.shape[3] != width:
            # flash-attention's second version takes heads of one size alone.
            return ScoreKernel.CUDNN
        if kernel in FUSED_KERNELS or (self.config.context == 1 and value.shape[3] == width):
            return kernel
        msg = (
            "engine_options: transformer_impl: TransformerEngine's kernels of latent attention, and of shared "
            "sequences, need compute capability 8.0, 16 bits and heads of up to 256 numbers"
        )
        raise SetupError(msg)

    def sizes(self, query: Handle, key: Handle) -> Shape:
        """What a kernel is called with."""
        length, batch, heads, _ = query.shape
        spec = replace(self.spec, num_heads=heads, num_kv_heads=key.shape[2])
        return Shape(batch, length, length, spec)

    def attended(self, query: Handle, key: Handle, value: Handle) -> Handle:
        """By the kernel; heads of every token come side by side."""
        run, sizes, (length, batch, heads, _) = self.run, self.sizes(query, key), query.shape
        given = query.record, key.record, value.record
        if self.kernel(query, value) is ScoreKernel.CUDNN:
            made = cudnn(run, *given, sizes, None)
        else:
            made = flash(run, *given, sizes)
        return Handle(run, made, (length, batch, heads * value.shape[3]))
