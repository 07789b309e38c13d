"""Multi-head latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7 Flash, Mistral 4 and MiniCPM3.

Hidden states pass through narrow vectors on their way to queries and to keys and values. A part of each head is
turned; the keys' turned part is one vector that all heads share, copied beside their own parts.

(transformers 5.23: models/deepseek_v2, deepseek_v3, glm4_moe_lite, mistral4, minicpm3)
"""

from collections.abc import Callable

from memplan.classes.gemma import ScaledEmbedding
from memplan.classes.llama import (
    MLP,
    LayerKind,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    SelfAttention,
)
from memplan.classes.llama_kin import GraniteDecoderLayer, by_position
from memplan.classes.mixed.deepseek import (
    DeepseekV3MoE,
    FirstDenseModel,
    GroupedRouter,
    places_of_best,
)
from memplan.classes.mixed.mixtures import MixtureBlock, MixtureLayer, typed_sparse
from memplan.classes.mixed.routers import Routed, Router
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import Linear, RMSNorm
from memplan.graph.modules.functional import (
    detached,
    divide_in_place,
    fill,
    fp32_linear,
    gather,
    linear,
    masked_fill,
    softmax,
    topk,
    total,
)
from memplan.graph.modules.handles import ComplexHandle, Handle, made_by
from memplan.graph.modules.rotary import (
    RotaryEmbedding,
    Tables,
    Turn,
    apply_rotary,
    concatenate,
    turn_function,
    turned_as_complex,
)
from memplan.graph.operations.rotary import complex_table
from memplan.graph.splitting.tensor_parallel import shared_experts_input
from memplan.model.attention import RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.latent import LatentAttentionSpec
from memplan.model.norms import NormSpec
from memplan.model.parameters import WeightRole


class NarrowLinear(Linear):
    """``kv_a_proj_with_mqa``: the narrow vector, and the part of every head's keys that is turned."""

    def __init__(self, hidden: int, rank: int, turning: int, *, bias: bool) -> None:
        super().__init__(hidden, rank + turning, bias=bias)
        self.widths = rank, turning


class SharedKeyLinear(NarrowLinear):
    """The same where ranks split the heads: the turned part's gradients are added up.

    (transformers 5.23, distributed/tensor_parallel.py, ``MlaKvAProjParallel``)
    """

    def forward(self, x: Handle) -> Handle:
        """The product, and its last columns through a sum in backward."""
        made = super().forward(x)
        latent, key = made.split(*self.widths)
        shared = shared_experts_input(self.run, key.record)
        return concatenate(latent, Handle(self.run, shared, key.shape))


class LatentAttention(SelfAttention):
    turn: Turn = staticmethod(apply_rotary)
    interleaved = False
    """Neighbouring numbers are turned together."""

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:  # noqa: ARG002
        self.attention_dropout = config.number("attention_dropout")
        self.num_heads = config.integer("num_attention_heads")
        self.q_lora_rank = query_rank(config)
        self.kv_lora_rank = config.integer("kv_lora_rank")
        self.qk_rope_head_dim = config.integer("qk_rope_head_dim")
        self.qk_nope_head_dim = config.integer("qk_nope_head_dim")
        self.qk_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.v_head_dim = value_width(config)
        self.add_projections(config.integer("hidden_size"), bias=config.flag("attention_bias"))

    def add_projections(self, hidden: int, *, bias: bool) -> None:
        width = self.num_heads * self.qk_head_dim
        if self.q_lora_rank is None:
            self.q_proj = Linear(hidden, width, role=WeightRole.QUERY_KEY)
        else:
            self.q_a_proj = Linear(hidden, self.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(self.q_lora_rank)
            self.q_b_proj = Linear(self.q_lora_rank, width)
        rank, turning = self.kv_lora_rank, self.qk_rope_head_dim
        self.kv_a_proj_with_mqa = NarrowLinear(hidden, rank, turning, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank)
        both = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        self.kv_b_proj = Linear(self.kv_lora_rank, both)
        role = WeightRole.ATTENTION_OUTPUT
        self.o_proj = Linear(self.num_heads * self.v_head_dim, hidden, bias=bias, role=role)

    def facts(self) -> LatentAttentionSpec:
        """What others read of it."""
        return LatentAttentionSpec(
            num_heads=self.num_heads, query_rank=self.q_lora_rank, key_value_rank=self.kv_lora_rank,
            plain_head_dim=self.qk_nope_head_dim, value_head_dim=self.v_head_dim,
            rotary=RotarySpec(dim=self.qk_rope_head_dim), norm=NormSpec(kind=RMSNorm.kind),
            bias="bias" in self.o_proj.weights, dropout=self.attention_dropout,
        )  # fmt: skip

    def queries(self, x: Handle) -> Handle:
        if self.q_lora_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def expand_kv(self, kv_nope: Handle, k_rot: Handle) -> tuple[Handle, Handle]:
        """Keys and values of all heads."""
        batch, _, length, _ = kv_nope.shape
        plain, width = self.qk_nope_head_dim, self.v_head_dim
        kv_nope = self.kv_b_proj(kv_nope).view(batch, length, -1, plain + width).transpose(1, 2)
        k_nope, value_states = kv_nope.split(plain, width)
        heads = k_nope.shape[1]
        k_rot = k_rot.repeat_heads(heads)
        shape = batch, heads, length, self.qk_head_dim
        key_states = made_by(self.run, OperationKind.NEW_EMPTY, shape, kv_nope.dtype)
        key_states = fill(key_states, k_nope)
        key_states = fill(key_states, k_rot)
        return key_states, value_states

    def turned(self, q_rot: Handle, k_rot: Handle, tables: Tables) -> Tables:
        cos, sin = tables
        if self.interleaved:
            return apply_rotary_interleave(q_rot, k_rot, cos, sin)
        return turn_function(self.run.kernels.rotary, self.turn)(q_rot, k_rot, cos, sin)

    def positioned(self, query_states: Handle) -> Handle:
        """What else a query is told of its position."""
        return query_states

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        q_states = self.queries(x)
        q_states = q_states.view(batch, length, -1, self.qk_head_dim).transpose(1, 2)
        q_pass, q_rot = q_states.split(self.qk_nope_head_dim, self.qk_rope_head_dim)
        compressed_kv = self.kv_a_proj_with_mqa(x)
        kv_nope, k_rot = compressed_kv.split(self.kv_lora_rank, self.qk_rope_head_dim)
        kv_nope = self.kv_a_layernorm(kv_nope)
        kv_nope = kv_nope.view(batch, 1, length, self.kv_lora_rank)
        k_rot = k_rot.view(batch, 1, length, self.qk_rope_head_dim)
        q_rot, k_rot = self.turned(q_rot, k_rot, tables)
        query_states = concatenate(q_pass, q_rot)
        query_states = self.positioned(query_states)
        key_states, value_states = self.expand_kv(kv_nope, k_rot)
        attend = attention_function(self.run)
        out, weights = attend(query_states, key_states, value_states, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.o_proj(out)
        return out, weights


def query_rank(config: ConfigReader) -> int | None:
    """The queries' narrow vector; a null in the config overrules the class's default (DeepSeek-V2-Lite)."""
    if "q_lora_rank" in config.config and config.config["q_lora_rank"] is None:
        return None
    return config.optional_integer("q_lora_rank")


def value_width(config: ConfigReader) -> int:
    """What a head of values has: ``v_head_dim``, or its share of the hidden size."""
    found = config.optional_integer("v_head_dim")
    if found is not None:
        return found
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return config.divide("hidden_size", hidden, "num_attention_heads", heads)


def apply_rotary_interleave(
    query: Handle, key: Handle, cos: Handle, sin: Handle, dim: int = 1
) -> Tables:
    """``apply_rotary_pos_emb_interleave``: even and odd columns, joined in halves."""
    cos = cos.narrow(cos.shape[-1] // 2).unsqueeze(dim)
    sin = sin.narrow(sin.shape[-1] // 2).unsqueeze(dim)
    q1, q2 = alternate(query)
    k1, k2 = alternate(key)
    turned_query = concatenate(q1 * cos - q2 * sin, q2 * cos + q1 * sin)
    turned_key = concatenate(k1 * cos - k2 * sin, k2 * cos + k1 * sin)
    return turned_query, turned_key


def alternate(x: Handle) -> tuple[Handle, Handle]:
    """``x[..., 0::2], x[..., 1::2]``."""
    half = x.shape[-1] // 2
    return x.narrow(half), x.narrow(half)


class InterleavedAttention(LatentAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.interleaved = config.flag("rope_interleave")


class DeepseekV3DecoderLayer(MixtureLayer):
    attention_class: type[SelfAttention] = InterleavedAttention
    block_class: Callable[[ConfigReader], MixtureBlock] = DeepseekV3MoE


class DeepseekV3Model(FirstDenseModel):
    layer_class: type[LlamaDecoderLayer] = DeepseekV3DecoderLayer

    def rotary_width(self, config: ConfigReader) -> int:
        return config.integer("qk_rope_head_dim")


class Glm4MoeLiteModel(DeepseekV3Model):
    def is_sparse(self, config: ConfigReader, number: int) -> bool:
        return typed_sparse(config, number)


class Mistral4TopkRouter(GroupedRouter):
    def forward(self, hidden_states: Handle) -> Routed:
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        router_logits = linear(hidden_states, self, self.weight)
        scores = softmax(router_logits)
        scores_for_choice = detached(scores)
        saved, _group_scores, group_idx, _group_mask, _score_mask, outside = self.groups(
            scores_for_choice
        )
        scores_for_choice = scores_for_choice.apart(OperationKind.MASKED_FILL, outside)
        topk_indices = places_of_best(scores_for_choice, self.top_k)
        topk_weights = gather(scores, topk_indices)
        if self.norm_topk_prob:
            denominator = total(topk_weights) + 1e-20
            topk_weights = divide_in_place(topk_weights, denominator)
        topk_weights = topk_weights * 1.0
        del saved, group_idx, outside  # autograd keeps them behind what has a name to the end
        return router_logits, topk_weights, topk_indices


class Mistral4MoE(DeepseekV3MoE):
    router_class: type[Router] = Mistral4TopkRouter


class Mistral4Attention(InterleavedAttention):
    def positioned(self, query_states: Handle) -> Handle:
        return by_position(query_states)


class Mistral4DecoderLayer(DeepseekV3DecoderLayer):
    attention_class: type[SelfAttention] = Mistral4Attention
    block_class: Callable[[ConfigReader], MixtureBlock] = Mistral4MoE


class Mistral4Model(DeepseekV3Model):
    layer_class: type[LlamaDecoderLayer] = Mistral4DecoderLayer


class DeepseekV2TopkRouter(GroupedRouter):
    best_of_group = 1

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.is_grouped = config.text("topk_method") == "group_limited_greedy"

    def forward(self, hidden_states: Handle) -> Routed:
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        router_logits = fp32_linear(hidden_states, self, self.weight)
        scores = softmax(router_logits, dtype=DType.FP32)
        if self.is_grouped:
            saved, _group_scores, group_idx, _group_mask, _score_mask, outside = self.groups(
                detached(scores)
            )
            scores = masked_fill(scores, outside)
            del saved, group_idx, outside
        topk_weights, topk_indices = topk(scores, self.top_k)
        topk_weights = topk_weights * 1.0
        return router_logits, topk_weights, topk_indices


class DeepseekV2Moe(DeepseekV3MoE):
    router_class: type[Router] = DeepseekV2TopkRouter


class ComplexRotaryEmbedding(RotaryEmbedding):
    def forward(self, x: Handle, positions: Handle, window: int | None = None) -> Tables:  # noqa: ARG002
        """One table of complex numbers, whatever the format of ``x``."""
        run, (rows, length) = self.run, positions.shape
        self.hold_frequencies(self.width)
        table = complex_table(run, rows * length, self.width)
        whole = ComplexHandle(run, table, (rows, length, self.width))
        return whole, whole


class DeepseekV2Attention(LatentAttention):
    def turned(self, q_rot: Handle, k_rot: Handle, tables: Tables) -> Tables:
        return turned_as_complex(q_rot, k_rot, *tables)


class DeepseekV2DecoderLayer(DeepseekV3DecoderLayer):
    attention_class: type[SelfAttention] = DeepseekV2Attention
    block_class: Callable[[ConfigReader], MixtureBlock] = DeepseekV2Moe


class DeepseekV2Model(DeepseekV3Model):
    layer_class: type[LlamaDecoderLayer] = DeepseekV2DecoderLayer
    rotary_class = ComplexRotaryEmbedding


class MiniCPM3DecoderLayer(GraniteDecoderLayer):
    attention_class: type[SelfAttention] = LatentAttention
    mlp_class: Callable[[ConfigReader], MLP] = LlamaMLP


class MiniCPM3ScaledWordEmbedding(ScaledEmbedding):
    """``scale_emb`` is a whole number."""

    factor_dtype = DType.INT64


class MiniCPM3Model(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = MiniCPM3DecoderLayer
    embedding_class = MiniCPM3ScaledWordEmbedding

    def rotary_width(self, config: ConfigReader) -> int:
        return config.integer("qk_rope_head_dim")

    def before_head(self, x: Handle) -> Handle:
        return x / 10.0
