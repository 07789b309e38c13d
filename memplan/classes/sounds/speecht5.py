"""SpeechT5: one encoder and one decoder; what stands before and behind them depends on the class.

Scores get queries times a vector of each pair's distance, looked up once for all layers.
(transformers 5.23, models/speecht5/modeling_speecht5.py)
"""

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from memplan.classes.heads import MakeBase
from memplan.classes.sensed.counted import Parts
from memplan.classes.sounds.base import SAMPLING_RATE, SECONDS, SoundTask, begin
from memplan.classes.sounds.parts import (
    FeatureEncoder,
    FeedForward,
    Sines,
    masked_time,
    masks,
    overwrite_masked,
)
from memplan.classes.sounds.recognition import (
    Generation,
    Recognizer,
    SoundDecoder,
    SoundStack,
    Transcripts,
    TranscriptStates,
)
from memplan.classes.sounds.wav2vec2 import FeatureProjection, PositionalConvEmbedding
from memplan.classes.translating.layers import Projections
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import Dropout, Embedding, LayerNorm, Linear, dropout
from memplan.graph.modules.contractions import multiplied
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.functional import batched_product, in_rows_again, read_in_rows, softmax
from memplan.graph.modules.grids import BatchNorm
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import causal_mask
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.parameters import LayerBlock, ModelPart

if TYPE_CHECKING:
    from memplan.model.spec import ModelSpec

SPEECH, TEXT = "speech", "text"


class SpeechT5Attention(Projections):
    """Scores of contents and distances, one added to the other where it lies."""

    def __init__(self, config: ConfigReader, stack: str, *, cross: bool = False) -> None:
        hidden, key = config.integer("hidden_size"), f"{stack}_attention_heads"
        self.num_heads = config.integer(key)
        self.head_dim = config.divide("hidden_size", hidden, key, self.num_heads)
        self.dropout = config.number("attention_dropout", default=0.0)
        self.block = LayerBlock.CROSS_ATTENTION if cross else LayerBlock.ATTENTION
        self.add_projections(hidden, bias=True)

    def forward(
        self,
        hidden_states: Handle,
        key_value_states: Handle | None = None,
        mask: Handle | None = None,
        position_bias: Handle | None = None,
    ) -> Handle:
        batch, length, width = hidden_states.shape
        query_states = self.q_proj(hidden_states) * 1.0
        current_states = hidden_states if key_value_states is None else key_value_states
        key_states = in_rows_again(self.k_proj(current_states))
        value_states = self.v_proj(current_states)
        key_states = self.in_heads(key_states)
        value_states = self.in_heads(value_states)
        query_states = self.in_heads(query_states)
        query_states = self.merged(query_states)
        key_states = self.merged(key_states)
        value_states = self.merged(value_states)
        attn_weights = batched_product(query_states, key_states.transpose(1, 2))
        if position_bias is not None:
            reshape_q = query_states.contiguous().transpose(0, 1)
            rel_pos_bias = of_pairs(reshape_q, turned(position_bias))
            rel_pos_bias = rel_pos_bias.transpose(0, 1)
            attn_weights += rel_pos_bias
        if mask is not None:
            rows, _, keys = attn_weights.shape
            attn_weights = attn_weights.view(batch, self.num_heads, length, keys) + mask
            attn_weights = attn_weights.view(rows, length, keys)
        attn_weights = softmax(attn_weights)
        attn_probs = dropout(attn_weights, self.dropout)
        attn_output = batched_product(attn_probs, value_states)
        attn_output = attn_output.view(batch, self.num_heads, length, self.head_dim)
        attn_output = attn_output.transpose(1, 2)
        attn_output = attn_output.reshape(batch, length, width)
        attn_output = self.out_proj(attn_output)
        return attn_output

    def in_heads(self, x: Handle) -> Handle:
        """``x.view(batch, -1, heads, head_dim).transpose(1, 2)``."""
        batch, length, _ = x.shape
        return x.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)

    def merged(self, x: Handle) -> Handle:
        """``x.reshape(batch * heads, -1, head_dim)``."""
        batch, heads, length, width = x.shape
        return x.reshape(batch * heads, length, width)


def turned(vectors: Handle) -> Handle:
    """``vectors.transpose(-2, -1)``, a node of autograd's: what comes through it is a view, whatever cast it before."""
    run, seen = vectors.run, vectors.transpose(1, 2)
    made = run.view(vectors.record, vectors.numel)
    run.record(OperationKind.VIEW, (vectors.record,), (made,), gradients=(Gradient.SEEN,))
    return Handle(run, made, seen.shape, seen.strides)


def of_pairs(query: Handle, vectors: Handle) -> Handle:
    """``torch.matmul(query, vectors)``."""
    run = query.run
    if run.autocast is not None:
        vectors, query = vectors.to(run.autocast), query.to(run.autocast)
    return multiplied(query, vectors)


def network(config: ConfigReader, stack: str) -> FeedForward:
    """Of a stack's layers."""
    return FeedForward(
        config.integer("hidden_size"), config.integer(f"{stack}_ffn_dim"),
        tower_activation(config, "hidden_act"), config.number("activation_dropout", default=0.0),
        config.number("hidden_dropout", default=0.0),
    )  # fmt: skip


class SpeechT5EncoderLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.attention = SpeechT5Attention(config, "encoder")
        self.dropout = Dropout(config.number("hidden_dropout", default=0.0))
        self.layer_norm = LayerNorm(hidden)
        self.feed_forward = network(config, "encoder")
        self.final_layer_norm = LayerNorm(hidden)

    def forward(self, hidden_states: Handle, position_bias: Handle) -> Handle:
        residual = hidden_states
        hidden_states = self.attention(hidden_states, None, None, position_bias)
        hidden_states = self.dropout(hidden_states)
        hidden_states = residual + hidden_states
        hidden_states = self.layer_norm(hidden_states)
        hidden_states = hidden_states + self.feed_forward(hidden_states)
        hidden_states = self.final_layer_norm(hidden_states)
        return hidden_states


class SpeechT5DecoderLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.self_attn = SpeechT5Attention(config, "decoder")
        self.dropout = Dropout(config.number("hidden_dropout", default=0.0))
        self.self_attn_layer_norm = LayerNorm(hidden)
        self.encoder_attn = SpeechT5Attention(config, "decoder", cross=True)
        self.encoder_attn_layer_norm = LayerNorm(hidden)
        self.feed_forward = network(config, "decoder")
        self.final_layer_norm = LayerNorm(hidden)

    def forward(self, hidden_states: Handle, mask: Handle | None, memory: Handle) -> Handle:
        residual = hidden_states
        hidden_states = self.self_attn(hidden_states, None, mask)
        hidden_states = self.dropout(hidden_states)
        hidden_states = residual + hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        residual = hidden_states
        hidden_states = self.encoder_attn(hidden_states, memory)
        hidden_states = self.dropout(hidden_states)
        hidden_states = residual + hidden_states
        hidden_states = self.encoder_attn_layer_norm(hidden_states)
        hidden_states = hidden_states + self.feed_forward(hidden_states)
        hidden_states = self.final_layer_norm(hidden_states)
        return hidden_states


class SpeechT5FeatureProjection(FeatureProjection):
    segment = None


def sines(config: ConfigReader, key: str) -> Sines:
    """For so many positions, and for padding."""
    padding = config.integer("pad_token_id", default=1, minimum=0)
    return Sines(config.integer(key) + padding + 1, config.integer("hidden_size"))


class SpeechEncoderPrenet(Module):
    """wav2vec 2.0's convolutions and projection, and what places the frames."""

    def __init__(self, config: ConfigReader) -> None:
        self.feature_encoder = FeatureEncoder(config, stack="encoder.")
        self.feature_projection = SpeechT5FeatureProjection(config, self.feature_encoder.channels)
        if masks(config):
            self.masked_spec_embed = Weight(config.integer("hidden_size"))
        self.masked_time = masked_time(config)
        self.pos_conv_embed = PositionalConvEmbedding(config)
        self.pos_sinusoidal_embed = sines(config, "max_speech_positions")

    def forward(self, input_values: Handle) -> Handle:
        extract_features = self.feature_encoder(input_values)
        extract_features = read_in_rows(extract_features.transpose(1, 2))
        begin(self, "encoder.feature_projection", ModelPart.OTHER, extract_features)
        hidden_states, extract_features = self.feature_projection(extract_features)
        if self.masked_time is not None:
            hidden_states = overwrite_masked(
                self, self.masked_spec_embed, hidden_states, self.masked_time
            )
        elif "masked_spec_embed" in self.weights:
            self.parameter(self.masked_spec_embed).unused = True
        begin(self, "encoder.prenet", ModelPart.EMBEDDING, hidden_states)
        positional_conv_embedding = self.pos_conv_embed(hidden_states)
        hidden_states = hidden_states + positional_conv_embedding
        shape = hidden_states.shape[:2]
        padding_mask = made_by(self.run, OperationKind.ZEROS, shape, DType.INT64)
        positional_sinusoidal_embeddings = self.pos_sinusoidal_embed(padding_mask)
        hidden_states = hidden_states + positional_sinusoidal_embeddings
        return hidden_states


class TextEncoderPrenet(Module):
    """Tokens in place of speech; counted alone."""

    def __init__(self, config: ConfigReader) -> None:
        self.embed_tokens = Embedding(config.integer("vocab_size"), config.integer("hidden_size"))
        self.encode_positions = Parts(alpha=Weight())


class RelativePositions(Module):
    """A vector for each pair of positions: distances are cut at both ends."""

    def __init__(self, config: ConfigReader) -> None:
        width = config.integer("hidden_size") // config.integer("encoder_attention_heads")
        self.pe_k = Embedding(2 * config.integer("encoder_max_relative_position"), width)
        self.pe_k.turned = True

    def forward(self, length: int) -> Handle:
        shape, kinds = (length, length), OperationKind
        pos_seq = made_by(self.run, kinds.SUB, shape, DType.INT64)
        pos_seq = pos_seq.apart(kinds.WHERE, pos_seq.apart(kinds.LT, dtype=DType.BOOL))
        pos_seq = pos_seq.apart(kinds.WHERE, pos_seq.apart(kinds.GE, dtype=DType.BOOL))
        pos_seq = pos_seq.apart(kinds.ADD)
        made: Handle = self.pe_k(shape, pos_seq)
        return made


class WrappedEncoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.layer_norm = LayerNorm(config.integer("hidden_size"))
        self.dropout = Dropout(config.number("hidden_dropout", default=0.0))
        kinds = [None] * config.layers("encoder_layers")
        self.layers = LayerList("encoder.layers", kinds, lambda _: SpeechT5EncoderLayer(config))
        self.embed_positions = RelativePositions(config)

    def forward(self, hidden_states: Handle) -> Handle:
        begin(self, "encoder.embed", ModelPart.EMBEDDING, hidden_states)
        hidden_states = self.layer_norm(hidden_states)
        hidden_states = self.dropout(hidden_states)
        position_bias = self.embed_positions(hidden_states.shape[1])
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(hidden_states, position_bias)
        return hidden_states


class SpeechT5Encoder(SoundStack):
    prenet: Any

    def __init__(self, config: ConfigReader, before: str) -> None:
        if before:
            self.prenet = _ENCODER_PRENETS[before](config)
        self.wrapped_encoder = WrappedEncoder(config)

    def forward(self, input_values: Handle) -> Handle:
        hidden_states = self.prenet(input_values)
        outputs: Handle = self.wrapped_encoder(hidden_states)
        return outputs


class TextDecoderPrenet(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.dropout = Dropout(config.number("positional_dropout", default=0.0))
        self.embed_tokens = Embedding(config.integer("vocab_size"), config.integer("hidden_size"))
        self.embed_positions = sines(config, "max_text_positions")

    def forward(self, input_ids: Handle) -> Handle:
        positions = self.embed_positions(input_ids)
        inputs_embeds = self.embed_tokens(input_ids.shape, input_ids) * 1.0
        inputs_embeds += positions
        inputs_embeds = self.dropout(inputs_embeds)
        return inputs_embeds


class SpeechDecoderPrenet(Module):
    """A small network on each frame, and the speaker; counted alone."""

    def __init__(self, config: ConfigReader) -> None:
        hidden, units = config.integer("hidden_size"), config.integer("speech_decoder_prenet_units")
        inputs = config.integer("num_mel_bins")
        for index in range(config.layers("speech_decoder_prenet_layers")):
            setattr(self, f"layers.{index}", Linear(inputs, units, bias=True))
            inputs = units
        self.final_layer = Linear(units, hidden, bias=True)
        self.encode_positions = Parts(alpha=Weight())
        speaker = config.integer("speaker_embedding_dim")
        self.speaker_embeds_layer = Linear(speaker + hidden, hidden, bias=True)


_ENCODER_PRENETS = {SPEECH: SpeechEncoderPrenet, TEXT: TextEncoderPrenet}
_DECODER_PRENETS = {SPEECH: SpeechDecoderPrenet, TEXT: TextDecoderPrenet}


class WrappedDecoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        kinds = [None] * config.layers("decoder_layers")
        self.layers = LayerList("decoder.layers", kinds, lambda _: SpeechT5DecoderLayer(config))

    def forward(self, hidden_states: Handle, encoder_hidden_states: Handle) -> Handle:
        mask = causal_mask(self.run, *hidden_states.shape[:2])
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, mask, encoder_hidden_states)
        return hidden_states


class SpeechT5Decoder(SoundDecoder):
    def __init__(self, config: ConfigReader, behind: str) -> None:
        if behind:
            self.prenet = _DECODER_PRENETS[behind](config)
        self.wrapped_decoder = WrappedDecoder(config)

    @property
    def embed_tokens(self) -> Embedding:  # type: ignore[override]
        """The prenet's."""
        found = self.prenet.children["embed_tokens"]
        assert isinstance(found, Embedding)
        return found

    def forward(self, input_ids: Handle, encoder_hidden_states: Handle) -> Handle:
        decoder_hidden_states = self.prenet(input_ids)
        outputs: Handle = self.wrapped_decoder(decoder_hidden_states, encoder_hidden_states)
        return outputs


class BareStates(TranscriptStates):
    """The base model has nothing before its encoder, nor before its decoder; counted alone."""

    is_counted = True


class ForSpeechToText(Generation):
    """Speech in, text out."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        super().__init__(config, model, partial(base, before=SPEECH, behind=TEXT))


class SpeechDecoderPostnet(Module):
    """Frames, their end, and convolutions with batch norms."""

    def __init__(self, config: ConfigReader) -> None:
        hidden, bins = config.integer("hidden_size"), config.integer("num_mel_bins")
        frames = config.integer("reduction_factor")
        units, kernel = (
            config.integer(f"speech_decoder_postnet_{key}") for key in ("units", "kernel")
        )
        count = config.layers("speech_decoder_postnet_layers")
        self.feat_out = Linear(hidden, bins * frames, bias=True)
        self.prob_out = Linear(hidden, frames, bias=True)
        for index in range(count):
            inputs = bins if index == 0 else units
            outputs = bins if index == count - 1 else units
            made = Conv1d(inputs, outputs, kernel, bias=False)
            setattr(self, f"layers.{index}", Parts(conv=made, batch_norm=BatchNorm(outputs)))


class Speaking(Transcripts):
    """It writes a spectrum; counted alone."""

    is_counted = True
    before = TEXT

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        super().__init__(config, model, partial(base, before=self.before, behind=SPEECH))

    def add_head(self, config: ConfigReader) -> None:
        """What makes frames of hidden states."""
        self.speech_decoder_postnet = SpeechDecoderPostnet(config)


class ForSpeechToSpeech(Speaking):
    before = SPEECH


class SpeechT5Model(Recognizer):
    encoder: SpeechT5Encoder
    prefix = "speecht5"
    output = "text_decoder_postnet.lm_head"
    positions_key = "max_text_positions"
    eager_only = True
    endings: ClassVar[dict[str, type[SoundTask]]] = {
        "ForSpeechToText": ForSpeechToText, "ForTextToSpeech": Speaking,
    }  # fmt: skip
    bare = BareStates

    def __init__(self, config: ConfigReader, *, before: str = "", behind: str = "") -> None:
        self.encoder = SpeechT5Encoder(config, before)
        self.decoder = SpeechT5Decoder(config, behind)
        self.vocab, self.width = config.integer("vocab_size"), config.integer("hidden_size")
        self.tied = config.flag("tie_word_embeddings")
        self.longest = sines(config, "max_text_positions").rows
        stacks = "encoder", "decoder"
        length = SECONDS * SAMPLING_RATE
        self.sound = self.described(1, length, SAMPLING_RATE, stacks=stacks)

    @classmethod
    def named_task(cls, config: ConfigReader, model: Any) -> type[SoundTask]:
        """Of two that speak, that which ``architectures`` name."""
        found = super().named_task(config, model)
        hears = any("ForSpeechTo" in each for each in config.texts("architectures"))
        return ForSpeechToSpeech if model.task is Task.OTHER and hears else found

    def begin_first(self) -> None:
        """That of the first convolution."""
        self.encoder.prenet.feature_encoder.begin(0, None)
