"""wav2vec 2.0 and its kin: convolutions of the signal, then a transformer.

Layers that ``layerdrop`` may skip are counted as run. (transformers 5.23: models/wav2vec2, hubert, unispeech,
unispeech_sat, data2vec)
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from memplan.classes.sounds.base import SAMPLING_RATE, SECONDS, SoundModel, SoundTask
from memplan.classes.sounds.parts import (
    FeatureEncoder,
    FeedForward,
    OutsideCheckpoints,
    WeightNormConv1d,
    gated_halves,
    masked_time,
    masks,
    overwrite_masked,
)
from memplan.classes.sounds.tasks import BASIC_ENDINGS, ENDINGS, PRETRAINED
from memplan.classes.translating.layers import BartAttention
from memplan.families.towers.layers import tower_activation
from memplan.graph.modules.basic import (
    ActivationModule,
    Dropout,
    LayerNorm,
    Linear,
    layer_norm,
)
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.functional import read_in_rows
from memplan.graph.modules.grids import BatchNorm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart

POSITIONS = 1500
"""What the layers see of 30 seconds at 50 vectors a second, which is how long clips are cut."""


class FeatureProjection(Module):
    """A norm, a linear layer; what the norm gives is returned beside it."""

    segment: tuple[str, ModelPart] | None = ("feature_projection", ModelPart.OTHER)

    def __init__(self, config: ConfigReader, channels: int) -> None:
        if self.is_normed(config):
            self.layer_norm = LayerNorm(channels)
        self.projection = Linear(channels, config.integer("hidden_size"), bias=True)
        self.dropout = Dropout(config.number("feat_proj_dropout", default=0.0))

    def is_normed(self, config: ConfigReader) -> bool:  # noqa: ARG002
        """It has a norm."""
        return True

    def forward(self, hidden_states: Handle) -> tuple[Handle, Handle]:
        norm_hidden_states = self.layer_norm(hidden_states)
        hidden_states = self.projection(norm_hidden_states)
        hidden_states = self.dropout(hidden_states)
        return hidden_states, norm_hidden_states


class PositionalConvEmbedding(Module):
    """One convolution over many frames, of groups of channels."""

    conv_class: Callable[..., Conv1d] = WeightNormConv1d

    def __init__(self, config: ConfigReader) -> None:
        hidden, groups = config.integer("hidden_size"), config.integer(GROUPS)
        config.divide("hidden_size", hidden, GROUPS, groups)
        kernel = config.integer("num_conv_pos_embeddings")
        self.conv = self.conv_class(hidden, hidden, kernel, padding=kernel // 2, groups=groups)
        self.activation = ActivationModule(tower_activation(config, "feat_extract_activation"))

    def forward(self, hidden_states: Handle) -> Handle:
        length = hidden_states.shape[1]
        # Its gradient is added to the other one only behind the weight's norm.
        hidden_states = hidden_states.turned(0, 2, 1)
        hidden_states = self.convolved(hidden_states)
        hidden_states = cut_to(hidden_states, length)
        hidden_states = self.activation(hidden_states)
        hidden_states = hidden_states.transpose(1, 2)
        return hidden_states

    def convolved(self, hidden_states: Handle) -> Handle:
        """What the convolution makes of it."""
        made: Handle = self.conv(hidden_states)
        return made


GROUPS = "num_conv_pos_embedding_groups"


def cut_to(x: Handle, length: int) -> Handle:
    """``Wav2Vec2SamePadLayer``: what an even kernel gives too much is left out."""
    return x if x.shape[-1] == length else x.narrow(length)


class Wav2Vec2Attention(BartAttention):
    def __init__(self, config: ConfigReader, *, is_first: bool) -> None:
        del is_first
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        self.head_dim = config.divide("hidden_size", hidden, "num_attention_heads", heads)
        self.num_heads, self.causal = heads, False
        self.dropout = config.number("attention_dropout", default=0.0)
        self.add_projections(hidden, bias=True)


def network(config: ConfigReader) -> FeedForward:
    """Of a layer."""
    return FeedForward(
        config.integer("hidden_size"), config.integer("intermediate_size"),
        tower_activation(config, "hidden_act"), config.number("activation_dropout", default=0.0),
        config.number("hidden_dropout", default=0.0),
    )  # fmt: skip


class LayerParts(Module):
    """Attention, a network and two norms."""

    attention_class: Callable[..., Module] = Wav2Vec2Attention

    def __init__(self, config: ConfigReader, *, is_first: bool) -> None:
        hidden = config.integer("hidden_size")
        self.attention = self.attention_class(config, is_first=is_first)
        self.dropout = Dropout(config.number("hidden_dropout", default=0.0))
        self.layer_norm = LayerNorm(hidden)
        self.feed_forward = network(config)
        self.final_layer_norm = LayerNorm(hidden)


class Wav2Vec2EncoderLayer(LayerParts):
    def forward(self, hidden_states: Handle, *beside: Handle | None) -> tuple[Handle, ...]:
        attn_residual = hidden_states
        hidden_states, _, *shared = self.attention(hidden_states, *beside)
        hidden_states = self.dropout(hidden_states)
        hidden_states = attn_residual + hidden_states
        hidden_states = self.layer_norm(hidden_states)
        hidden_states = hidden_states + self.feed_forward(hidden_states)
        hidden_states = self.final_layer_norm(hidden_states)
        return hidden_states, *shared


class Wav2Vec2EncoderLayerStableLayerNorm(LayerParts):
    """Norms before each part, and perhaps a small network behind both."""

    def __init__(self, config: ConfigReader, *, is_first: bool) -> None:
        super().__init__(config, is_first=is_first)
        if config.optional_integer("adapter_attn_dim"):
            self.adapter_layer = Wav2Vec2AttnAdapterLayer(config)

    def forward(self, hidden_states: Handle, *beside: Handle | None) -> tuple[Handle, ...]:
        attn_residual = hidden_states
        hidden_states = self.layer_norm(hidden_states)
        hidden_states, _, *shared = self.attention(hidden_states, *beside)
        hidden_states = self.dropout(hidden_states)
        hidden_states = attn_residual + hidden_states
        hidden_states = hidden_states + self.feed_forward(self.final_layer_norm(hidden_states))
        if "adapter_layer" in self.children:
            hidden_states = hidden_states + self.adapter_layer(hidden_states)
        return hidden_states, *shared


class Wav2Vec2AttnAdapterLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden, narrow = config.integer("hidden_size"), config.integer("adapter_attn_dim")
        self.norm = LayerNorm(hidden)
        self.linear_1 = Linear(hidden, narrow, bias=True)
        self.act_fn = ActivationModule(Activation.RELU)
        self.linear_2 = Linear(narrow, hidden, bias=True)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.norm(hidden_states)
        hidden_states = self.linear_1(hidden_states)
        hidden_states = self.act_fn(hidden_states)
        hidden_states = self.linear_2(hidden_states)
        return hidden_states


class EncoderParts(Module):
    """Positions, layers, and a norm before or behind them."""

    segment = "encoder.embed", ModelPart.EMBEDDING
    is_stable = False
    """The norm stands behind the layers."""
    positions_class: Callable[[ConfigReader], Module] = PositionalConvEmbedding
    layer_class: Callable[..., Module] = Wav2Vec2EncoderLayer
    first_differs = False
    """The first layer makes what all others are given."""

    def __init__(self, config: ConfigReader) -> None:
        self.collects = weighs_layers(config)
        self.pos_conv_embed = self.positions_class(config)
        self.layer_norm = LayerNorm(config.integer("hidden_size"))
        if self.is_stable:
            self.layer_norm.segment = "encoder.norm", ModelPart.NORM
        self.dropout = Dropout(config.number("hidden_dropout", default=0.0))
        kinds = layer_kinds(config, collects=self.collects, differs=self.first_differs)
        self.layers = LayerList("encoder.layers", kinds, partial(self.made_layer, config))

    def made_layer(self, config: ConfigReader, kind: int) -> Module:
        """A layer of a kind."""
        return self.layer_class(config, is_first=kind == 0)


class Wav2Vec2Encoder(EncoderParts):
    def forward(self, hidden_states: Handle) -> tuple[Handle, list[Handle]]:
        position_embeddings = self.pos_conv_embed(hidden_states)
        hidden_states = hidden_states + position_embeddings
        if not self.is_stable:
            hidden_states = self.layer_norm(hidden_states)
        hidden_states = self.dropout(hidden_states)
        all_hidden_states = [hidden_states] if self.collects else []
        beside = [None] * self.first_differs
        for layer in self.layers:
            hidden_states, *beside = layer(hidden_states, *beside)
            if self.collects:
                all_hidden_states.append(hidden_states)
        if self.is_stable:
            hidden_states = self.layer_norm(hidden_states)
        return hidden_states, all_hidden_states


class Wav2Vec2EncoderStableLayerNorm(Wav2Vec2Encoder):
    is_stable = True
    layer_class = Wav2Vec2EncoderLayerStableLayerNorm


def layer_kinds(config: ConfigReader, *, collects: bool, differs: bool = False) -> list[int]:
    """A kind for each layer: where what all give is kept, none stands for others."""
    numbers = range(config.layers("num_hidden_layers"))
    return [number if collects else min(number, differs) for number in numbers]


def weighs_layers(config: ConfigReader) -> bool:
    """Whether a head reads all layers' results; the class for transcripts has none that does."""
    return config.flag("use_weighted_layer_sum") and not any(
        each.endswith(("ForCTC", "Model")) for each in config.texts("architectures")
    )


class Wav2Vec2AdapterLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        size, stride = output_size(config), config.integer("adapter_stride")
        self.conv = Conv1d(
            size, 2 * size, config.integer("adapter_kernel_size"), stride=stride, padding=1
        )

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.conv(hidden_states)
        hidden_states = gated_halves(hidden_states)
        return hidden_states


class Wav2Vec2Adapter(Module):
    """Frames are made fewer."""

    turns = True
    """Its layers read channels in turn."""

    def __init__(self, config: ConfigReader) -> None:
        hidden, size = config.integer("hidden_size"), output_size(config)
        if size != hidden:
            self.segment = "adapter.embed", ModelPart.OTHER
            self.proj = Linear(hidden, size, bias=True)
            self.proj_layer_norm = LayerNorm(size)
        kinds = [None] * config.layers("num_adapter_layers")
        self.layers = OutsideCheckpoints("adapter.layers", kinds, lambda _: self.made_layer(config))

    def made_layer(self, config: ConfigReader) -> Module:
        """A layer."""
        return Wav2Vec2AdapterLayer(config)

    def forward(self, hidden_states: Handle) -> Handle:
        if "proj" in self.children:
            hidden_states = self.proj(hidden_states)
            hidden_states = self.proj_layer_norm(hidden_states)
        if self.turns:
            hidden_states = hidden_states.transpose(1, 2)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        if self.turns:
            hidden_states = hidden_states.transpose(1, 2)
        return hidden_states


def output_size(config: ConfigReader) -> int:
    """Width behind an adapter, where there is one."""
    return config.integer("output_hidden_size", default=config.integer("hidden_size"))


class Wav2Vec2Model(SoundModel):
    prefix = "wav2vec2"
    endings: ClassVar[dict[str, type[SoundTask]]] = PRETRAINED
    norms_all = False
    """Each convolution of the signal has a layer norm, whatever the config says."""
    always_masks = False
    """The vector for masked stretches is there whatever their probability is."""
    adapts = True
    """The class can have an adapter behind the encoder."""
    projection_class: Callable[[ConfigReader, int], Module] = FeatureProjection
    encoder_class: Callable[[ConfigReader], Module] = Wav2Vec2Encoder
    stable_class: Callable[[ConfigReader], Module] = Wav2Vec2EncoderStableLayerNorm
    adapter_class: Callable[[ConfigReader], Module] = Wav2Vec2Adapter

    def __init__(self, config: ConfigReader) -> None:
        self.width = config.integer("hidden_size")
        self.add_signal(config)
        if self.always_masks or masks(config):
            self.masked_spec_embed = Weight(self.width)
        self.masked_time = masked_time(config)
        stable = config.flag("do_stable_layer_norm")
        self.encoder = self.stable_class(config) if stable else self.encoder_class(config)
        if self.adapts and config.flag("add_adapter"):
            self.adapter = self.adapter_class(config)
        self.describe(config)

    def add_signal(self, config: ConfigReader) -> None:
        """Declare what makes frames of a signal."""
        self.feature_extractor = FeatureEncoder(config, norms_all=self.norms_all)
        channels = self.feature_extractor.channels
        self.feature_projection = self.projection_class(config, channels)

    def describe(self, config: ConfigReader) -> None:
        """Say what it is given."""
        del config
        self.sound = self.described(1, SECONDS * SAMPLING_RATE, SAMPLING_RATE)

    def context_length(self, config: ConfigReader) -> int:
        """Frames."""
        del config
        return POSITIONS

    def output_width(self, config: ConfigReader) -> int:
        """Of what it gives, behind an adapter where it has one."""
        return output_size(config) if "adapter" in self.children else self.width

    def begin_first(self) -> None:
        """That of the first convolution."""
        self.feature_extractor.begin(0, None)

    def frames(self, input_values: Handle) -> Handle:
        """What the convolutions give."""
        extract_features = self.feature_extractor(input_values)
        return read_in_rows(extract_features.transpose(1, 2))

    def masked(self, hidden_states: Handle) -> Handle:
        """With stretches of time overwritten."""
        if "masked_spec_embed" not in self.weights:
            return hidden_states
        if self.masked_time is None:
            self.parameter(self.masked_spec_embed).unused = True
            return hidden_states
        return overwrite_masked(self, self.masked_spec_embed, hidden_states, self.masked_time)

    def forward(self, input_values: Handle) -> tuple[Handle, list[Handle], Handle]:
        extract_features = self.frames(input_values)
        hidden_states, extract_features = self.feature_projection(extract_features)
        hidden_states = self.masked(hidden_states)
        encoder_outputs = self.encoder(hidden_states)
        hidden_states = encoder_outputs[0]
        if "adapter" in self.children:
            hidden_states = self.adapter(hidden_states)
        return hidden_states, encoder_outputs[1], extract_features


class UniSpeechModel(Wav2Vec2Model):
    prefix = "unispeech"
    endings = BASIC_ENDINGS
    adapts = False


class UniSpeechSatModel(Wav2Vec2Model):
    prefix = "unispeech_sat"
    endings = ENDINGS
    adapts = False
    always_masks = True


class HubertPositionalConvEmbedding(PositionalConvEmbedding):
    """With a batch norm before it, where the config says so, and then a weight without a norm."""

    def __init__(self, config: ConfigReader) -> None:
        if config.flag("conv_pos_batch_norm"):
            self.batch_norm = BatchNorm(config.integer("hidden_size"))
            self.conv_class = Conv1d
        super().__init__(config)

    def convolved(self, hidden_states: Handle) -> Handle:
        if "batch_norm" in self.children:
            hidden_states = self.batch_norm(hidden_states)
        return super().convolved(hidden_states)


class HubertFeatureProjection(FeatureProjection):
    """Its norm may be left out, and is not returned."""

    def is_normed(self, config: ConfigReader) -> bool:
        """As the config says."""
        return config.flag("feat_proj_layer_norm")

    def forward(self, hidden_states: Handle) -> Handle:  # type: ignore[override]
        if "layer_norm" in self.children:
            hidden_states = self.layer_norm(hidden_states)
        hidden_states = self.projection(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return hidden_states


class HubertEncoder(Wav2Vec2Encoder):
    positions_class = HubertPositionalConvEmbedding


class HubertEncoderStableLayerNorm(Wav2Vec2EncoderStableLayerNorm):
    positions_class = HubertPositionalConvEmbedding


class HubertModel(UniSpeechModel):
    prefix = "hubert"
    projection_class = HubertFeatureProjection
    encoder_class = HubertEncoder
    stable_class = HubertEncoderStableLayerNorm

    def forward(  # type: ignore[override]
        self, input_values: Handle
    ) -> tuple[Handle, list[Handle]]:
        extract_features = self.frames(input_values)
        hidden_states = self.feature_projection(extract_features)
        hidden_states = self.masked(hidden_states)
        encoder_outputs: tuple[Handle, list[Handle]] = self.encoder(hidden_states)
        return encoder_outputs


class Data2VecAudioPositionalConvLayer(Module):
    """A convolution, and a norm without weights."""

    def __init__(self, config: ConfigReader) -> None:
        hidden, groups = config.integer("hidden_size"), config.integer(GROUPS)
        config.divide("hidden_size", hidden, GROUPS, groups)
        kernel = config.integer("conv_pos_kernel_size")
        self.conv = Conv1d(hidden, hidden, kernel, padding=kernel // 2, groups=groups)
        self.activation = ActivationModule(tower_activation(config, "feat_extract_activation"))

    def forward(self, hidden_states: Handle) -> Handle:
        _, width, length = hidden_states.shape
        hidden_states = self.conv(hidden_states)
        hidden_states = cut_to(hidden_states, length)
        hidden_states = hidden_states.transpose(1, 2)
        hidden_states = layer_norm(hidden_states, width)
        hidden_states = hidden_states.transpose(1, 2)
        hidden_states = self.activation(hidden_states)
        return hidden_states


class Data2VecAudioPositionalConvEmbedding(Module):
    """Several of them."""

    def __init__(self, config: ConfigReader) -> None:
        for index in range(config.layers("num_conv_pos_embeddings")):
            setattr(self, f"layers.{index}", Data2VecAudioPositionalConvLayer(config))

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = hidden_states.transpose(1, 2)
        for layer in self.children.values():
            hidden_states = layer(hidden_states)
        hidden_states = hidden_states.transpose(1, 2)
        return hidden_states


class Data2VecAudioEncoder(Wav2Vec2Encoder):
    positions_class = Data2VecAudioPositionalConvEmbedding


class Data2VecAudioModel(Wav2Vec2Model):
    prefix = "data2vec_audio"
    endings = ENDINGS
    norms_all = True
    encoder_class = stable_class = Data2VecAudioEncoder
