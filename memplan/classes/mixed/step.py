"""Step 3.5: networks with a limit, experts one after another, heads by kind of layer (transformers 5.23, models/step3p7)."""

from collections.abc import Callable, Mapping, Sequence

from memplan.classes.gemma import GemmaRMSNorm
from memplan.classes.llama import (
    SLIDING,
    BothMasksModel,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LocalTablesModel,
    head_width,
)
from memplan.classes.mixed.deepseek import MiniMaxM2TopKRouter
from memplan.classes.mixed.experts import (
    ExpertsInTurn,
)
from memplan.classes.mixed.mixtures import (
    MixtureBlock,
    MixtureLayer,
    MixtureModel,
    SharedExpert,
)
from memplan.classes.mixed.sinks import (
    TypedRotaryEmbedding,
)
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import (
    Linear,
)
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.rotary import (
    Tables,
    Turn,
    apply_rotary_to_part,
    turn_function,
)
from memplan.model.attention import OutputGate
from memplan.model.config import ConfigReader


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
