"""Whisper, and Speech2Text: BART's layers with norms before, over convolved frames.

Layers that ``layerdrop`` may skip are counted as run. (transformers 5.23: models/whisper, speech_to_text)
"""

from collections.abc import Callable

from memplan.classes.sounds.base import SECONDS
from memplan.classes.sounds.parts import Sines, gated_halves
from memplan.classes.sounds.recognition import ENDINGS, Recognizer, SoundDecoder, SoundStack
from memplan.classes.translating.layers import (
    BartAttention,
    LayerParts,
    MBartDecoderLayer,
    MBartEncoderLayer,
)
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.attention import Attended, attention_function, unwidened_attention
from memplan.graph.modules.basic import Embedding, LayerNorm, dropout
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.functional import activated, read_in_rows
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import causal_mask
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import WeightRole

BANKS_A_SECOND = 100
"""Filter banks of a clip, one every 10 milliseconds."""


class WhisperAttention(BartAttention):
    """Keys have no bias; queries are scaled, and all heads copied, before the scores."""

    has_key_bias = False

    def forward(
        self, x: Handle, key_value_states: Handle | None = None, mask: Handle | None = None
    ) -> Attended:
        batch, length, _ = x.shape
        query_states = (self.q_proj(x) * 1.0).view(batch, length, -1, self.head_dim)
        query_states = query_states.transpose(1, 2).contiguous()
        current_states = x if key_value_states is None else key_value_states
        shape = batch, current_states.shape[1], self.num_heads, self.head_dim
        key_states = self.k_proj(current_states).view(*shape).transpose(1, 2).contiguous()
        value_states = self.v_proj(current_states).view(*shape).transpose(1, 2).contiguous()
        attend = attention_function(self.run, unwidened_attention, causal=self.causal)
        attn_output, attn_weights = attend(
            query_states, key_states, value_states, mask, self.dropout
        )
        attn_output = attn_output.reshape(batch, length, -1)
        attn_output = self.out_proj(attn_output)
        return attn_output, attn_weights


class WhisperEncoderLayer(MBartEncoderLayer):
    """Of states that lie as convolutions gave them, and whose gradient comes from the next norm."""

    attention_class = WhisperAttention

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        return read_in_rows(super().forward(x, mask))


class WhisperDecoderLayer(MBartDecoderLayer):
    attention_class = WhisperAttention


class FrameEncoder(SoundStack):
    """Frames made tokens, layers, and a norm."""

    layer_class: Callable[[ConfigReader], LayerParts]

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("d_model")
        self.dropout = config.number("dropout", default=0.0)
        self.add_tables(config, hidden)
        kinds = [None] * config.layers("encoder_layers")
        self.layers = LayerList("encoder.layers", kinds, lambda _: self.layer_class(config))
        self.add_norm(LayerNorm(hidden))

    def add_tables(self, config: ConfigReader, hidden: int) -> None:
        """Declare what stands before the layers."""


class WhisperEncoder(FrameEncoder):
    """Two convolutions of length 3, of which the second halves the spectrum; sinusoids that are not trained."""

    layer_class = WhisperEncoderLayer

    def add_tables(self, config: ConfigReader, hidden: int) -> None:
        self.conv1 = Conv1d(config.integer("num_mel_bins"), hidden, 3, padding=1)
        self.conv2 = Conv1d(hidden, hidden, 3, stride=2, padding=1)
        rows = config.integer("max_source_positions")
        self.embed_positions = Embedding(rows, hidden)
        self.embed_positions.weight = Weight(rows, hidden, role=WeightRole.TABLE, trainable=False)

    def forward(self, input_features: Handle) -> Handle:
        inputs_embeds = activated(self.conv1(input_features), Activation.GELU)
        inputs_embeds = activated(self.conv2(inputs_embeds), Activation.GELU)
        inputs_embeds = inputs_embeds.permute(0, 2, 1)
        shape = inputs_embeds.shape[1:2]
        all_positions = made_by(self.run, OperationKind.ARANGE, shape, DType.INT64)
        hidden_states = inputs_embeds + self.embed_positions(shape, all_positions)
        hidden_states = dropout(hidden_states, self.dropout)
        hidden_states = read_in_rows(hidden_states)
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(hidden_states, None)
        hidden_states = self.layer_norm(hidden_states)
        return hidden_states


class WhisperPositionalEmbedding(Embedding):
    """Rows by index, which keep the numbers of all positions."""

    def forward(self, shape: tuple[int, ...], ids: Handle | None = None) -> Handle:
        assert ids is not None
        run, table = self.run, self.parameter(self.weight)
        made = empty(run, (*shape, self.width), table.dtype)
        run.record(
            OperationKind.INDEX, (table, ids.record), (made.record,), saves=(ids.record,),
            gradients=(Gradient.FRESH, Gradient.NONE),
        )  # fmt: skip
        return made


class TextDecoder(SoundDecoder):
    """Tables, layers that read the encoder's states, and a norm."""

    layer_class: Callable[[ConfigReader], LayerParts]

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("d_model")
        self.dropout = config.number("dropout", default=0.0)
        self.embed_tokens = Embedding(config.integer("vocab_size"), hidden)
        self.add_positions(config, hidden)
        kinds = [None] * config.layers("decoder_layers")
        self.layers = LayerList("decoder.layers", kinds, lambda _: self.layer_class(config))
        self.add_norm(LayerNorm(hidden))

    def add_positions(self, config: ConfigReader, hidden: int) -> None:
        """Declare the table of positions."""


class WhisperDecoder(TextDecoder):
    layer_class = WhisperDecoderLayer

    def add_positions(self, config: ConfigReader, hidden: int) -> None:
        rows = config.integer("max_target_positions")
        self.embed_positions = WhisperPositionalEmbedding(rows, hidden)

    def forward(self, input_ids: Handle, encoder_hidden_states: Handle) -> Handle:
        shape = input_ids.shape
        inputs_embeds = self.embed_tokens(shape, input_ids)
        position_ids = made_by(self.run, OperationKind.ARANGE, shape, DType.INT64)
        positions = self.embed_positions(shape, position_ids)
        hidden_states = inputs_embeds + positions
        hidden_states = dropout(hidden_states, self.dropout)
        mask = causal_mask(self.run, *shape)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, mask, encoder_hidden_states)
        hidden_states = self.layer_norm(hidden_states)
        return hidden_states


class WhisperModel(Recognizer):
    endings = ENDINGS

    def __init__(self, config: ConfigReader) -> None:
        self.encoder, self.decoder = WhisperEncoder(config), WhisperDecoder(config)
        self.longest = config.integer("max_target_positions")
        length = 2 * config.integer("max_source_positions")
        self.add_facts(config, config.integer("num_mel_bins"), length, 0)


class Conv1dSubsampler(Module):
    """Gated convolutions halve the frames."""

    def __init__(self, config: ConfigReader, hidden: int) -> None:
        kernels = config.integers("conv_kernel_sizes", minimum=1)
        if len(kernels) != config.integer("num_conv_layers"):
            error = config.fail("conv_kernel_sizes", "must have num_conv_layers entries")
            raise error
        middle, last = config.integer("conv_channels"), len(kernels) - 1
        self.inputs = config.integer("input_feat_per_channel") * config.integer("input_channels")
        before = self.inputs
        for index, kernel in enumerate(kernels):
            wide = 2 * hidden if index == last else middle
            made = Conv1d(before, wide, kernel, stride=2, padding=kernel // 2)
            setattr(self, f"conv_layers.{index}", made)
            before = wide // 2

    def forward(self, input_features: Handle) -> Handle:
        hidden_states = input_features.transpose(1, 2).contiguous()
        for conv in self.children.values():
            hidden_states = conv(hidden_states)
            hidden_states = gated_halves(hidden_states)
        hidden_states = hidden_states.transpose(1, 2).contiguous()
        return hidden_states


class Speech2TextEncoder(FrameEncoder):
    layer_class = MBartEncoderLayer

    def add_tables(self, config: ConfigReader, hidden: int) -> None:
        self.conv = Conv1dSubsampler(config, hidden)
        self.embed_positions = Sines(config.integer("max_source_positions"), hidden)

    def forward(self, input_features: Handle) -> Handle:
        inputs_embeds = self.conv(input_features)
        inputs_embeds = inputs_embeds * 1.0
        shape = inputs_embeds.shape[:2]
        padding_mask = made_by(self.run, OperationKind.ZEROS, shape, DType.INT64)
        embed_pos = self.embed_positions(padding_mask)
        hidden_states = inputs_embeds + embed_pos
        hidden_states = dropout(hidden_states, self.dropout)
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(hidden_states, None)
        hidden_states = self.layer_norm(hidden_states)
        return hidden_states


class Speech2TextDecoder(TextDecoder):
    layer_class = MBartDecoderLayer

    def add_positions(self, config: ConfigReader, hidden: int) -> None:
        self.embed_positions = Sines(config.integer("max_target_positions"), hidden)

    def forward(self, input_ids: Handle, encoder_hidden_states: Handle) -> Handle:
        shape = input_ids.shape
        inputs_embeds = self.embed_tokens(shape, input_ids) * 1.0
        attention_mask = causal_mask(self.run, *shape)
        positions = self.embed_positions(input_ids)
        hidden_states = inputs_embeds + positions
        hidden_states = dropout(hidden_states, self.dropout)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, attention_mask, encoder_hidden_states)
        hidden_states = self.layer_norm(hidden_states)
        return hidden_states


class Speech2TextModel(Recognizer):
    endings = ENDINGS
    output = "lm_head"
    eager_only = True

    def __init__(self, config: ConfigReader) -> None:
        self.encoder, self.decoder = Speech2TextEncoder(config), Speech2TextDecoder(config)
        self.longest = config.integer("max_target_positions") + Sines.offset
        channels, rate = self.encoder.conv.inputs, BANKS_A_SECOND
        self.add_facts(config, channels, SECONDS * rate, rate, is_framed=True)
