"""DeepSeek-V4: several residual streams, one head that is key and value, entries that stand for windows of tokens,
experts that a table of token ids chooses in the first layers.

(transformers 5.23, models/deepseek_v4/modeling_deepseek_v4.py)
"""

from collections.abc import Sequence
from typing import NamedTuple

from memplan.classes.llama import MLP, LlamaDecoderLayer, SelfAttention, Window
from memplan.classes.mixed.compressor import (
    DeepseekV4CSACompressor,
    DeepseekV4HCACompressor,
    apply_rotary_pos_emb,
)
from memplan.classes.mixed.deepseek import corrected, places_of_best
from memplan.classes.mixed.experts import Experts
from memplan.classes.mixed.mixtures import MixtureBlock, MixtureModel
from memplan.classes.mixed.routers import Routed, Router
from memplan.classes.mixed.sinks import HalfRotaryEmbedding, sink_attention
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Parameter
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import ActivationModule, Linear, Norm, UpcastRMSNorm
from memplan.graph.modules.contractions import matmul
from memplan.graph.modules.functional import (
    batched_product,
    clamped,
    divide,
    gather,
    linear,
    product,
    softmax,
    spread_copy,
    summed_over,
    total,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import position_ids
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import Tables, concatenate
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.mixers import MixerSpec
from memplan.model.mixtures import MixtureSpec, RouterScore
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole

LOCAL, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
RATIOS = {0: LOCAL, 4: SPARSE, 128: HEAVY}
"""Kinds of layers by what ``compress_ratios`` says."""
RATES = {SPARSE: 4, HEAVY: 128}
"""Tokens that one compressed entry stands for where the config is silent."""
RATE_KEYS = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
HASHED, ROUTED = "hash_moe", "moe"
NUM_HASHED = 3
"""First layers whose experts a table chooses, where the config is silent."""
ROTATED_SHARE = 64 / 512
NUM_SCALES = 3
"""Numbers that multiply what is projected: for collapsing, expanding and mixing."""
SCORES = {
    "sqrtsoftplus": RouterScore.SQRT_SOFTPLUS,
    "softmax": RouterScore.SOFTMAX,
    "sigmoid": RouterScore.SIGMOID,
}


class DeepseekV4LayerKind(NamedTuple):
    """What sets a layer apart from its neighbours."""

    attention: str
    hashed: bool
    window: Window
    turned: bool = True


class DeepseekV4UnweightedRMSNorm(Module):
    def forward(self, x: Handle) -> Handle:
        return x * (x.float().pow(2).mean() + 1e-6).rsqrt().to(x.dtype)


class DeepseekV4GroupedLinear(Module):
    """A ``torch.nn.Linear`` of which each group of heads has a block."""

    def __init__(self, in_features_per_group: int, out_features: int, n_groups: int) -> None:
        self.n_groups = n_groups
        role = WeightRole.ATTENTION_OUTPUT
        self.weight = Weight(out_features, in_features_per_group, role=role, of_linear=True)

    def declare(self, name: str, weight: Weight) -> Parameter:
        """Its class is not ``torch.nn.Linear`` itself: it is never packed. The product keeps a view of it."""
        parameter = self.run.parameter(name, *weight.shape, role=weight.role)
        parameter.viewed = True
        return parameter

    def forward(self, x: Handle) -> Handle:
        batch, length, groups, hidden_dim = x.shape
        w = self.operand(self.weight).view(groups, -1, hidden_dim).transpose(1, 2)
        x = x.reshape(-1, groups, hidden_dim).transpose(0, 1)
        y = batched_product(x, w).transpose(0, 1)
        return y.reshape(batch, length, groups, -1)


class DeepseekV4Attention(SelfAttention):
    def __init__(self, config: ConfigReader, kind: DeepseekV4LayerKind) -> None:
        hidden, rank = config.integer("hidden_size"), config.integer("q_lora_rank")
        self.num_heads, self.head_dim = (
            config.integer("num_attention_heads"),
            config.integer("head_dim"),
        )
        self.sliding_window, self.rotated = kind.window, rotated_width(config)
        self.attention_dropout = config.number("attention_dropout")
        width = self.num_heads * self.head_dim
        self.o_groups = config.integer("o_groups")
        config.divide("num_attention_heads", width, "o_groups", self.o_groups)
        narrow = self.o_groups * config.integer("o_lora_rank")
        self.q_a_proj = Linear(hidden, rank)
        self.q_a_norm = UpcastRMSNorm(rank)
        self.q_b_proj = Linear(rank, width, role=WeightRole.QUERY_KEY)
        self.q_b_norm = DeepseekV4UnweightedRMSNorm()
        self.kv_proj = Linear(hidden, self.head_dim, role=WeightRole.QUERY_KEY)
        self.kv_norm = UpcastRMSNorm(self.head_dim)
        self.o_a_proj = DeepseekV4GroupedLinear(width // self.o_groups, narrow, self.o_groups)
        self.o_b_proj = Linear(narrow, hidden, role=WeightRole.ATTENTION_OUTPUT)
        self.sinks = Weight(self.num_heads)
        self.compresses = kind.attention != LOCAL
        if self.compresses:
            compressor = (
                DeepseekV4CSACompressor if kind.attention == SPARSE else DeepseekV4HCACompressor
            )
            self.compressor = compressor(
                config, self.head_dim, rate_of(config, kind.attention), self.rotated
            )

    def facts(self) -> MixerSpec:
        scores = AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=1, head_dim=self.head_dim, sinks=True,
            rotary=RotarySpec(dim=self.rotated), sliding_window=self.sliding_window,
            dropout=self.attention_dropout,
        )  # fmt: skip
        return MixerSpec(scores=scores)

    def eager(
        self, query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
    ) -> Attended:
        return sink_attention(self, self.sinks, query, key, value, mask, probability)

    def forward(
        self, x: Handle, tables: dict[bool, Tables], positions: Handle, mask: Handle | None
    ) -> Attended:
        batch, length, _ = x.shape
        cos, sin = tables[self.compresses]
        q_residual = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(q_residual).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q = self.q_b_norm(q)
        q = apply_rotary_pos_emb(q, cos, sin)
        kv = self.kv_norm(self.kv_proj(x)).view(batch, length, -1, self.head_dim).transpose(1, 2)
        kv = apply_rotary_pos_emb(kv, cos, sin)
        if self.compresses:
            compressed_kv, block_bias = self.compressor(x, q_residual, positions)
            kv = concatenate(kv, compressed_kv, dim=2)
            if mask is not None:
                mask = joined_masks(mask, block_bias.to(mask.dtype))
        attend = attention_function(self.run, self.eager)
        out, weights = attend(q, kv, kv, mask, self.attention_dropout)
        out = apply_rotary_pos_emb(out.transpose(1, 2), cos, -sin).transpose(1, 2)
        grouped = out.reshape(batch, length, self.o_groups, -1)
        grouped = self.o_a_proj(grouped).view(batch, length, -1)
        output = self.o_b_proj(grouped)
        return output, weights


def joined_masks(mask: Handle, block_bias: Handle) -> Handle:
    """``torch.cat([mask, block_bias], dim=-1)``."""
    shape = *mask.shape[:-1], mask.shape[-1] + block_bias.shape[-1]
    made = made_by(mask.run, OperationKind.CAT, shape, mask.dtype)
    return made


class DeepseekV4HyperConnection(Module):
    """Weights by which streams are collapsed, expanded and mixed, and the streams' weighted sum."""

    def __init__(self, config: ConfigReader) -> None:
        self.hc_mult = count = config.integer("hc_mult")
        self.hc_sinkhorn_iters = config.integer("hc_sinkhorn_iters")
        self.input_norm = DeepseekV4UnweightedRMSNorm()
        width = (2 + count) * count
        self.fn = Weight(width, count * config.integer("hidden_size"))
        self.base = Weight(width)
        self.scale = Weight(NUM_SCALES)

    def forward(self, hidden_streams: Handle) -> tuple[Handle, Handle, Handle]:
        batch_size, seq_len, hc, _ = hidden_streams.shape
        flattened = hidden_streams.view(batch_size, seq_len, -1).float()
        flattened = self.input_norm(flattened)
        flattened = product(flattened, self.operand(self.fn).float())
        sizes = hc, hc, hc * hc
        pre_w, post_w, comb_w = flattened.split(*sizes)
        pre_b, post_b, comb_b = self.operand(self.base).split(*sizes)
        pre_scale, post_scale, comb_scale = self.operand(self.scale).split(1, 1, 1)
        comb_w = comb_w.view(batch_size, seq_len, hc, hc)
        comb_b = comb_b.view(hc, hc)
        pre = (pre_w * pre_scale + pre_b).unary(OperationKind.SIGMOID) + 1e-6
        post = 2 * (post_w * post_scale + post_b).unary(OperationKind.SIGMOID)
        comb = softmax(comb_w * comb_scale + comb_b) + 1e-6
        comb = divide(comb, total(comb) + 1e-6)
        for _ in range(self.hc_sinkhorn_iters - 1):
            comb = divide(comb, total(comb) + 1e-6)
            comb = divide(comb, total(comb) + 1e-6)
        collapsed = summed_over(pre.unsqueeze(-1) * hidden_streams, 2).to(hidden_streams.dtype)
        return post, comb, collapsed


class DeepseekV4HyperHead(Module):
    """One stream again."""

    segment = "decoder.norm", ModelPart.NORM

    def __init__(self, config: ConfigReader) -> None:
        count = config.integer("hc_mult")
        self.input_norm = DeepseekV4UnweightedRMSNorm()
        self.hc_fn = Weight(count, count * config.integer("hidden_size"))
        self.hc_base = Weight(count)
        self.hc_scale = Weight(1)

    def forward(self, x: Handle) -> Handle:
        batch, length, _, _ = x.shape
        flat = self.input_norm(x.view(batch, length, -1).float())
        mixes = product(flat, self.operand(self.hc_fn).float())
        scale, base = self.operand(self.hc_scale), self.operand(self.hc_base)
        pre = (mixes * scale.float() + base.float()).unary(OperationKind.SIGMOID) + 1e-6
        return summed_over(pre.unsqueeze(-1) * x, 2).to(x.dtype)


class DeepseekV4MLP(MLP):
    """The expert that every token passes."""

    block = LayerBlock.SHARED_EXPERT
    is_gated = True

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("moe_intermediate_size")
        bias = config.flag("mlp_bias")
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.act_fn = ActivationModule(read_activation(config, "hidden_act"))

    def forward(self, x: Handle) -> Handle:
        gate = clamped(self.gate_proj(x), bounds=1)
        up = clamped(self.up_proj(x), bounds=2)
        return self.down_proj(self.act_fn(gate) * up)


class DeepseekV4Experts(Experts):
    as_modules = False
    count_keys = ("n_routed_experts",)

    def apply_gate(self, gate_up: Handle) -> Handle:
        """Both are clamped."""
        width = gate_up.shape[-1] // 2
        gate, up = gate_up.split(width, width)
        gate = clamped(gate, bounds=1)
        up = clamped(up, bounds=2)
        return self.act_fn(gate) * up


class DeepseekV4TopKRouter(Router):
    is_corrected = True
    count_keys = ("n_routed_experts",)

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        scoring = config.text("scoring_func", default="sqrtsoftplus")
        self.score = SCORES[config.choice("scoring_func", scoring, SCORES)]

    def score_fn(self, logits: Handle) -> Handle:
        """How logits become scores."""
        if self.score is RouterScore.SIGMOID:
            return logits.unary(OperationKind.SIGMOID)
        if self.score is RouterScore.SOFTMAX:
            return softmax(logits)
        return logits.unary(OperationKind.SOFTPLUS).unary(OperationKind.SQRT)

    def chosen(self, scores: Handle) -> Handle:
        """Each token's experts: the best by corrected scores."""
        return places_of_best(corrected(scores, module=self.within), self.top_k)

    def forward(self, hidden_states: Handle) -> Routed:
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        logits = linear(flat, self, self.weight)
        scores = self.score_fn(logits)
        indices = self.chosen(scores)
        weights = gather(scores, indices)
        weights = divide(weights, total(weights) + 1e-20)
        return logits, weights * 1.0, indices


class DeepseekV4HashRouter(DeepseekV4TopKRouter):
    """A fixed table says which experts a token id goes to."""

    is_corrected = is_recorded = False

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.num_rows = config.integer("vocab_size")

    def chosen(self, scores: Handle) -> Handle:
        run = self.run
        run.buffer(self.num_rows * self.top_k, DType.INT64)
        return made_by(run, OperationKind.INDEX, (scores.shape[0], self.top_k), DType.INT64)


class DeepseekV4SparseMoeBlock(MixtureBlock):
    def __init__(self, config: ConfigReader, *, is_hash: bool) -> None:
        self.is_hash = is_hash
        self.gate = DeepseekV4HashRouter(config) if is_hash else DeepseekV4TopKRouter(config)
        self.experts = DeepseekV4Experts(config)
        self.shared_experts = DeepseekV4MLP(config)

    def facts(self) -> MixtureSpec:
        return replace(super().facts(), in_own_way=self.is_hash)

    def forward(self, hidden_states: Handle) -> Handle:
        batch, seq_len, hidden_dim = hidden_states.shape
        residual = hidden_states
        flat = hidden_states.view(-1, hidden_dim)
        _, weights, indices = self.gate(hidden_states)
        routed = self.experts(flat, indices, weights).view(batch, seq_len, hidden_dim)
        return routed + self.shared_experts(residual)


class DeepseekV4DecoderLayer(LlamaDecoderLayer):
    norm_class: type[Norm] = UpcastRMSNorm

    def __init__(self, config: ConfigReader, kind: DeepseekV4LayerKind) -> None:
        self.self_attn = DeepseekV4Attention(config, kind)
        self.mlp = DeepseekV4SparseMoeBlock(config, is_hash=kind.hashed)
        self.add_norms(config.integer("hidden_size"))
        self.attn_hc = DeepseekV4HyperConnection(config)
        self.ffn_hc = DeepseekV4HyperConnection(config)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Handle,
        tables: dict[bool, Tables],
        positions: Handle,
        mask: Handle | None,
    ) -> Handle:
        dtype = hidden_states.dtype
        post, comb, collapsed = self.attn_hc(hidden_states)
        attn_output, _ = self.self_attn(self.input_layernorm(collapsed), tables, positions, mask)
        hidden_states = post.to(dtype).unsqueeze(-1) * attn_output.unsqueeze(-2) + matmul(
            comb.to(dtype).transpose(-1, -2), hidden_states
        )
        post, comb, collapsed = self.ffn_hc(hidden_states)
        mlp_output = self.mlp(self.post_attention_layernorm(collapsed))
        return post.to(dtype).unsqueeze(-1) * mlp_output.unsqueeze(-2) + matmul(
            comb.to(dtype).transpose(-1, -2), hidden_states
        )


class DeepseekV4Model(MixtureModel):
    layer_class: type[LlamaDecoderLayer] = DeepseekV4DecoderLayer
    norm_class: type[Norm] = UpcastRMSNorm
    rotary_class = HalfRotaryEmbedding
    eager_only = True
    tied_by_default = False

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.num_streams = config.integer("hc_mult")
        self.norm.segment = None  # it begins with what makes one stream of several
        self.hc_head = DeepseekV4HyperHead(config)

    def rotary_width(self, config: ConfigReader) -> int:
        return rotated_width(config)

    def kinds(self, config: ConfigReader) -> Sequence[DeepseekV4LayerKind]:  # type: ignore[override]
        """Which attention and which router."""
        count, window = config.layers("num_hidden_layers"), config.integer("sliding_window")
        networks = config.texts("mlp_layer_types")
        if not networks:
            hashed = config.integer("num_hash_layers", minimum=0, default=NUM_HASHED)
            networks = [HASHED if number < hashed else ROUTED for number in range(count)]
        if len(networks) < count:
            error = config.fail("mlp_layer_types", f"names {len(networks)} layers of {count}")
            raise error
        for name in networks:
            config.choice("mlp_layer_types", name, (HASHED, ROUTED))
        return [
            DeepseekV4LayerKind(kind, network == HASHED, window)
            for kind, network in zip(attention_kinds(config, count), networks, strict=False)
        ]

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        positions = position_ids(self.run, batch, length)
        (mask,) = self.masks(batch, length).values()
        width = embeds.shape[-1]
        x = spread_copy(embeds.unsqueeze(2), (batch, length, self.num_streams, width))
        tables = {
            False: self.rotary_emb(embeds, positions),
            True: self.rotary_emb(embeds, positions),
        }
        for layer in self.layers:
            x = layer(x, tables, positions, mask)
        x = self.norm(self.hc_head(x))
        return x


def attention_kinds(config: ConfigReader, count: int) -> list[str]:
    """``layer_types``, or ``compress_ratios``, or two heavy ones and then both in turns."""
    named = config.texts("layer_types")
    if not named:
        ratios = config.integers("compress_ratios")
        for ratio in ratios:
            if ratio not in RATIOS:
                error = config.fail("compress_ratios", f"{ratio} is none of 0, 4, 128")
                raise error
        named = [RATIOS[ratio] for ratio in ratios]
    if not named:
        named = [HEAVY, HEAVY] + [SPARSE if each % 2 else HEAVY for each in range(count - 2)]
    if len(named) < count:
        error = config.fail("layer_types", f"names {len(named)} layers of {count}")
        raise error
    for name in named:
        config.choice("layer_types", name, RATIOS.values())
    return named[:count]


def rate_of(config: ConfigReader, kind: str) -> int:
    """Tokens that one entry of a layer's stands for."""
    legacy = config.optional_integer(RATE_KEYS[kind])
    if legacy is not None:
        return legacy
    rates = config.mapping("compress_rates")
    value = rates.get(kind) if rates is not None else None
    return value if isinstance(value, int) else RATES[kind]


def rotated_width(config: ConfigReader) -> int:
    """How many of a head's numbers are turned, the last ones."""
    found = config.optional_integer("qk_rope_head_dim")
    if found is not None:
        return found
    share = config.number("partial_rotary_factor", default=ROTATED_SHARE)
    return int(config.integer("head_dim") * share)
