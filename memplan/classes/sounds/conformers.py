"""wav2vec 2.0 with a Conformer: over a signal's frames, or over filter banks and with adapters that attend.

(transformers 5.23: models/wav2vec2_conformer, wav2vec2_bert)
"""

from memplan.classes.encoders.base import spare
from memplan.classes.sounds.base import SECONDS, begin
from memplan.classes.sounds.conformer import (
    ROTARY,
    SINES,
    TABLE,
    ConformerAdapterLayer,
    ConformerEncoderLayer,
    PositionTables,
    network,
    read_conformer,
)
from memplan.classes.sounds.tasks import ENDINGS
from memplan.classes.sounds.wav2vec2 import (
    FeatureProjection,
    PositionalConvEmbedding,
    Wav2Vec2Adapter,
    Wav2Vec2Model,
    layer_kinds,
    output_size,
    weighs_layers,
)
from memplan.families.towers.layers import tower_activation
from memplan.fast_dataclass import replace
from memplan.graph.modules.basic import Dropout, LayerNorm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart

FRAMES_A_SECOND = 50
"""Filter banks every 10 milliseconds, two of which lie in a row (``SeamlessM4TFeatureExtractor``)."""


class Wav2Vec2BertEncoder(PositionTables):
    segment = "encoder.embed", ModelPart.EMBEDDING
    known: tuple[str, ...] = (SINES, TABLE, ROTARY)
    causal = True

    def __init__(self, config: ConfigReader) -> None:
        kind = read_conformer(config, self.known, causal=self.causal)
        self.collects = weighs_layers(config)
        self.add_positions(kind)
        self.add_idle(config)
        self.dropout = Dropout(kind.dropout)
        kinds = layer_kinds(config, collects=self.collects)
        self.layers = LayerList("encoder.layers", kinds, lambda _: ConformerEncoderLayer(kind))

    def add_idle(self, config: ConfigReader) -> None:
        """Declare what stands before the layers."""

    def forward(self, hidden_states: Handle) -> tuple[Handle, list[Handle]]:
        hidden_states = self.dropout(hidden_states)
        relative_position_embeddings = self.relative(hidden_states)
        self.declare_idle()
        all_hidden_states = [hidden_states] if self.collects else []
        for layer in self.layers:
            hidden_states = layer(hidden_states, relative_position_embeddings)
            if self.collects:
                all_hidden_states.append(hidden_states)
        if "layer_norm" in self.children:
            hidden_states = self.children["layer_norm"](hidden_states)
        return hidden_states, all_hidden_states

    def declare_idle(self) -> None:
        """Declare what never runs."""


class Wav2Vec2ConformerEncoder(Wav2Vec2BertEncoder):
    """It owns a convolution for positions, and never runs it."""

    known = SINES, ROTARY
    causal = False

    def add_idle(self, config: ConfigReader) -> None:
        """The convolution, and the norm behind the layers."""
        self.pos_conv_embed = PositionalConvEmbedding(config)
        self.layer_norm = LayerNorm(config.integer("hidden_size"))
        self.layer_norm.segment = "encoder.norm", ModelPart.NORM

    def declare_idle(self) -> None:
        """The convolution."""
        spare(self.pos_conv_embed)


class Wav2Vec2ConformerModel(Wav2Vec2Model):
    prefix = "wav2vec2_conformer"
    encoder_class = stable_class = Wav2Vec2ConformerEncoder


class Wav2Vec2BertFeatureProjection(FeatureProjection):
    segment = None


class Wav2Vec2BertAdapter(Wav2Vec2Adapter):
    turns = False

    def made_layer(self, config: ConfigReader) -> Module:
        size, heads = output_size(config), config.integer("num_attention_heads")
        config.divide("output_hidden_size", size, "num_attention_heads", heads)
        active = tower_activation(config, "adapter_act")
        kind = read_conformer(config, (), causal=True)
        own = replace(kind, size=size, activation=active)
        kernel, stride = config.integer("adapter_kernel_size"), config.integer("adapter_stride")
        return ConformerAdapterLayer(own, kernel, stride, kind.convolution_dropout)


class Wav2Vec2BertModel(Wav2Vec2Model):
    prefix = "wav2vec2_bert"
    endings = ENDINGS
    projection_class = Wav2Vec2BertFeatureProjection
    encoder_class = stable_class = Wav2Vec2BertEncoder
    adapter_class = Wav2Vec2BertAdapter

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        if config.flag("use_intermediate_ffn_before_adapter"):
            kind = replace(read_conformer(config, ()), activation=Activation.RELU)
            self.intermediate_ffn = network(kind)
            self.intermediate_ffn.segment = "intermediate", ModelPart.OTHER

    def add_signal(self, config: ConfigReader) -> None:
        """Filter banks come as they are."""
        channels = config.integer("feature_projection_input_dim")
        self.feature_projection = self.projection_class(config, channels)

    def describe(self, config: ConfigReader) -> None:
        """They are frames."""
        channels = config.integer("feature_projection_input_dim")
        rate = FRAMES_A_SECOND
        self.sound = self.described(channels, SECONDS * rate, rate, is_framed=True)

    def begin_first(self) -> None:
        """That of the projection."""
        begin(self, "feature_projection", ModelPart.OTHER, None)

    def forward(self, input_features: Handle) -> tuple[Handle, list[Handle], Handle]:
        hidden_states, extract_features = self.feature_projection(input_features)
        hidden_states = self.masked(hidden_states)
        encoder_outputs = self.encoder(hidden_states)
        hidden_states = encoder_outputs[0]
        if "intermediate_ffn" in self.children:
            expanded_hidden_states = self.intermediate_ffn(hidden_states)
            hidden_states = hidden_states + expanded_hidden_states * 0.5
        if "adapter" in self.children:
            hidden_states = self.adapter(hidden_states)
        return hidden_states, encoder_outputs[1], extract_features
