"""Gemma 4's text: keys and values that late layers take over from earlier ones, a vector of each layer's own
for every token, experts beside a dense network.

(transformers 5.23, models/gemma4/modeling_gemma4.py)
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from memplan.classes.gemma import Gemma2Model, SandwichLayer, ScaledEmbedding
from memplan.classes.llama import (
    FULL,
    SLIDING,
    GatedMLP,
    LlamaDecoderLayer,
    LocalTablesModel,
    SelfAttention,
    Window,
    check_types,
)
from memplan.classes.mixed.experts import Experts
from memplan.classes.mixed.routers import Routed, Router
from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.families.llama import read_activation
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import ActivationModule, Linear, Norm, RMSNorm
from memplan.graph.modules.functional import (
    divide_in_place,
    index,
    multiply_in_place,
    softmax,
    topk,
    total,
)
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.masks import causal_mask, position_ids
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import RotaryEmbedding, Tables, rotate_half
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.mixers import MixerSpec
from memplan.model.mixtures import MixtureSpec, RouterSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind
from memplan.model.parameters import WeightRole

PERIOD = 6
"""Every how many layers one has no window, unless ``layer_types`` says."""
GLOBAL_HEAD = 512
"""Width of a head in those layers (``Gemma4TextConfig``)."""

SharedStates = dict[Window, tuple[Handle, Handle]]
"""Keys and values that later layers read, of layers with a window and without one."""


class KeySource(Enum):
    """Where a layer has its keys and values from."""

    OWN = "own"
    STORED = "store"
    """Its own, which the model keeps for later layers."""
    REUSED = "reuse"
    """What the last layer with the same mask has stored."""


class Gemma4LayerKind(NamedTuple):
    """What sets a layer apart from its neighbours."""

    window: Window
    source: KeySource
    turned: bool = True


def power_normed(hidden_states: Handle) -> Handle:
    """``Gemma4RMSNorm._norm``: by a power of the mean square."""
    mean_squared = hidden_states.pow(2).mean() + 1e-6
    return hidden_states * mean_squared.pow(-0.5)


class Gemma4RMSNorm(RMSNorm):
    kind = NormKind.RMS_POWER

    def forward(self, hidden_states: Handle) -> Handle:
        normed_output = power_normed(hidden_states.float())
        normed_output = normed_output * self.operand(self.weight).float()
        return normed_output.to(hidden_states.dtype)


class UnscaledNorm(Module):
    """The same without a weight (``with_scale=False``)."""

    def forward(self, hidden_states: Handle) -> Handle:
        normed_output = power_normed(hidden_states.float())
        return normed_output.to(hidden_states.dtype)


def apply_rotary_pos_emb(x: Handle, cos: Handle, sin: Handle) -> Handle:
    """One at a time, head by head of each token."""
    cos = cos.unsqueeze(2)
    sin = sin.unsqueeze(2)
    return (x * cos) + (rotate_half(x) * sin)


class Gemma4TextAttention(SelfAttention):
    def __init__(self, config: ConfigReader, kind: Gemma4LayerKind) -> None:
        self.sliding_window, self.source = kind.window, kind.source
        self.num_heads, self.head_dim, self.num_kv_heads = head_sizes(config, kind.window)
        config.divide(
            "num_attention_heads", self.num_heads, "num_key_value_heads", self.num_kv_heads
        )
        self.attention_dropout = config.number("attention_dropout")
        hidden, bias = config.integer("hidden_size"), config.flag("attention_bias")
        width, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = Linear(hidden, width, bias=bias, role=WeightRole.QUERY_KEY)
        self.q_norm = Gemma4RMSNorm(self.head_dim)
        if kind.source is not KeySource.REUSED:
            self.k_norm = Gemma4RMSNorm(self.head_dim)
            self.v_norm = UnscaledNorm()
            self.k_proj = Linear(hidden, narrow, bias=bias, role=WeightRole.QUERY_KEY)
            if kind.window is not None or not config.flag("attention_k_eq_v"):
                self.v_proj = Linear(hidden, narrow, bias=bias)
        self.o_proj = Linear(width, hidden, bias=bias, role=WeightRole.ATTENTION_OUTPUT)

    def facts(self) -> MixerSpec:
        bias = "bias" in self.o_proj.weights
        return MixerSpec(
            shares=self.source is not KeySource.OWN,
            scores=AttentionSpec(
                num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
                query_bias=bias, key_bias=bias, value_bias=bias, output_bias=bias,
                rotary=RotarySpec(dim=self.head_dim), sliding_window=self.sliding_window,
                dropout=self.attention_dropout,
            ),
        )  # fmt: skip

    def forward(
        self, x: Handle, tables: Tables, mask: Handle | None, shared_kv_states: SharedStates
    ) -> Attended:
        batch, length, _ = x.shape
        cos, sin = tables
        query_states = self.q_proj(x).view(batch, length, -1, self.head_dim)
        query_states = self.q_norm(query_states)
        query_states = apply_rotary_pos_emb(query_states, cos, sin)
        query_states = query_states.transpose(1, 2)
        if self.source is KeySource.REUSED:
            key_states, value_states = shared_kv_states[self.sliding_window]
        else:
            key_states = self.k_proj(x).view(batch, length, -1, self.head_dim)
            value_states = (
                self.v_proj(x).view(batch, length, -1, self.head_dim)
                if "v_proj" in self.children
                else key_states
            )
            key_states = self.k_norm(key_states)
            key_states = apply_rotary_pos_emb(key_states, cos, sin)
            key_states = key_states.transpose(1, 2)
            value_states = self.v_norm(value_states)
            value_states = value_states.transpose(1, 2)
        if self.source is KeySource.STORED:
            self.store(key_states, value_states)
            shared_kv_states[self.sliding_window] = key_states, value_states
        attend = attention_function(self.run)
        out, weights = attend(query_states, key_states, value_states, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.o_proj(out)
        return out, weights

    def store(self, key_states: Handle, value_states: Handle) -> None:
        """The model keeps them for later layers, and what a second run made them of.

        Raises ``SetupError`` where activations are offloaded.
        """
        run = self.run
        if run.hooks is not None:
            msg = (
                "offload_activations: is not modelled where layers read an earlier one's keys and values; the "
                "nearest that is: checkpointing full"
            )
            raise SetupError(msg)
        run.keep_graph(key_states.record, value_states.record)


def head_sizes(config: ConfigReader, window: Window) -> tuple[int, int, int]:
    """Query heads, their width, key/value heads; layers without a window have others."""
    heads, narrow = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    if window is not None:
        return heads, config.integer("head_dim"), narrow
    own = override(config)
    wide = config.integer("global_head_dim", default=GLOBAL_HEAD)
    if config.flag("attention_k_eq_v"):
        narrow = config.integer("num_global_key_value_heads", default=narrow)
    return (
        heads,
        own.integer("head_dim", default=wide),
        own.integer("num_key_value_heads", default=narrow),
    )


def override(config: ConfigReader) -> ConfigReader:
    """What a file saved by transformers 5 says of each layer without a window."""
    layers = config.mapping("per_layer_config") or {}
    found = next((each for each in layers.values() if isinstance(each, Mapping)), {})
    return config.nested(found, f"{config.path}per_layer_config.")


class Gemma4TextMLP(GatedMLP):
    def __init__(self, config: ConfigReader, kind: Gemma4LayerKind) -> None:
        wide = kind.source is KeySource.REUSED and config.flag("use_double_wide_mlp")
        super().__init__(config, (2 if wide else 1) * config.integer("intermediate_size"))


class Gemma4TextExperts(Experts):
    count_keys = ("num_experts",)

    def __init__(self, config: ConfigReader) -> None:
        self.config = config
        self.num_experts = config.integer("num_experts")
        self.num_active = config.integer("top_k_experts")
        self.hidden_dim = config.integer("hidden_size")
        self.intermediate_dim = config.integer("moe_intermediate_size")
        self.gate_up_proj = Weight(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        self.down_proj = Weight(self.num_experts, self.hidden_dim, self.intermediate_dim)
        self.act_fn = ActivationModule(read_activation(config, "hidden_activation"))


class Gemma4TextRouter(Router):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.num_experts, self.top_k = (
            config.integer("num_experts"),
            config.integer("top_k_experts"),
        )
        if self.top_k > self.num_experts:
            error = config.fail("top_k_experts", f"{self.top_k} of {self.num_experts} experts")
            raise error
        self.norm = UnscaledNorm()
        self.proj = Linear(hidden, self.num_experts, role=WeightRole.ROUTER)
        self.scale = Weight(hidden, role=WeightRole.OTHER)
        self.per_expert_scale = Weight(self.num_experts)

    def forward(self, hidden_states: Handle) -> Routed:
        hidden_states = self.norm(hidden_states)
        hidden_states = hidden_states * self.operand(self.scale) * 1.0
        expert_scores = self.proj(hidden_states)
        router_probabilities = softmax(expert_scores, dtype=DType.FP32)
        top_k_weights, top_k_index = topk(router_probabilities, self.top_k)
        top_k_weights = divide_in_place(top_k_weights, total(top_k_weights))
        scales = self.operand(self.per_expert_scale)
        top_k_weights = top_k_weights * index(scales, top_k_index, top_k_index.shape)
        return router_probabilities, top_k_weights, top_k_index


class Gemma4TextDecoderLayer(SandwichLayer):
    mlp: Gemma4TextMLP
    norm_class: Callable[[int], Norm] = Gemma4RMSNorm

    def __init__(self, config: ConfigReader, kind: Gemma4LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.self_attn = Gemma4TextAttention(config, kind)
        self.mlp = Gemma4TextMLP(config, kind)
        self.add_norms(hidden)
        own = config.integer("hidden_size_per_layer_input", minimum=0)
        self.hidden_size_per_layer_input = own
        if own:
            self.act_fn = ActivationModule(self.mlp.activation_kind)
            self.per_layer_input_gate = Linear(hidden, own)
            self.per_layer_projection = Linear(own, hidden)
            self.post_per_layer_input_norm = Gemma4RMSNorm(hidden)
        self.enable_moe_block = config.flag("enable_moe_block")
        if self.enable_moe_block:
            self.router = Gemma4TextRouter(config)
            self.experts = Gemma4TextExperts(config)
            self.post_feedforward_layernorm_1 = Gemma4RMSNorm(hidden)
            self.post_feedforward_layernorm_2 = Gemma4RMSNorm(hidden)
            self.pre_feedforward_layernorm_2 = Gemma4RMSNorm(hidden)

    def network_facts(self) -> FeedForwardSpec | MixtureSpec:
        dense = self.mlp.facts()
        if not self.enable_moe_block:
            return dense
        router, experts = self.router, self.experts
        inner, activation = experts.intermediate_dim, experts.activation_kind
        expert = FeedForwardSpec(intermediate_size=inner, activation=activation, gated=True)
        return MixtureSpec(
            num_experts=router.num_experts, num_experts_per_token=router.top_k, expert=expert,
            router=RouterSpec(), shared=dense,
        )  # fmt: skip

    def forward(  # type: ignore[override]
        self,
        hidden_states: Handle,
        per_layer_inputs: Handle | None,
        shared_kv_states: SharedStates,
        tables: Tables,
        mask: Handle | None,
    ) -> Handle:
        # The model cuts it out before it calls the layer.
        per_layer_input = None if per_layer_inputs is None else per_layer_inputs.select(2)
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, tables, mask, shared_kv_states)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.pre_feedforward_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        if self.enable_moe_block:
            hidden_states_1 = self.post_feedforward_layernorm_1(hidden_states)
            hidden_states_flat = residual.seen_as(-1, residual.shape[-1])
            _, top_k_weights, top_k_index = self.router(hidden_states_flat)
            hidden_states_2 = self.pre_feedforward_layernorm_2(hidden_states_flat)
            hidden_states_2 = self.experts(hidden_states_2, top_k_index, top_k_weights)
            hidden_states_2 = hidden_states_2.reshape(*residual.shape)
            hidden_states_2 = self.post_feedforward_layernorm_2(hidden_states_2)
            hidden_states = hidden_states_1 + hidden_states_2
        hidden_states = self.post_feedforward_layernorm(hidden_states)
        hidden_states = residual + hidden_states
        if per_layer_input is not None:
            residual = hidden_states
            hidden_states = self.per_layer_input_gate(hidden_states)
            hidden_states = self.act_fn(hidden_states)
            hidden_states = hidden_states * per_layer_input
            hidden_states = self.per_layer_projection(hidden_states)
            hidden_states = self.post_per_layer_input_norm(hidden_states)
            hidden_states = residual + hidden_states
        hidden_states = multiply_in_place(hidden_states, self.layer_scalar())
        return hidden_states

    def layer_scalar(self) -> Handle:
        """A buffer of one number."""
        return Handle(self.run, self.run.buffer(1, self.run.options.weights), (1,))


class Gemma4RotaryEmbedding(RotaryEmbedding):
    """Layers with a window turn heads of another width."""

    def __init__(self, width: int, local: int) -> None:
        super().__init__(width)
        self.local = local

    def width_of(self, window: Window) -> int:
        """Columns that are turned in layers with this window."""
        return self.width if window is None else self.local


class Gemma4TextModel(LocalTablesModel, Gemma2Model):
    eager_only = False
    layer_class: type[LlamaDecoderLayer] = Gemma4TextDecoderLayer
    norm_class: Callable[[int], Norm] = Gemma4RMSNorm
    window_blocks = False
    """Tokens of a picture see one another within windows alone."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        own = config.integer("hidden_size_per_layer_input", minimum=0)
        self.hidden_size_per_layer_input = own
        self.embeds_more = own > 0
        if own:
            hidden, width = config.integer("hidden_size"), len(self.layers.kinds) * own
            rows = config.integer("vocab_size_per_layer_input")
            self.embed_tokens_per_layer = ScaledEmbedding(rows, width)
            self.per_layer_model_projection = Linear(hidden, width)
            self.per_layer_projection_norm = Gemma4RMSNorm(own)

    def add_rotary(self, config: ConfigReader) -> None:
        _, width, _ = head_sizes(config, None)
        self.rotary_emb = Gemma4RotaryEmbedding(width, config.integer("head_dim"))

    def kinds(self, config: ConfigReader) -> Sequence[Gemma4LayerKind]:  # type: ignore[override]
        """With or without a window, and where keys and values are from: the last layers read those of the
        last one of their kind before them."""
        windows = own_windows(config)
        reading = config.integer("num_kv_shared_layers", minimum=0)
        first = len(windows) - reading
        if first <= 0:
            error = config.fail("num_kv_shared_layers", f"{reading} of {len(windows)} layers")
            raise error
        missing = set(windows) - set(windows[:first])
        if missing:
            kind = FULL if missing.pop() is None else SLIDING
            error = config.fail(
                "num_kv_shared_layers", f"{reading}: no {kind} layer is left to read from"
            )
            raise error
        last = {window: at for at, window in enumerate(windows[:first])} if reading else {}
        return [
            Gemma4LayerKind(
                window,
                KeySource.REUSED if at >= first
                else KeySource.STORED if last.get(window) == at
                else KeySource.OWN,
            )
            for at, window in enumerate(windows)
        ]  # fmt: skip

    def masks(self, batch: int, length: int) -> dict[Window, Handle | None]:
        """One of windows that tokens of a picture see past is made for every sequence."""
        run, blocks, own = self.run, self.block_masks, self.window_blocks
        return {
            each: causal_mask(
                run, batch, length, window=each, blocks=blocks or (own and each is not None)
            )
            for each in self.masked
        }

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        embeds, *_ = self.joined(embeds)
        per_layer_inputs = self.per_layer_inputs(embeds)
        positions = position_ids(self.run, batch, length)
        masks = self.masks(batch, length)
        x = embeds
        tables = self.tables(x, positions)
        shared_kv_states: SharedStates = {}
        for layer in self.layers:
            window = layer.kind.window
            x = layer(
                x, per_layer_inputs, shared_kv_states, tables[window], masks[window],
                unread=positions,
            )  # fmt: skip
        x = self.norm(x)
        return x

    def per_layer_inputs(self, embeds: Handle) -> Handle | None:
        """All layers' vectors of every token: looked up, and projected from its embedding."""
        if not self.hidden_size_per_layer_input:
            return None
        (batch, length, _), own = embeds.shape, self.hidden_size_per_layer_input
        looked_up = self.embed_tokens_per_layer((batch, length)).view(batch, length, -1, own)
        projected = self.per_layer_model_projection(embeds) * 1.0
        projected = projected.view(batch, length, -1, own)
        projected = self.per_layer_projection_norm(projected)
        return (projected + looked_up) * 1.0


def own_windows(config: ConfigReader) -> list[Window]:
    """Each layer's window: as ``layer_types`` says, or five with one and one without; the last has none."""
    count, window = config.layers("num_hidden_layers"), config.integer("sliding_window")
    types = config.texts("layer_types")
    if types:
        if len(types) != count:
            error = config.fail("layer_types", f"names {len(types)} layers of {count}")
            raise error
        check_types(config, types, count)
    else:
        types = [SLIDING if (at + 1) % PERIOD else FULL for at in range(count)]
    found: list[Window] = [window if each == SLIDING else None for each in types]
    found[-1] = None
    return found
