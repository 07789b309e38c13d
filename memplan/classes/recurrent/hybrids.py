"""Decoders of which some layers attend and others scan: Jamba, Bamba, Granite 4.

(transformers 5.23: models/jamba, models/bamba, models/granitemoehybrid)
"""

from collections.abc import Callable, Sequence
from typing import Any

from memplan.classes.llama import (
    MLP,
    DecoderLayer,
    GatedMLP,
    GateUpMLP,
    LayerKind,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    MistralAttention,
    Window,
    head_width,
)
from memplan.classes.mixed.mixtures import (
    GraniteMoeModel,
    GraniteMoeMoE,
    MixtralSparseMoeBlock,
    MixtureModel,
)
from memplan.classes.mixed.routers import QwenTopKRouter
from memplan.classes.recurrent.mamba import MambaMixer, Mixer, Scanned
from memplan.classes.recurrent.mamba2 import Mamba2Mixer, Sizes
from memplan.classes.recurrent.sizes import automatic, check_heads, expanded
from memplan.families.llama import read_activation
from memplan.fast_dataclass import replace
from memplan.graph.modules.basic import ActivationModule, Linear, RMSNorm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables, Turn, apply_rotary_to_part
from memplan.model.config import ConfigReader
from memplan.model.mixtures import MixtureSpec
from memplan.model.networks import FeedForwardSpec

LEGACY_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Older names of layer types (transformers' ``remap_legacy_layer_types``)."""


class HybridLayer(LlamaDecoderLayer):
    """Attention, or what its kind has in its place."""

    mixed = "mamba"
    """What it calls its mixer."""
    returns_weights = False
    """It hands attention's weights to the model."""

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        if kind.attends:
            self.self_attn = self.attention_class(config, kind)
        else:
            setattr(self, self.mixed, self.mixer(config))
        setattr(self, self.fed, self.network(config, kind))
        self.add_norms(config.integer("hidden_size"))

    def add_norms(self, hidden: int) -> None:
        self.input_layernorm = self.norm_class(hidden)
        setattr(self, self.second, self.norm_class(hidden))

    def mixer(self, config: ConfigReader) -> Mixer:
        raise NotImplementedError

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Any:
        """The hidden states, and attention's weights where the model is handed them."""
        residual, weights = x, None
        x = self.input_layernorm(x)
        if self.mixed in self.children:
            x = self.children[self.mixed](x)
            for each in tables:  # which a checkpoint keeps, read or not
                self.run.be_handed(each.record)
        else:
            x, weights = self.self_attn(x, tables, mask)
        x = residual + self.branch(x)
        residual = x
        x = self.children[self.second](x)
        x = self.fed_forward(x)
        x = residual + self.branch(x)
        return (x, weights) if self.returns_weights else x

    def fed_forward(self, x: Handle) -> Handle:
        made: Handle = self.children[self.fed](x)
        return made


class UnturnedModel(MixtureModel):
    """No layer knows positions, but by what scans."""

    def add_rotary(self, config: ConfigReader) -> None:
        """It has no tables."""

    def tables(self, x: Handle, positions: Handle) -> dict[Window, Tables]:  # noqa: ARG002
        return dict.fromkeys(self.windows, ())  # type: ignore[arg-type]


class JambaMixer(MambaMixer):
    is_given_names = True
    names = "mamba_proj_bias", "mamba_conv_bias", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank"
    is_one_function = False

    def __init__(self, config: ConfigReader, inner: int) -> None:
        super().__init__(config, inner)
        self.dt_layernorm = RMSNorm(self.rank)
        self.b_layernorm = RMSNorm(self.state)
        self.c_layernorm = RMSNorm(self.state)

    def normed(self, time_step: Handle, keys: Handle, queries: Handle) -> Scanned:
        time_step = self.dt_layernorm(time_step)
        keys = self.b_layernorm(keys)
        queries = self.c_layernorm(queries)
        return time_step, keys, queries


class JambaTopKRouter(QwenTopKRouter):
    count_keys = ("num_experts",)


class JambaSparseMoeBlock(MixtralSparseMoeBlock):
    sealed = False

    def __init__(self, config: ConfigReader) -> None:
        self.router = JambaTopKRouter(config)
        self.experts = self.experts_class(config)

    def forward(self, hidden_states: Handle) -> Handle:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        _, top_k_weights, top_k_index = self.router(hidden_states)
        hidden_states = self.experts(hidden_states, top_k_index, top_k_weights)
        hidden_states = hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return hidden_states


class JambaDecoderLayer(HybridLayer):
    attention_class: type[LlamaAttention] = MistralAttention
    second, fed = "pre_ff_layernorm", "feed_forward"

    def mixer(self, config: ConfigReader) -> Mixer:
        return JambaMixer(config, expanded(config, "mamba_expand", config.integer("hidden_size")))

    def network(self, config: ConfigReader, kind: LayerKind) -> Module:
        return JambaSparseMoeBlock(config) if kind.sparse else GatedMLP(config)


class JambaModel(UnturnedModel):
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = JambaDecoderLayer
    last = "final_layernorm"

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        attends = periodic(config, "attn_layer_period", "attn_layer_offset")
        sparse = periodic(config, "expert_layer_period", "expert_layer_offset")
        many = config.integer("num_experts") > 1
        return [
            LayerKind(turned=False, attends=attends(at), sparse=many and sparse(at))
            for at in range(config.layers("num_hidden_layers"))
        ]


def periodic(config: ConfigReader, period_key: str, offset_key: str) -> Callable[[int], bool]:
    """Whether a layer is one of every so many."""
    period, offset = config.integer(period_key), config.integer(offset_key, minimum=0)
    if offset >= period:
        raise config.fail(offset_key, f"{offset} is not below {period_key} ({period})")
    return lambda number: number % period == offset


def layer_kinds(config: ConfigReader, *keys: str) -> list[str]:
    """Layer types by their present names, one for each layer; empty where none are given."""
    found = [LEGACY_KINDS.get(each, each) for each in config.texts(*keys)]
    count = config.layers("num_hidden_layers")
    if found and len(found) < count:
        raise config.fail(keys[0], f"names {len(found)} layers of {count}")
    return found[:count]


class BambaMixer(Mamba2Mixer):
    """Its head size may be derived."""

    is_given_names = True

    def read_sizes(self, config: ConfigReader) -> Sizes:
        inner, heads = self.inner(config), config.integer("mamba_n_heads")
        head_dim = automatic(config, "mamba_d_head", inner // heads)
        check_heads(config, "mamba_n_heads", heads, head_dim, inner)
        return Sizes(
            inner=inner, heads=heads, groups=config.integer("mamba_n_groups"),
            state=config.integer("mamba_d_state"), kernel=config.integer("mamba_d_conv"),
            chunk=config.integer("mamba_chunk_size"),
            activation=read_activation(config, "hidden_act"),
            bias=config.flag("mamba_proj_bias"), convolution_bias=config.flag("mamba_conv_bias"),
        )  # fmt: skip

    def inner(self, config: ConfigReader) -> int:
        return expanded(config, "mamba_expand", config.integer("hidden_size"))


class BambaAttention(LlamaAttention):
    turn: Turn = staticmethod(apply_rotary_to_part)


class BambaDecoderLayer(HybridLayer):
    attention_class: type[LlamaAttention] = BambaAttention
    mlp_class: Callable[[ConfigReader], MLP] = LlamaMLP
    second, fed = "pre_ff_layernorm", "feed_forward"
    returns_weights = True

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.feed_forward = self.network(config, kind)
        self.add_norms(config.integer("hidden_size"))
        if kind.attends:
            self.self_attn = self.attention_class(config, kind)
        else:
            self.mamba = self.mixer(config)

    def mixer(self, config: ConfigReader) -> Mixer:
        return BambaMixer(config)


class BambaModel(MixtureModel):
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = BambaDecoderLayer
    last = "final_layernorm"
    adds_router_loss = False

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        attends = set(config.integers("attn_layer_indices"))
        count = config.layers("num_hidden_layers")
        return [LayerKind(attends=at in attends) for at in range(count)]

    def rotary_width(self, config: ConfigReader) -> int:
        return head_width(config) // 2

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        from memplan.graph.modules.masks import position_ids

        embeds = self.embedded(batch, length) if received is None else received
        embeds, *_ = self.joined(embeds)
        x = embeds
        positions = position_ids(self.run, batch, length)
        masks = self.masks(batch, length)
        tables = self.tables(x, positions)
        for layer in self.layer_list:
            x, _weights = layer(x, tables[None], masks[None], unread=positions)
        x = self.children[self.last](x)
        return x


class GraniteMoeHybridMLP(GateUpMLP):
    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("shared_intermediate_size")
        self.activation = ActivationModule(read_activation(config, "hidden_act"))
        self.input_linear = Linear(hidden, 2 * inner)
        self.output_linear = Linear(inner, hidden)

    @property
    def last(self) -> Linear:
        return self.output_linear

    def forward(self, x: Handle) -> Handle:
        x = self.input_linear(x)
        width = x.shape[-1] // 2
        chunked = x.split(width, width)
        x = self.activation(chunked[0]) * chunked[1]
        x = self.output_linear(x)
        return x


class GraniteMoeHybridDecoderLayer(HybridLayer):
    fed = "shared_mlp"

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.add_norms(hidden)
        self.has_experts = config.integer("num_local_experts", minimum=0) > 0
        if self.has_experts:
            self.block_sparse_moe = GraniteMoeMoE(config)
        self.shared_mlp = GraniteMoeHybridMLP(config)
        if kind.attends:
            self.self_attn = self.attention_class(config, kind)
        else:
            self.mamba = BambaMixer(config)

    def branch(self, x: Handle) -> Handle:
        return x * 0.22

    def fed_forward(self, x: Handle) -> Handle:
        if not self.has_experts:
            return self.shared_mlp(x)
        moe_hidden_states = self.block_sparse_moe(x)
        return moe_hidden_states + self.shared_mlp(x)

    def network_facts(self) -> FeedForwardSpec | MixtureSpec:
        shared = self.shared_mlp.facts()
        if not self.has_experts:
            return shared
        return replace(self.block_sparse_moe.facts(), shared=shared)


class GraniteMoeHybridModel(GraniteMoeModel):
    layer_class = GraniteMoeHybridDecoderLayer

    def __init__(self, config: ConfigReader) -> None:
        self.turned = config.text("position_embedding_type", default="nope") == "rope"
        super().__init__(config)

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        count = config.layers("num_hidden_layers")
        types = layer_kinds(config, "layer_types") or ["linear_attention"] * count
        return [LayerKind(turned=self.turned, attends=each == "full_attention") for each in types]

    def add_rotary(self, config: ConfigReader) -> None:
        if self.turned:
            super().add_rotary(config)

    def tables(self, x: Handle, positions: Handle) -> dict[Window, Tables]:
        return super().tables(x, positions) if self.turned else {None: ()}  # type: ignore[dict-item]
