"""Decoders whose networks are mixtures of experts: Mixtral, Qwen 2 and 3, OLMoE, Granite.

(transformers 5.23: models/mixtral, models/qwen2_moe, models/qwen3_moe, models/olmoe, models/granitemoe)
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from memplan.classes.llama import (
    MLP,
    SLIDING,
    GatedMLP,
    Heads,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
    MistralAttention,
    Network,
    Qwen3Attention,
    RowsAttention,
    Window,
    clamped_rows,
)
from memplan.classes.llama_kin import GraniteDecoderLayer
from memplan.classes.mixed.experts import Experts, NarrowExperts
from memplan.classes.mixed.routers import (
    GraniteMoeTopKRouter,
    MixtralTopKRouter,
    PhimoeTopKRouter,
    QwenTopKRouter,
    Router,
)
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.experts.router_loss import keep_router_logits
from memplan.graph.modules.basic import LayerNorm, Linear, Norm, RMSNorm
from memplan.graph.modules.functional import jittered
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.masks import position_ids
from memplan.graph.modules.module import Module
from memplan.graph.splitting.tensor_parallel import add_up
from memplan.model.config import ConfigReader
from memplan.model.mixtures import MixtureSpec, RouterSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock

Part = TypeVar("Part", bound=Module)
"""The kind of a module in a block."""


class MixtureBlock(Network):
    """A layer's router and experts, in the place of a network.

    One whose class is ``sealed`` DeepSpeed takes as a whole (``DEFAULT_LEAF_MODULE_CLASSES`` of its
    zero/leaf_module_config.py): its parameters are gathered and reduced together.
    """

    sealed = False
    gathers_codes = False

    def facts(self) -> MixtureSpec:
        """Its router, its routed experts and the one that every token passes."""
        router, experts, shared = self.one_of(Router), self.one_of(Experts), self.one_of(MLP)
        assert router is not None
        assert experts is not None
        inner, activation = experts.intermediate_dim, experts.activation_kind
        return MixtureSpec(
            num_experts=router.num_experts,
            num_experts_per_token=router.top_k,
            expert=FeedForwardSpec(
                intermediate_size=inner,
                activation=activation,
                gated=experts.is_gated,
                bias="gate_up_proj_bias" in experts.weights,
            ),
            router=RouterSpec(score=router.score, correction=router.is_corrected),
            shared=None if shared is None else shared.facts(),
            shared_gate=self.one_of(SharedExpertGate) is not None,
            in_own_way=experts.in_turn,
        )

    def one_of(self, cls: type[Part]) -> Part | None:
        """The module of a class in it."""
        return next((each for each in self.children.values() if isinstance(each, cls)), None)

    def __call__(self, x: Handle) -> Handle:
        """What ranks with all sequences make is shared out again (``PrepareModuleInputOutput``)."""
        if self.sealed:
            self.run.segment.sealed.add(self.within)
        made: Handle = super().__call__(x)
        return shared_out(made) if self.gathers else made


def shared_out(x: Handle) -> Handle:
    """The ranks' parts added up; each keeps its share of the sequences."""
    group = x.run.options.tensor_parallel
    assert group is not None
    batch, length, width = x.shape
    return Handle(x.run, add_up(x.run, group, x.record), (batch, length // group.degree, width))


class MixtralSparseMoeBlock(MixtureBlock):
    sealed = True
    router_class: type[Router] = MixtralTopKRouter
    experts_class: type[Experts] = NarrowExperts

    def __init__(self, config: ConfigReader) -> None:
        self.jitter_noise = config.number("router_jitter_noise")
        self.gate = self.router_class(config)
        self.experts = self.experts_class(config)

    def forward(self, hidden_states: Handle) -> Handle:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        if self.jitter_noise > 0:
            hidden_states = jittered(hidden_states)
        hidden_states = hidden_states.view(-1, hidden_dim)
        _, top_k_weights, top_k_index = self.gate(hidden_states)
        hidden_states = self.experts(hidden_states, top_k_index, top_k_weights)
        hidden_states = hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return hidden_states


class MixtureLayer(LlamaDecoderLayer):
    block_class: Callable[[ConfigReader], MixtureBlock]
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP

    def network(self, config: ConfigReader, kind: LayerKind) -> Module:
        return self.block_class(config) if kind.sparse else self.mlp_class(config)


class MixtureModel(LlamaModel):
    """What they have in common: which layers are mixtures, which have windows, the loss on routers."""

    adds_router_loss = True
    """The class has a loss on its routers, for those who ask."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.returns_router_logits = config.flag("output_router_logits")
        self.output_router_logits = self.adds_router_loss and self.returns_router_logits

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        return [
            LayerKind(self.window(config, number), sparse=self.is_sparse(config, number))
            for number in range(config.layers("num_hidden_layers"))
        ]

    def window(self, config: ConfigReader, number: int) -> Window:  # noqa: ARG002
        return None

    def is_sparse(self, config: ConfigReader, number: int) -> bool:  # noqa: ARG002
        return True

    def keep_logits(self) -> None:
        if self.returns_router_logits:
            layers = self.layer_list
            for kind in layers.made:
                count = layers.kinds.count(kind)
                for _, module in layers.made[kind].modules():
                    if isinstance(module, Router) and module.is_recorded:
                        keep_router_logits(
                            self.run, module.num_experts * count, in_fp32=module.returns_fp32,
                            scored=self.output_router_logits,
                        )  # fmt: skip


def typed_window(config: ConfigReader, number: int, *, local: bool) -> Window:
    """A layer's window: as ``layer_types`` says, or where it is local."""
    types = config.texts("layer_types")
    if types and number >= len(types):
        error = config.fail("layer_types", f"names {len(types)} layers, needs more")
        raise error
    slides = types[number] == SLIDING if types else local
    return config.optional_integer("sliding_window") if slides else None


def typed_sparse(config: ConfigReader, number: int, *, first: int = 1) -> bool:
    """Whether a layer is a mixture: as ``mlp_layer_types`` says, or all but the ``first`` ones."""
    types = config.texts("mlp_layer_types")
    if types and number >= len(types):
        error = config.fail("mlp_layer_types", f"names {len(types)} layers, needs more")
        raise error
    return types[number] == "sparse" if types else number >= first


class MixtralDecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = MistralAttention
    block_class = MixtralSparseMoeBlock


class MixtralModel(MixtureModel):
    layer_class: type[LlamaDecoderLayer] = MixtralDecoderLayer

    def window(self, config: ConfigReader, number: int) -> Window:  # noqa: ARG002
        return config.optional_integer("sliding_window")


class Qwen3MoeSparseMoeBlock(MixtureBlock):
    sealed = True

    def __init__(self, config: ConfigReader) -> None:
        self.experts = Experts(config)
        self.gate = QwenTopKRouter(config)

    def forward(self, hidden_states: Handle) -> Handle:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states_reshaped = hidden_states.view(-1, hidden_dim)
        _, routing_weights, selected_experts = self.gate(hidden_states_reshaped)
        final_hidden_states = self.experts(
            hidden_states_reshaped, selected_experts, routing_weights
        )
        return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)


class Qwen3MoeDecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = Qwen3Attention
    block_class: Callable[[ConfigReader], MixtureBlock] = Qwen3MoeSparseMoeBlock


class Qwen3MoeModel(MixtureModel):
    layer_class: type[LlamaDecoderLayer] = Qwen3MoeDecoderLayer

    def window(self, config: ConfigReader, number: int) -> Window:  # noqa: ARG002
        uses = config.flag("use_sliding_window")
        return config.optional_integer("sliding_window") if uses else None

    def is_sparse(self, config: ConfigReader, number: int) -> bool:
        if number in config.integers("mlp_only_layers"):
            return False
        return (number + 1) % config.integer("decoder_sparse_step", default=1) == 0


class Qwen2MoeAttention(LlamaAttention):
    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        return config.flag("qkv_bias"), False


class SharedExpertGate(Linear):
    block = LayerBlock.SHARED_EXPERT


class SharedExpert(GatedMLP):
    """A network that every token passes beside the routed experts."""

    block = LayerBlock.SHARED_EXPERT


class Qwen2MoeSparseMoeBlock(MixtureBlock):
    sealed = True

    def __init__(self, config: ConfigReader) -> None:
        self.gate = QwenTopKRouter(config)
        self.experts = Experts(config)
        inner = config.integer("shared_expert_intermediate_size")
        self.shared_expert = SharedExpert(config, inner)
        self.shared_expert_gate = SharedExpertGate(config.integer("hidden_size"), 1)

    def forward(self, hidden_states: Handle) -> Handle:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states_reshaped = hidden_states.view(-1, hidden_dim)
        shared_expert_output = self.shared_expert(hidden_states_reshaped)
        _, routing_weights, selected_experts = self.gate(hidden_states_reshaped)
        expert_output = self.experts(hidden_states_reshaped, selected_experts, routing_weights)
        shared_expert_output = (
            self.shared_expert_gate(hidden_states_reshaped).unary(OperationKind.SIGMOID)
            * shared_expert_output
        )
        expert_output = expert_output + shared_expert_output
        expert_output = expert_output.reshape(batch_size, sequence_length, hidden_dim)
        return expert_output


class Qwen2MoeDecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = Qwen2MoeAttention
    block_class = Qwen2MoeSparseMoeBlock


class Qwen2MoeModel(Qwen3MoeModel):
    layer_class = Qwen2MoeDecoderLayer

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        uses = config.flag("use_sliding_window")
        window = (config.optional_integer("sliding_window") or 0) if uses else 0
        self.masked = [None, window]  # both are made; one that is not used is of no tokens

    def window(self, config: ConfigReader, number: int) -> Window:
        if not config.flag("use_sliding_window"):
            return None
        types = config.texts("layer_types")
        last = config.integer("max_window_layers", default=0, minimum=0)
        slides = types[number] == SLIDING if types else not number % 2 and number < last
        return config.optional_integer("sliding_window") if slides else None


class OlmoeAttention(RowsAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", default=heads)
        self.clip_qkv = config.raw("clip_qkv") is not None
        self.q_norm = RMSNorm(hidden)
        self.k_norm = RMSNorm(hidden // heads * kv_heads)

    def rows(self, x: Handle) -> Heads:
        made = super().rows(x)
        return clamped_rows(*made) if self.clip_qkv else made


class OlmoeSparseMoeBlock(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.gate = QwenTopKRouter(config)
        self.experts = NarrowExperts(config)

    def forward(self, hidden_states: Handle) -> Handle:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        _, top_k_weights, top_k_index = self.gate(hidden_states)
        final_hidden_states = self.experts(hidden_states, top_k_index, top_k_weights).reshape(
            batch_size, sequence_length, hidden_dim
        )
        return final_hidden_states


class OlmoeDecoderLayer(MixtureLayer):
    attention_class: type[LlamaAttention] = OlmoeAttention
    block_class = OlmoeSparseMoeBlock


class OlmoeModel(MixtureModel):
    layer_class = OlmoeDecoderLayer


class GraniteMoeMoE(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.router = GraniteMoeTopKRouter(config)
        self.experts = NarrowExperts(config)

    def forward(self, layer_input: Handle) -> Handle:
        bsz, length, emb_size = layer_input.shape
        hidden_states = layer_input.reshape(-1, emb_size)
        _, top_k_weights, top_k_index = self.router(hidden_states)
        layer_output = self.experts(hidden_states, top_k_index, top_k_weights)
        return layer_output.view(bsz, length, emb_size)


class GraniteMoeDecoderLayer(GraniteDecoderLayer):
    fed = "block_sparse_moe"

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.self_attn = self.attention_class(config, kind)
        self.add_norms(config.integer("hidden_size"))
        self.block_sparse_moe = GraniteMoeMoE(config)


class GraniteMoeModel(MixtureModel):
    layer_class: type[LlamaDecoderLayer] = GraniteMoeDecoderLayer

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        embeds, *_ = self.joined(embeds)
        positions = position_ids(self.run, batch, length)
        masks = self.masks(batch, length)
        if received is None:
            embeds = embeds * 12.0
        x = embeds
        tables = self.tables(x, positions)[None]
        for layer in self.layer_list:
            x = layer(x, tables, masks[layer.kind.window], unread=positions)
        x = self.norm(x)
        return x

    def adjusted(self, logits: Handle) -> Handle:
        return logits / 6.0


class PhimoeSparseMoeBlock(MixtureBlock):
    def __init__(self, config: ConfigReader) -> None:
        self.router = PhimoeTopKRouter(config)
        self.experts = NarrowExperts(config)
        self.input_jitter_noise = config.number("input_jitter_noise")

    def forward(self, hidden_states: Handle) -> Handle:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        if self.input_jitter_noise > 0:
            hidden_states = jittered(hidden_states)
        hidden_states = hidden_states.reshape(-1, hidden_dim)
        _, routing_weights, selected_experts = self.router(hidden_states)
        final_hidden_states = self.experts(hidden_states, selected_experts, routing_weights)
        return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)


class PhimoeDecoderLayer(MixtureLayer):
    block_class = PhimoeSparseMoeBlock
    norm_class: Callable[[int], Norm] = LayerNorm


class PhimoeModel(MixtralModel):
    layer_class: type[LlamaDecoderLayer] = PhimoeDecoderLayer
    norm_class: Callable[[int], Norm] = LayerNorm

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.head_bias = config.flag("lm_head_bias")
