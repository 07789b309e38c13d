"""PatchTSMixer: patches of series mixed without attention, or with a little.

(transformers 5.23: models/patchtsmixer)
"""

from typing import Any, ClassVar

from memplan.classes.pictures.base import PictureTask
from memplan.classes.sensed.counted import Parts
from memplan.classes.series.base import (
    PREDICTION,
    PRETRAINING,
    REGRESSION,
    ForPrediction,
    SeriesAttention,
    SeriesModel,
    SeriesTask,
    dropped,
    norm_of,
    positions,
    projection,
)
from memplan.graph.modules.basic import Linear
from memplan.graph.modules.functional import activated, softmax
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation


class PatchTSMixerNormLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.batch = "batch" in config.text("norm_mlp", default="LayerNorm").lower()
        self.norm = norm_of(config.integer("d_model"), batch=self.batch)

    def forward(self, inputs: Handle) -> Handle:
        if not self.batch:
            return self.norm(inputs)
        batch, channels, length, size = inputs.shape
        inputs_reshaped = inputs.reshape(batch * channels, length, size)
        inputs_reshaped = self.norm(inputs_reshaped)
        return inputs_reshaped.reshape(*inputs.shape)


class PatchTSMixerMLP(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        inner = size * config.integer("expansion_factor")
        self.fc1 = Linear(size, inner, bias=True)
        self.dropout1 = dropped(config, "dropout")
        self.fc2 = Linear(inner, size, bias=True)
        self.dropout2 = dropped(config, "dropout")

    def forward(self, inputs: Handle) -> Handle:
        inputs = self.dropout1(activated(self.fc1(inputs), Activation.GELU))
        inputs = self.fc2(inputs)
        inputs = self.dropout2(inputs)
        return inputs


class PatchTSMixerGatedAttention(Module):
    def __init__(self, size: int) -> None:
        self.attn_layer = Linear(size, size, bias=True)

    def forward(self, inputs: Handle) -> Handle:
        attn_weight = softmax(self.attn_layer(inputs))
        inputs = inputs * attn_weight
        return inputs


class MixerBlock(Module):
    """What mixes along one dimension."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        self.norm = PatchTSMixerNormLayer(config)
        self.mlp = PatchTSMixerMLP(config, size)
        self.gated_attn = config.flag("gated_attn")
        if self.gated_attn:
            self.gating_block = PatchTSMixerGatedAttention(size)


class PatchTSMixerChannelFeatureMixerBlock(MixerBlock):
    """The gate comes before the network here."""

    def forward(self, inputs: Handle) -> Handle:
        residual = inputs
        inputs = self.norm(inputs)
        inputs = inputs.permute(0, 3, 2, 1)
        if self.gated_attn:
            inputs = self.gating_block(inputs)
        inputs = self.mlp(inputs)
        inputs = inputs.permute(0, 3, 2, 1)
        return inputs + residual


class PatchMixerBlock(MixerBlock):
    def __init__(self, config: ConfigReader, size: int) -> None:
        super().__init__(config, size)
        self.attends = config.flag("self_attn")
        if self.attends:
            rate = config.number("dropout", default=0.0)
            self.self_attn_layer = SeriesAttention(config, "self_attn_heads", rate)
            self.norm_attn = PatchTSMixerNormLayer(config)

    def forward(self, hidden_state: Handle) -> Handle:
        residual = hidden_state
        hidden_state = self.norm(hidden_state)
        x_attn = None
        if self.attends:
            batch, channels, length, size = hidden_state.shape
            hidden_state_reshaped = hidden_state.reshape(batch * channels, length, size)
            x_attn, _ = self.self_attn_layer(hidden_state_reshaped)
            x_attn = x_attn.reshape(*hidden_state.shape)
        hidden_state = hidden_state.transpose(2, 3)
        hidden_state = self.mlp(hidden_state)
        if self.gated_attn:
            hidden_state = self.gating_block(hidden_state)
        hidden_state = hidden_state.transpose(2, 3)
        if x_attn is not None:
            hidden_state = self.norm_attn(hidden_state + x_attn)
        return hidden_state + residual


class FeatureMixerBlock(MixerBlock):
    def forward(self, hidden: Handle) -> Handle:
        residual = hidden
        hidden = self.norm(hidden)
        hidden = self.mlp(hidden)
        if self.gated_attn:
            hidden = self.gating_block(hidden)
        return hidden + residual


class PatchTSMixerLayer(Module):
    def __init__(self, config: ConfigReader, patches: int) -> None:
        self.patch_mixer = PatchMixerBlock(config, patches)
        self.feature_mixer = FeatureMixerBlock(config, config.integer("d_model"))
        self.across = config.text("mode") == "mix_channel"
        if self.across:
            channels = config.integer("num_input_channels")
            self.channel_feature_mixer = PatchTSMixerChannelFeatureMixerBlock(config, channels)

    def forward(self, hidden: Handle) -> Handle:
        if self.across:
            hidden = self.channel_feature_mixer(hidden)
        hidden = self.patch_mixer(hidden)
        hidden = self.feature_mixer(hidden)
        return hidden


class PatchTSMixerForPrediction(ForPrediction):
    def add_head(self, config: ConfigReader) -> None:
        """A projection of all patches of a channel."""
        self.dropout_layer = dropped(config, "head_dropout")
        features, out = self.model.context * self.model.width, config.integer("prediction_length")
        self.head = Parts(base_forecast_block=projection(config, features, out))

    def forecast(self, embedding: Handle) -> Handle:
        hidden_features = embedding.view(*embedding.shape[:2], -1)
        hidden_features = self.dropout_layer(hidden_features)
        made: Handle = self.head.children["base_forecast_block"](hidden_features)
        return made


class PatchTSMixerForPretraining(SeriesTask):
    def sizes(self, config: ConfigReader) -> tuple[Any, ...]:
        return "base_pt_block", self.model.width, config.integer("patch_length")


class PatchTSMixerForTimeSeriesClassification(SeriesTask):
    def add_head(self, config: ConfigReader) -> None:
        seen = 1 if config.text("head_aggregation") else self.model.context
        features = self.model.width * config.integer("num_input_channels") * seen
        self.head = Parts(projection=self.projection(config, features))
        self.inject_scale = inject_scale(config, self.model.width)

    def projection(self, config: ConfigReader, features: int) -> Module:
        """To the classes."""
        return Linear(features, config.integer("num_targets"), bias=True)


class PatchTSMixerForRegression(PatchTSMixerForTimeSeriesClassification):
    def projection(self, config: ConfigReader, features: int) -> Module:
        """To the values."""
        return projection(config, features, config.integer("num_targets"))


def inject_scale(config: ConfigReader, size: int) -> Parts:
    """``InjectScalerStatistics4D``: mean and scale beside the features, twice as wide inside."""
    if config.raw("scaling") not in ("std", "mean", True):
        return Parts()
    return Parts(
        inverse_trans_expansion=Linear(size + 2, 2 * size, bias=True),
        inverse_trans_compression=Linear(2 * size, size, bias=True),
        map_scale_expansion=Linear(2, 4, bias=True),
        map_scale_compression=Linear(4, 2, bias=True),
    )


class PatchTSMixerModel(SeriesModel):
    eager_only = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        PREDICTION: PatchTSMixerForPrediction,
        PRETRAINING: PatchTSMixerForPretraining,
        REGRESSION: PatchTSMixerForRegression,
        "ForTimeSeriesClassification": PatchTSMixerForTimeSeriesClassification,
    }

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        size, encoder = self.width, Parts(patcher=Linear(self.patch, self.width, bias=True))
        self.forecasts &= config.raw("prediction_channel_indices") is None
        self.placed = config.flag("use_positional_encoding")
        if self.placed:
            encoder.positional_encoder = Parts(position_enc=positions(config, self.context, size))
        kinds = [None] * config.layers("num_layers")
        mixers = LayerList("layers", kinds, lambda _: PatchTSMixerLayer(config, self.context))
        encoder.mlp_mixer_encoder = Parts(mixers=mixers)
        self.encoder = encoder
        self.picture = self.described(0, channels=0)

    def left_out(self, ending: str) -> bool:
        """Losses of distributions, and of some channels alone."""
        return ending == PREDICTION and not self.forecasts

    def forward(self, past_values: Handle) -> tuple[Handle, ...]:
        observed_mask = self.observed(past_values)
        scaled_past_values, loc, scale = self.scaled(past_values, observed_mask)
        patched_x = self.patches(scaled_past_values)
        embedding = self.encoder.children["patcher"](patched_x)
        if self.placed:
            places = self.encoder.children["positional_encoder"]
            embedding = embedding + places.operand(places.weights["position_enc"])
        mixers = self.encoder.children["mlp_mixer_encoder"].children["mixers"]
        assert isinstance(mixers, LayerList)
        for mod in mixers:
            embedding = mod(embedding)
        return patched_x, loc, scale, embedding
