"""Moonshine: three convolutions of the raw signal, heads turned in part, norms without biases.

(transformers 5.23, models/moonshine/modeling_moonshine.py)
"""

from memplan.classes.glm import apply_rotary_glm
from memplan.classes.sounds.base import SAMPLING_RATE, SECONDS
from memplan.classes.sounds.recognition import ENDINGS, Recognizer, SoundDecoder, SoundStack
from memplan.families.llama import rotated_dim
from memplan.families.towers.layers import tower_activation
from memplan.graph.modules.attention import Attended, attention_function, in_heads
from memplan.graph.modules.basic import ActivationModule, Embedding, LayerNorm, Linear
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.functional import activated, padded, read_in_rows
from memplan.graph.modules.grids import GroupNorm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import causal_mask, position_ids, uncached_positions
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import RotaryEmbedding, Tables
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, WeightRole

TURNED_SHARE = 0.9
"""Of each head, where the file does not say (``MoonshineConfig``)."""
HEADS = "encoder_num_attention_heads"
"""The encoder's layers overwrite the decoder's numbers of heads in the config that both share
(``MoonshineAttention.__init__``), so that those in the file come to nothing."""


class MoonshineAttention(Module):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, *, causal: bool = False, cross: bool = False) -> None:
        hidden, heads = config.integer("hidden_size"), config.integer(HEADS)
        self.head_dim = width = config.divide("hidden_size", hidden, HEADS, heads)
        narrow = width * config.integer("encoder_num_key_value_heads", default=heads)
        self.causal, self.dropout = causal, config.number("attention_dropout", default=0.0)
        self.padding = -width % (config.optional_integer("pad_head_dim_to_multiple_of") or 1)
        if cross:
            self.block = LayerBlock.CROSS_ATTENTION
        bias, role = config.flag("attention_bias"), WeightRole.QUERY_KEY
        self.q_proj = Linear(hidden, hidden, bias=bias, role=role)
        self.k_proj = Linear(hidden, narrow, bias=bias, role=role)
        self.v_proj = Linear(hidden, narrow, bias=bias)
        self.o_proj = Linear(hidden, hidden, role=WeightRole.ATTENTION_OUTPUT)

    def forward(
        self,
        hidden_states: Handle,
        tables: Tables | None,
        mask: Handle | None = None,
        memory: Handle | None = None,
    ) -> Attended:
        batch, length, _ = hidden_states.shape
        query_states = in_heads(self.q_proj(hidden_states), self.head_dim)
        current_states = hidden_states if memory is None else memory
        key_states = in_heads(self.k_proj(current_states), self.head_dim)
        value_states = in_heads(self.v_proj(current_states), self.head_dim)
        if tables is not None:
            query_states, key_states = apply_rotary_glm(query_states, key_states, *tables)
        if self.padding:
            query_states = self.padded(query_states)
            key_states = self.padded(key_states)
            value_states = self.padded(value_states)
        attend = attention_function(self.run, causal=self.causal)
        attn_output, attn_weights = attend(
            query_states, key_states, value_states, mask, self.dropout
        )
        if self.padding:
            attn_output = attn_output.narrow(self.head_dim)
        attn_output = attn_output.reshape(batch, length, -1)
        attn_output = self.o_proj(attn_output)
        return attn_output, attn_weights

    def padded(self, x: Handle) -> Handle:
        """``torch.nn.functional.pad(x, (0, self.head_dim_padding))``."""
        return padded(x, (*x.shape[:3], self.head_dim + self.padding))


class MoonshineEncoderMLP(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.activation_fn = ActivationModule(tower_activation(config, "encoder_hidden_act"))
        self.fc1, self.fc2 = Linear(hidden, inner, bias=True), Linear(inner, hidden, bias=True)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.activation_fn(hidden_states)
        hidden_states = self.fc2(hidden_states)
        return hidden_states


class MoonshineDecoderMLP(Module):
    """Half of what the first matrix gives, through the nonlinearity, multiplies the rest."""

    def __init__(self, config: ConfigReader) -> None:
        hidden, self.inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.activation_fn = ActivationModule(tower_activation(config, "decoder_hidden_act"))
        self.fc1 = Linear(hidden, 2 * self.inner, bias=True)
        self.fc2 = Linear(self.inner, hidden, bias=True)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.fc1(hidden_states)
        hidden_states, gate = hidden_states.split(self.inner, self.inner)
        hidden_states = self.activation_fn(gate) * hidden_states
        hidden_states = self.fc2(hidden_states)
        return hidden_states


def norm(config: ConfigReader) -> LayerNorm:
    """One without a bias."""
    return LayerNorm(config.integer("hidden_size"), bias=False)


class MoonshineEncoderLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.self_attn = MoonshineAttention(config)
        self.mlp = MoonshineEncoderMLP(config)
        self.input_layernorm, self.post_attention_layernorm = norm(config), norm(config)

    def forward(self, hidden_states: Handle, position_embeddings: Tables) -> Handle:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, position_embeddings)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class MoonshineDecoderLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.self_attn = MoonshineAttention(config, causal=True)
        self.encoder_attn = MoonshineAttention(config, cross=True)
        self.mlp = MoonshineDecoderMLP(config)
        self.input_layernorm, self.post_attention_layernorm = norm(config), norm(config)
        self.final_layernorm = norm(config)

    def forward(
        self, hidden_states: Handle, tables: Tables, mask: Handle | None, memory: Handle
    ) -> Handle:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, tables, mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states, _ = self.encoder_attn(hidden_states, None, None, memory)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.final_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


def turning(config: ConfigReader) -> RotaryEmbedding:
    """Tables for the numbers of each head that are turned by its position, in pairs."""
    hidden, heads = config.integer("hidden_size"), config.integer(HEADS)
    turned = rotated_dim(config, hidden // heads, TURNED_SHARE)
    return RotaryEmbedding(turned + turned % 2)


class MoonshineEncoder(SoundStack):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.conv1 = Conv1d(1, hidden, 127, stride=64, bias=False)
        self.conv2 = Conv1d(hidden, 2 * hidden, 7, stride=3)
        self.conv3 = Conv1d(2 * hidden, hidden, 3, stride=2)
        self.groupnorm = GroupNorm(1, hidden)
        kinds = [None] * config.layers("encoder_num_hidden_layers")
        self.layers = LayerList("encoder.layers", kinds, lambda _: MoonshineEncoderLayer(config))
        self.add_norm(norm(config))
        self.rotary_emb = turning(config)

    def forward(self, input_values: Handle) -> Handle:
        hidden_states = activated(self.conv1(input_values), Activation.TANH)
        hidden_states = self.groupnorm(hidden_states)
        hidden_states = activated(self.conv2(hidden_states), Activation.GELU)
        hidden_states = activated(self.conv3(hidden_states), Activation.GELU)
        hidden_states = read_in_rows(hidden_states.permute(0, 2, 1))
        positions = uncached_positions(self.run, 1, hidden_states.shape[1])
        position_embeddings = self.rotary_emb(hidden_states, positions)
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(hidden_states, position_embeddings, unread=positions)
        hidden_states = self.layer_norm(hidden_states)
        return hidden_states


class MoonshineDecoder(SoundDecoder):
    norm = "norm"

    def __init__(self, config: ConfigReader) -> None:
        self.embed_tokens = Embedding(config.integer("vocab_size"), config.integer("hidden_size"))
        kinds = [None] * config.layers("decoder_num_hidden_layers")
        self.layers = LayerList("decoder.layers", kinds, lambda _: MoonshineDecoderLayer(config))
        self.add_norm(norm(config))
        self.rotary_emb = turning(config)

    def forward(self, input_ids: Handle, encoder_hidden_states: Handle) -> Handle:
        shape = input_ids.shape
        inputs_embeds = self.embed_tokens(shape, input_ids)
        positions = position_ids(self.run, 1, shape[1])
        mask = causal_mask(self.run, *shape)
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, positions)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states, position_embeddings, mask, encoder_hidden_states, unread=positions
            )
        hidden_states = self.children["norm"](hidden_states)
        return hidden_states


class MoonshineModel(Recognizer):
    endings = ENDINGS
    positions_key = "max_position_embeddings"
    upcasts = True

    def __init__(self, config: ConfigReader) -> None:
        self.encoder, self.decoder = MoonshineEncoder(config), MoonshineDecoder(config)
        self.longest = config.integer("max_position_embeddings")
        self.add_facts(config, 1, SECONDS * SAMPLING_RATE, SAMPLING_RATE)
