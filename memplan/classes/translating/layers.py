"""Layers of BART and its kin: attention of both stacks, two linear layers, norms behind or before them.

(transformers 5.23: models/bart/modeling_bart.py, models/mbart/modeling_mbart.py)
"""

from collections.abc import Callable

from memplan.classes.translating.stacks import (
    StackLayer,
    checked,
    clamped,
    projected_heads,
)
from memplan.families.llama import named_activation
from memplan.graph.modules.attention import Attended, attention_function, unwidened_attention
from memplan.graph.modules.basic import ActivationModule, LayerNorm, Linear, dropout
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import LayerBlock, WeightRole

LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
"""What others read of ``torch.nn.LayerNorm``."""
DROPOUT = 0.1
"""What every class of this module fills in."""


class AttentionModule(Module):
    """Attention that says what others read of it."""

    def facts(self) -> AttentionSpec:
        """Its heads."""
        raise NotImplementedError


class Projections(AttentionModule):
    """What attention of a stack's states to themselves, or to those of the other one, has."""

    block = LayerBlock.ATTENTION
    has_biases = True
    """Its projections have biases."""
    has_key_bias = True
    """That of keys has one where the others have."""

    def __init__(
        self, config: ConfigReader, stack: str, *, causal: bool = False, cross: bool = False
    ) -> None:
        hidden, key = config.integer("d_model"), f"{stack}_attention_heads"
        self.num_heads = config.integer(key)
        self.head_dim = config.divide("d_model", hidden, key, self.num_heads)
        self.causal, self.dropout = causal, config.number("attention_dropout")
        if cross:
            self.block = LayerBlock.CROSS_ATTENTION
        self.add_projections(hidden, bias=self.is_biased(config))

    def add_projections(self, hidden: int, *, bias: bool) -> None:
        """Declare the projections."""
        self.bias, role = bias, WeightRole.QUERY_KEY
        self.k_proj = Linear(hidden, hidden, bias=bias and self.has_key_bias, role=role)
        self.v_proj = Linear(hidden, hidden, bias=self.bias)
        self.q_proj = Linear(hidden, hidden, bias=self.bias, role=role)
        self.out_proj = Linear(hidden, hidden, bias=self.bias, role=WeightRole.ATTENTION_OUTPUT)

    def is_biased(self, config: ConfigReader) -> bool:
        """Whether projections have biases."""
        del config
        return self.has_biases

    def facts(self) -> AttentionSpec:
        """What others read of it."""
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=self.head_dim,
            query_bias=self.bias, key_bias=self.bias, value_bias=self.bias, output_bias=self.bias,
            causal=self.causal, dropout=self.dropout,
        )  # fmt: skip


class BartAttention(Projections):
    def forward(
        self, x: Handle, key_value_states: Handle | None = None, mask: Handle | None = None
    ) -> Attended:
        batch, length, _ = x.shape
        query_states = self.q_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        current_states = x if key_value_states is None else key_value_states
        keys = current_states.shape[1]
        key_states = self.k_proj(current_states)
        key_states = projected_heads(key_states, self.head_dim)
        value_states = self.v_proj(current_states)
        value_states = value_states.view(batch, keys, -1, self.head_dim).transpose(1, 2)
        attend = attention_function(self.run, unwidened_attention, causal=self.causal)
        attn_output, attn_weights = attend(
            query_states, key_states, value_states, mask, self.dropout
        )
        attn_output = attn_output.reshape(batch, length, -1)
        attn_output = self.out_proj(attn_output)
        return attn_output, attn_weights


class LayerParts(StackLayer):
    """What layers of both stacks have."""

    placement = NormPlacement.POST
    attention_class: Callable[..., AttentionModule] = BartAttention
    self_attn: AttentionModule

    def add_network(self, config: ConfigReader, stack: str) -> None:
        """Declare two linear layers, and the norm of what they give or take."""
        hidden, inner = config.integer("d_model"), config.integer(f"{stack}_ffn_dim")
        self.fc1, self.fc2 = Linear(hidden, inner, bias=True), Linear(inner, hidden, bias=True)
        self.final_layer_norm = LayerNorm(hidden)

    def read_rates(self, config: ConfigReader) -> None:
        """What is dropped, and the nonlinearity between both."""
        self.dropout = config.number("dropout", default=DROPOUT)
        self.activation_dropout = config.number("activation_dropout")
        key = "activation_function"
        kind = named_activation(config, key, config.text(key, default="gelu"))
        self.activation_fn = ActivationModule(kind)

    def facts(self) -> LayerSpec:
        """Its heads, widths, norms and dropouts."""
        crossing = self.children.get("encoder_attn")
        return LayerSpec(
            attention=self.self_attn.facts(),
            cross_attention=crossing.facts() if isinstance(crossing, Projections) else None,
            feed_forward=FeedForwardSpec(
                intermediate_size=self.fc1.out_features, activation=self.activation_fn.kind,
                bias=True, activation_dropout=self.activation_dropout,
            ),
            norm=LAYER_NORM, placement=self.placement, dropout=self.dropout,
        )  # fmt: skip


class EncoderLayerParts(LayerParts):
    def __init__(self, config: ConfigReader) -> None:
        self.self_attn = self.attention_class(config, "encoder")
        self.self_attn_layer_norm = LayerNorm(config.integer("d_model"))
        self.read_rates(config)
        self.add_network(config, "encoder")


class DecoderLayerParts(LayerParts):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("d_model")
        self.self_attn = self.attention_class(config, "decoder", causal=True)
        self.read_rates(config)
        self.self_attn_layer_norm = LayerNorm(hidden)
        self.encoder_attn = self.attention_class(config, "decoder", cross=True)
        self.encoder_attn_layer_norm = LayerNorm(hidden)
        self.add_network(config, "decoder")


class BartEncoderLayer(EncoderLayerParts):
    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        residual = x
        x, _ = self.self_attn(x, None, mask)
        x = dropout(x, self.dropout)
        x = residual + x
        x = self.self_attn_layer_norm(x)
        residual = x
        x = self.activation_fn(self.fc1(x))
        x = dropout(x, self.activation_dropout)
        x = self.fc2(x)
        x = dropout(x, self.dropout)
        x = residual + x
        x = self.final_layer_norm(x)
        return checked(x)


class BartDecoderLayer(DecoderLayerParts):
    def forward(self, x: Handle, mask: Handle | None, memory: Handle) -> Handle:
        memory = self.behind_hook(memory)
        residual = x
        x, _ = self.self_attn(x, None, mask)
        x = dropout(x, self.dropout)
        x = residual + x
        x = self.self_attn_layer_norm(x)
        residual = x
        x, _ = self.encoder_attn(x, memory)
        x = dropout(x, self.dropout)
        x = residual + x
        x = self.encoder_attn_layer_norm(x)
        residual = x
        x = self.activation_fn(self.fc1(x))
        x = dropout(x, self.activation_dropout)
        x = self.fc2(x)
        x = dropout(x, self.dropout)
        x = residual + x
        x = self.final_layer_norm(x)
        return x


class MBartEncoderLayer(EncoderLayerParts):
    """Norms before each part; half precision is clamped."""

    placement = NormPlacement.PRE

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        residual = x
        x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(x, None, mask)
        x = dropout(x, self.dropout)
        x = residual + x
        residual = x
        x = self.final_layer_norm(x)
        x = self.activation_fn(self.fc1(x))
        x = dropout(x, self.activation_dropout)
        x = self.fc2(x)
        x = dropout(x, self.dropout)
        x = residual + x
        x = clamped(x)
        return x


class MBartDecoderLayer(DecoderLayerParts):
    placement = NormPlacement.PRE

    def forward(self, x: Handle, mask: Handle | None, memory: Handle) -> Handle:
        memory = self.behind_hook(memory)
        residual = x
        x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(x, None, mask)
        x = dropout(x, self.dropout)
        x = residual + x
        residual = x
        x = self.encoder_attn_layer_norm(x)
        x, _ = self.encoder_attn(x, memory)
        x = dropout(x, self.dropout)
        x = residual + x
        residual = x
        x = self.final_layer_norm(x)
        x = self.activation_fn(self.fc1(x))
        x = dropout(x, self.activation_dropout)
        x = self.fc2(x)
        x = dropout(x, self.dropout)
        x = residual + x
        return x
