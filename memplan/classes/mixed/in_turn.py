"""Mixtures whose experts run one after another: DBRX, Step 3.5, OpenAI's privacy filter.

(transformers 5.23: models/dbrx, models/step3p7, models/openai_privacy_filter)
"""

from collections.abc import Callable, Mapping, Sequence

from memplan.classes.gemma import GemmaRMSNorm
from memplan.classes.llama import (
    SLIDING,
    BothMasksModel,
    DecoderLayer,
    HeadAttention,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LocalTablesModel,
    Window,
    head_width,
)
from memplan.classes.mixed.deepseek import MiniMaxM2TopKRouter
from memplan.classes.mixed.experts import (
    Experts,
    ExpertsInTurn,
    NarrowExperts,
    chosen_mask,
    rows_of,
)
from memplan.classes.mixed.mixtures import (
    MixtureBlock,
    MixtureLayer,
    MixtureModel,
    SharedExpert,
)
from memplan.classes.mixed.routers import Routed, Router
from memplan.classes.mixed.sinks import (
    GptOssDecoderLayer,
    HalfRotaryEmbedding,
    SinkAttention,
    TypedRotaryEmbedding,
)
from memplan.dtypes import DType
from memplan.graph.modules.attention import Attended, attention_function, matmul
from memplan.graph.modules.basic import (
    ActivationModule,
    LayerNorm,
    Linear,
    Norm,
    UpcastRMSNorm,
    dropout,
)
from memplan.graph.modules.functional import (
    add_rows,
    difference,
    divide,
    index,
    jittered,
    less_largest,
    part_of,
    product,
    root_of_squares,
    softmax,
    topk,
    zeros,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import two_sided_mask
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import (
    Tables,
    Turn,
    apply_rotary,
    apply_rotary_to_part,
    concatenate,
    turn_function,
)
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.tensors import ExpertShare, Parameter
from memplan.model.attention import OutputGate, Projection
from memplan.model.config import ConfigReader
from memplan.model.mixtures import RouterScore
from memplan.model.networks import Activation
from memplan.model.parameters import WeightRole


class DbrxAttention(HeadAttention):
    projection = Projection.FUSED_SPLIT
    output = "out_proj"
    turned = True

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:  # noqa: ARG002
        hidden, self.num_heads = (
            config.integer("hidden_size"),
            config.integer("num_attention_heads"),
        )
        self.head_dim = config.divide("d_model", hidden, "n_heads", self.num_heads)
        own = config.child("attn_config", "dbrx.attn_config")
        self.num_kv_heads = own.integer("kv_n_heads")
        config.divide("n_heads", self.num_heads, "kv_n_heads", self.num_kv_heads)
        self.clips = own.raw("clip_qkv") is not None
        self.attention_dropout = own.number("attn_pdrop")
        self.widths = hidden, *(self.num_kv_heads * self.head_dim,) * 2
        self.Wqkv = Linear(hidden, sum(self.widths))
        self.out_proj = Linear(hidden, hidden, role=WeightRole.ATTENTION_OUTPUT)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        qkv_states = self.Wqkv(x)
        if self.clips:
            qkv_states = qkv_states.unary(OperationKind.CLAMP)
        query, key, value = qkv_states.split(*self.widths)
        query = query.view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = key.view(batch, length, -1, self.head_dim).transpose(1, 2)
        value = value.view(batch, length, -1, self.head_dim).transpose(1, 2)
        cos, sin = tables
        query, key = turn_function(self.run.kernels.rotary, apply_rotary)(query, key, cos, sin)
        attend = attention_function(self.run)
        out, weights = attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.out_proj(out)
        return out, weights


class DbrxExpertGLU(Module):
    def __init__(self, count: int, active: int, inner: int, hidden: int, kind: Activation) -> None:
        self.num_experts, self.num_active = count, active
        self.w1 = Weight(count * inner, hidden)
        self.v1 = Weight(count * inner, hidden)
        self.w2 = Weight(count * inner, hidden)
        self.activation_fn = ActivationModule(kind)

    def declare(self, name: str, weight: Weight) -> Parameter:
        """All experts' matrices, one below another."""
        share = ExpertShare(self.num_experts, self.num_active)
        return self.run.parameter(name, *weight.shape, module=self.within, experts=share)

    def forward(self, x: Handle, w1: Handle, v1: Handle, w2: Handle) -> Handle:
        gate_proj = product(x, w1)
        up_proj = product(x, v1)
        gate_proj = self.activation_fn(gate_proj)
        intermediate_states = gate_proj * up_proj
        return product(intermediate_states, Handle(self.run, w2.record, (x.shape[-1], w2.shape[0])))


class DbrxExperts(Experts):
    as_modules = False
    in_turn = True

    def __init__(self, config: ConfigReader, hidden: int) -> None:
        self.num_experts = config.integer("moe_num_experts")
        self.num_active = config.integer("moe_top_k")
        self.hidden_dim, self.intermediate_dim = hidden, config.integer("ffn_hidden_size")
        named = config.mapping("ffn_act_fn") or {}
        kind = Activation(str(named.get("name", "silu")))
        self.mlp = DbrxExpertGLU(
            self.num_experts, self.num_active, self.intermediate_dim, hidden, kind
        )

    @property
    def activation_kind(self) -> Activation:
        return self.mlp.activation_fn.kind

    def forward(self, hidden_states: Handle, top_k_index: Handle, top_k_weights: Handle) -> Handle:
        shape, count = hidden_states.shape, self.num_experts
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        next_states = zeros(hidden_states)
        expert_mask = chosen_mask(top_k_index, count + 1)
        stacks = [self.mlp.operand(each) for each in self.mlp.weights.values()]
        for _ in range(count):
            idx, token_idx = rows_of(expert_mask, top_k_index.numel, count)
            w1, v1, w2 = (part_of(each, count) for each in stacks)
            rows = token_idx.numel
            states = self.mlp(index(hidden_states, token_idx, (rows, shape[-1])), w1, v1, w2)
            states = states * index(top_k_weights, idx, (rows, 1))
            next_states = add_rows(next_states, states.to(next_states.dtype), token_idx)
        next_states = next_states.view(*shape)
        return next_states


class DbrxRouter(Router):
    def __init__(self, config: ConfigReader, hidden: int) -> None:
        self.top_k, self.num_experts = (
            config.integer("moe_top_k"),
            config.integer("moe_num_experts"),
        )
        if self.top_k > self.num_experts:
            error = config.fail("moe_top_k", f"{self.top_k} of {self.num_experts} experts")
            raise error
        self.jitters = config.raw("moe_jitter_eps") is not None
        self.layer = Linear(hidden, self.num_experts, role=WeightRole.ROUTER)

    def forward(self, hidden_states: Handle) -> Handle:
        if self.jitters:
            hidden_states = jittered(hidden_states)
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        router_logits = self.layer(hidden_states)
        return router_logits


class DbrxFFN(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        own, hidden = config.child("ffn_config", "dbrx.ffn_config"), config.integer("hidden_size")
        self.router = DbrxRouter(own, hidden)
        self.experts = DbrxExperts(own, hidden)
        key = "moe_normalize_expert_weights"
        self.normalizes = key not in own.config or own.config[key] is not None

    def route_tokens_to_experts(self, router_logits: Handle) -> tuple[Handle, Handle]:
        router_logits = softmax(router_logits, in_own_dtype=True)
        router_top_value, router_indices = topk(router_logits, self.router.top_k)
        if self.normalizes:
            router_top_value = divide(router_top_value, root_of_squares(router_top_value))
        return router_top_value, router_indices

    def forward(self, hidden_states: Handle) -> Handle:
        router_logits = self.router(hidden_states)
        top_k_weights, top_k_index = self.route_tokens_to_experts(router_logits)
        output = self.experts(hidden_states, top_k_index, top_k_weights)
        return output


class DbrxNormAttentionNorm(Module):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.resid_pdrop = config.number("resid_pdrop")
        self.norm_1 = LayerNorm(hidden, bias=False)
        self.attn = DbrxAttention(config, kind)
        self.norm_2 = LayerNorm(hidden, bias=False)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> tuple[Handle, Handle]:
        residual_states = x
        x = self.norm_1(x).to(x.dtype)
        x, _ = self.attn(x, tables, mask)
        x = dropout(x, self.resid_pdrop)
        x = x + residual_states
        residual_states = x
        x = self.norm_2(x).to(x.dtype)
        return residual_states, x


class DbrxBlock(DecoderLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.residual_dropout = config.number("resid_pdrop")
        self.norm_attn_norm = DbrxNormAttentionNorm(config, kind)
        self.ffn = DbrxFFN(config)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        resid_states, x = self.norm_attn_norm(x, tables, mask)
        x = self.ffn(x)
        x = dropout(x, self.residual_dropout)
        x = resid_states + x
        return x


def weight_only_layer_norm(width: int) -> LayerNorm:
    """``nn.LayerNorm(width, bias=False)``."""
    return LayerNorm(width, bias=False)


class DbrxModel(MixtureModel):
    prefix, table, listed, last = "transformer", "wte", "blocks", "norm_f"
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = DbrxBlock
    norm_class: Callable[[int], Norm] = staticmethod(weight_only_layer_norm)


class LimitedMLP(LlamaMLP):
    """Both factors are clamped, the gate behind its nonlinearity."""

    def forward(self, x: Handle) -> Handle:
        gate = self.act_fn(self.gate_proj(x)).unary(OperationKind.CLAMP)
        up = self.up_proj(x).unary(OperationKind.CLAMP)
        return self.down_proj(gate * up)


class LimitedSharedExpert(SharedExpert, LimitedMLP):
    pass


class Step3p7TopKRouter(MiniMaxM2TopKRouter):
    count_keys = ("n_routed_experts",)


class Step3p7Experts(ExpertsInTurn):
    count_keys = ("n_routed_experts",)

    def apply_gate(self, gate_up_out: Handle) -> Handle:
        width = gate_up_out.shape[-1] // 2
        gate, up = gate_up_out.split(width, width)
        gate = self.act_fn(gate).unary(OperationKind.CLAMP)
        up = up.unary(OperationKind.CLAMP)
        return gate * up


class Step3p7SparseMoeBlock(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.gate = Step3p7TopKRouter(config)
        self.experts = Step3p7Experts(config)
        self.shared_experts = LimitedSharedExpert(config, config.integer("share_expert_dim"))

    def forward(self, hidden_states: Handle) -> Handle:
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        shared_output = self.shared_experts(hidden_states)
        _, routing_weights, selected_experts = self.gate(hidden_states)
        hidden_states = self.experts(hidden_states, selected_experts, routing_weights)
        hidden_states = hidden_states * 1.0
        hidden_states = hidden_states + shared_output
        hidden_states = hidden_states.reshape(*shape)
        return hidden_states


class Step3p7Attention(LlamaAttention):
    turn: Turn = staticmethod(apply_rotary_to_part)
    output_gate = OutputGate.SIGMOID_PER_HEAD

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.own_heads = kind.heads
        super().__init__(config, kind)
        self.q_norm = GemmaRMSNorm(self.head_dim)
        self.k_norm = GemmaRMSNorm(self.head_dim)
        self.g_proj = Linear(config.integer("hidden_size"), self.num_heads)

    def add_projections(self, config: ConfigReader) -> None:
        self.num_heads = self.own_heads or self.num_heads
        super().add_projections(config)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query = self.q_norm(self.q_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        gate_states = self.g_proj(x)
        cos, sin = tables
        query, key = turn_function(self.run.kernels.rotary, self.turn)(query, key, cos, sin)
        out, weights = self.attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = out.view(batch, length, -1, self.head_dim)
        out = out * gate_states.unsqueeze(-1).unary(OperationKind.SIGMOID)
        out = out.view(batch, length, -1)
        out = self.project_out(out)
        return out, weights


class Step3p7DecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = Step3p7Attention
    block_class: Callable[[ConfigReader], MixtureBlock] = Step3p7SparseMoeBlock
    mlp_class = LimitedMLP
    norm_class = GemmaRMSNorm


FIRST_SPARSE = 3
"""The first layer with experts where the config is silent (``Step3p7TextConfig``)."""


class Step3p7TextModel(LocalTablesModel, BothMasksModel, MixtureModel):
    layer_class: type[LlamaDecoderLayer] = Step3p7DecoderLayer
    norm_class = GemmaRMSNorm
    adds_router_loss = False

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        width = head_width(config)
        shares = (step_share(config, name) for name in ("full_attention", SLIDING))
        self.rotary_emb = TypedRotaryEmbedding(*(int(width * share) for share in shares))
        self.masked = sorted({None, *self.windows}, key=bool)

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        count, window = (
            config.layers("num_hidden_layers"),
            config.optional_integer("sliding_window"),
        )
        types = config.texts("layer_types") or ["full_attention"] * count
        networks = config.texts("mlp_layer_types") or step_networks(config, count)
        for key, found in (("layer_types", types), ("mlp_layer_types", networks)):
            if len(found) < count:
                error = config.fail(key, f"names {len(found)} layers of {count}")
                raise error
        heads = step_heads(config)
        return [
            LayerKind(
                window if types[at] == SLIDING else None,
                sparse=networks[at] == "sparse",
                heads=heads if types[at] == SLIDING else 0,
            )
            for at in range(count)
        ]


def step_networks(config: ConfigReader, count: int) -> list[str]:
    """``moe_layers_enum``, numbers in a list or between commas, or all but the first ones."""
    named = config.raw("moe_layers_enum")
    sparse = {str(number) for number in range(FIRST_SPARSE, count)}
    if isinstance(named, str):
        sparse = {each.strip() for each in named.split(",")}
    elif named is not None:
        sparse = {str(number) for number in config.integers("moe_layers_enum")}
    return ["sparse" if str(number) in sparse else "dense" for number in range(count)]


def step_heads(config: ConfigReader) -> int:
    """Query heads of layers with a window; 0: as many as others have."""
    found = config.optional_integer("num_sliding_attention_heads")
    if found is not None:
        return found
    other = config.mapping("attention_other_setting")
    value = other.get("num_attention_heads") if other is not None else None
    return value if isinstance(value, int) else 0


def step_share(config: ConfigReader, kind: str) -> float:
    """The rotated share of heads, by kind of layer or, of old, by layer."""
    own = (config.mapping("rope_parameters") or {}).get(kind)
    if isinstance(own, Mapping):
        found = own.get("partial_rotary_factor", 1.0)
        return float(found) if isinstance(found, int | float) else 1.0
    listed, types = config.raw("partial_rotary_factors"), config.texts("layer_types")
    if isinstance(listed, list) and kind in types and types.index(kind) < len(listed):
        found = listed[types.index(kind)]
        return float(found) if isinstance(found, int | float) else 1.0
    return 1.0


class FilterAttention(SinkAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.sinks = Weight(self.num_heads)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query, key, value = self.projected(x)
        cos, sin = tables
        query, key = turn_function(self.run.kernels.rotary, turned_in_pairs)(query, key, cos, sin)
        query = query * 1.0
        key = key * 1.0
        out, weights = self.attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.project_out(out)
        return out, weights

    def eager(
        self, query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
    ) -> Attended:
        start, groups = len(self.run.segment.operations), query.shape[1] // key.shape[1]
        key_states = key.repeat_heads(groups)
        value_states = value.repeat_heads(groups)
        attn_weights = matmul(query, key_states.transpose(2, 3)) * 1.0
        if mask is not None:
            attn_weights = attn_weights + mask
        sinks = self.sinks_of(attn_weights)
        combined_logits = concatenate(attn_weights, sinks)
        combined_logits = less_largest(combined_logits)
        probs = softmax(combined_logits, dtype=DType.FP32)
        scores = probs.narrow(attn_weights.shape[-1])
        attn_weights = dropout(scores, probability).to(value_states.dtype)
        attn_output = matmul(attn_weights, value_states)
        attn_output = attn_output.transpose(1, 2).contiguous()
        self.recomputed(start)
        return attn_output, attn_weights


def turned_in_pairs(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """``apply_rotary_pos_emb`` of every other number."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    turned_query = _turned(query, cos, sin)
    turned_key = _turned(key, cos, sin)
    return turned_query, turned_key


def _turned(x: Handle, cos: Handle, sin: Handle) -> Handle:
    width = x.shape[-1] // 2
    first_half, second_half = x.narrow(width), x.narrow(width)
    first = difference(first_half * cos, second_half * sin)
    second = second_half * cos + first_half * sin
    return concatenate(first, second)


class FilterRouter(Router):
    score = RouterScore.SOFTMAX_SELECTED

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.weight = Weight(self.num_experts, config.integer("hidden_size"))
        self.bias = Weight(self.num_experts, role=WeightRole.OTHER)

    def forward(self, hidden_states: Handle) -> Routed:
        router_logits = product(
            hidden_states.float(),
            self.operand(self.weight).float(),
            self.operand(self.bias).float(),
        )
        router_top_value, router_indices = topk(router_logits, self.top_k)
        router_scores = softmax(router_top_value, in_own_dtype=True)
        router_scores = router_scores / 4.0
        return router_logits, router_scores, router_indices


class FilterExperts(NarrowExperts):
    """In fp32, whatever the model is."""

    as_modules = False
    in_turn = True

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        count, inner, hidden = self.num_experts, self.intermediate_dim, self.hidden_dim
        del self.gate_up_proj, self.down_proj
        self.weights.clear()
        self.gate_up_proj = Weight(count, hidden, 2 * inner)
        self.gate_up_proj_bias = Weight(count, 2 * inner)
        self.down_proj = Weight(count, inner, hidden)
        self.down_proj_bias = Weight(count, hidden)

    def declare(self, name: str, weight: Weight) -> Parameter:
        """A stack, or all experts' biases."""
        fused = weight in (self.gate_up_proj, self.gate_up_proj_bias)
        share = ExpertShare(self.num_experts, self.num_active, 2 if fused else 1)
        return self.run.parameter(name, *weight.shape, module=self.within, experts=share)

    def apply_gate(self, gate_up_out: Handle) -> Handle:
        width = gate_up_out.shape[-1] // 2
        gate, up = gate_up_out.split(width, width)
        gate = gate.unary(OperationKind.CLAMP)
        up = up.unary(OperationKind.CLAMP)
        glu = gate * (gate * 1.702).unary(OperationKind.SIGMOID)
        gated_output = (up + 1) * glu
        return gated_output

    def biased(self, x: Handle, stack: Handle, biases: Handle) -> Handle:
        """``x @ stack[number].float() + biases[number].float()``."""
        made = product(x, part_of(stack, self.num_experts).float())
        width = made.shape[-1]
        bias = Handle(x.run, x.run.slice(biases.record, width), (width,)).float()
        return made + bias

    def forward(self, hidden_states: Handle, top_k_index: Handle, top_k_weights: Handle) -> Handle:
        run, count = self.run, self.num_experts
        next_states = made_by(run, OperationKind.ZEROS, hidden_states.shape, DType.FP32)
        expert_mask = chosen_mask(top_k_index, count)
        first, first_bias, last, last_bias = (self.operand(each) for each in self.weights.values())
        for _ in range(count):
            top_k_pos, token_idx = rows_of(expert_mask, top_k_index.numel, count)
            rows = token_idx.numel
            current_state = index(hidden_states, token_idx, (rows, self.hidden_dim))
            gate_up = self.biased(current_state.float(), first, first_bias)
            gated_output = self.apply_gate(gate_up).float()
            out = self.biased(gated_output.float(), last, last_bias)
            weighted_output = out * index(top_k_weights, top_k_pos, (rows, 1)).float()
            next_states = add_rows(next_states, weighted_output, token_idx)
        return next_states.to(hidden_states.dtype)


class FilterMLP(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.router = FilterRouter(config)
        self.experts = FilterExperts(config)

    def forward(self, hidden_states: Handle) -> tuple[Handle, Handle]:
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, shape[-1])
        _, router_scores, router_indices = self.router(hidden_states)
        hidden_states = self.experts(hidden_states, router_indices, router_scores)
        hidden_states = hidden_states * 4.0
        hidden_states = hidden_states.reshape(*shape)
        return hidden_states, router_scores


class FilterLayer(GptOssDecoderLayer):
    attention_class: type[LlamaAttention] = FilterAttention
    block_class: Callable[[ConfigReader], MixtureBlock] = FilterMLP

    def network(self, config: ConfigReader, kind: LayerKind) -> Module:  # noqa: ARG002
        return self.block_class(config)


class FilterModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = FilterLayer
    norm_class: Callable[[int], Norm] = UpcastRMSNorm
    rotary_class = HalfRotaryEmbedding
    two_sided = eager_only = True
    speaks = False

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        return [LayerKind(config.integer("sliding_window"))] * config.layers("num_hidden_layers")

    def masks(self, batch: int, length: int) -> dict[Window, Handle | None]:
        run = self.run
        return {each: two_sided_mask(run, batch, length, window=each) for each in self.masked}
