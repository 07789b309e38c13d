"""ConvNeXt and its second version: a depthwise convolution, then each position's channels with one another.

(transformers 5.23, models/convnext/modeling_convnext.py, models/convnextv2/modeling_convnextv2.py)
"""

from functools import partial
from typing import ClassVar

from memplan.classes.pictures.backbones import Backbone
from memplan.classes.pictures.base import (
    IMAGES,
    PictureModel,
    PictureTask,
    PooledClassification,
    begin,
)
from memplan.classes.pictures.parts import Stages, drop_paths
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import each_stage, pair, ratio
from memplan.graph.modules.basic import ActivationModule, LayerNorm, Linear, scaled
from memplan.graph.modules.functional import divide
from memplan.graph.modules.grids import Conv2d, DropPath, mean_of_picture, norm_of_picture
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart

KERNEL = 7
"""Of the depthwise convolution; between stages it is 2 (``ConvNextLayer``, ``ConvNextStage``)."""
EXPANSION = 4


class ChannelsFirstNorm(LayerNorm):
    """``ConvNextLayerNorm``, whose channels stand before the sides."""

    def forward(self, features: Handle) -> Handle:
        features = features.turned(0, 2, 3, 1)
        features = super().forward(features)
        features = features.permute(0, 3, 1, 2)
        return features


class ConvNextEmbeddings(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        patch, channels = config.integer("patch_size"), config.integer("num_channels")
        self.patch_embeddings = Conv2d(channels, size, patch, stride=(patch, patch))
        self.layernorm = ChannelsFirstNorm(size)

    def forward(self, pixel_values: Handle) -> Handle:
        embeddings = self.patch_embeddings(pixel_values)
        embeddings = self.layernorm(embeddings)
        return embeddings


class ConvNextLayer(Module):
    def __init__(self, config: ConfigReader, size: int, rate: float) -> None:
        self.dwconv = Conv2d(size, size, KERNEL, padding=KERNEL // 2, groups=size)
        self.layernorm = LayerNorm(size)
        self.pwconv1 = Linear(size, EXPANSION * size, bias=True)
        self.act = ActivationModule(tower_activation(config, "hidden_act"))
        self.pwconv2 = Linear(EXPANSION * size, size, bias=True)
        self.drop_path = DropPath(rate)
        self.add_own(config, size)

    def add_own(self, config: ConfigReader, size: int) -> None:
        """Numbers that scale each channel."""
        if ratio(config, "layer_scale_init_value") > 0:
            self.layer_scale_parameter = Weight(size)

    def mixed(self, features: Handle) -> Handle:
        """The network behind its nonlinearity."""
        features = self.pwconv2(features)
        if "layer_scale_parameter" in self.weights:
            features = scaled(self, self.layer_scale_parameter, features)
        return features

    def forward(self, features: Handle) -> Handle:
        residual = features
        features = self.dwconv(features)
        features = features.permute(0, 2, 3, 1)
        features = self.layernorm(features)
        features = self.pwconv1(features)
        features = self.act(features)
        features = self.mixed(features)
        features = features.permute(0, 3, 1, 2)
        features = residual + self.drop_path(features)
        return features


class ConvNextV2GRN(Module):
    """Each channel's norm over the picture, by the mean of all channels'."""

    def __init__(self, size: int) -> None:
        self.weight, self.bias = Weight(1, 1, 1, size), Weight(1, 1, 1, size)

    def forward(self, hidden_states: Handle) -> Handle:
        global_features = norm_of_picture(hidden_states)
        norm_features = divide(global_features, global_features.mean() + 1e-6)
        norm_features.record.by_column = True  # of a picture's channels
        hidden_states = (
            scaled(self, self.weight, hidden_states * norm_features)
            + self.operand(self.bias)
            + hidden_states
        )
        return hidden_states


class ConvNextV2Layer(ConvNextLayer):
    def add_own(self, config: ConfigReader, size: int) -> None:
        """A norm of responses."""
        del config
        self.grn = ConvNextV2GRN(EXPANSION * size)

    def mixed(self, features: Handle) -> Handle:
        """The network behind its nonlinearity."""
        features = self.grn(features)
        features = self.pwconv2(features)
        return features


class ConvNextStage(Module):
    def __init__(self, index: int, before: int, size: int, layers: LayerList) -> None:
        if index:
            norm, halved = ChannelsFirstNorm(before), Conv2d(before, size, 2, stride=2)
            norm.segment = f"stages.{index}.downsampling", ModelPart.OTHER
            setattr(self, "downsampling_layer.0", norm)
            setattr(self, "downsampling_layer.1", halved)
        self.layers = layers

    def forward(self, features: Handle) -> Handle:
        for down in list(self.children.values())[:-1]:
            features = down(features)
        for layer in self.layers:
            features = layer(features)
        return features


class ConvNextModel(PictureModel):
    prefix = "convnext"
    layer_class = ConvNextLayer
    endings: ClassVar[dict[str, type[PictureTask]]] = {IMAGES: PooledClassification}

    def __init__(self, config: ConfigReader) -> None:
        sizes = each_stage(config, "hidden_sizes", config.layers("num_stages"))
        depths = each_stage(config, "depths", len(sizes), minimum=0)
        rates = drop_paths(config, sum(depths))
        self.width, self.channels = sizes[-1], [sizes[0], *sizes]
        self.embeddings = ConvNextEmbeddings(config, sizes[0])
        stages: dict[str, Module] = {}
        for index, (size, depth) in enumerate(zip(sizes, depths, strict=True)):
            own = rates[sum(depths[:index]) :][:depth]
            make = partial(self.layer_class, config, size)
            layers = LayerList(f"stages.{index}.layers", own, make)
            before = sizes[max(0, index - 1)]
            stages[f"stages.{index}"] = ConvNextStage(index, before, size, layers)
        self.encoder = Stages(**stages)
        self.add_norms()
        channels = config.integer("num_channels")
        self.picture = self.described(*pair(config, "image_size"), channels=channels)

    def add_norms(self) -> None:
        """One of the picture's mean."""
        self.layernorm = LayerNorm(self.width)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        embedding_output = self.embeddings(pixel_values)
        last_hidden_state = self.encoder(embedding_output)
        with self.pooling(last_hidden_state):
            pooled_output = self.layernorm(mean_of_picture(last_hidden_state).view(-1, self.width))
        return last_hidden_state, pooled_output


class ConvNextV2Model(ConvNextModel):
    prefix = "convnextv2"
    layer_class = ConvNextV2Layer


class ConvNextBackbone(Backbone, ConvNextModel):
    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        for each in self.picked:
            setattr(self, f"hidden_states_norms.{each}", ChannelsFirstNorm(self.channels[each]))

    def add_norms(self) -> None:
        """Each stage that is read has its own, once it is known which these are."""

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        embedding_output = self.embeddings(pixel_values)
        hidden_states: list[Handle] = []
        hidden_states.append(self.encoder(embedding_output, hidden_states))
        begin(self, "norms", ModelPart.NORM, hidden_states[-1])
        feature_maps = []
        for stage in self.picked:
            hidden_state = hidden_states[stage]
            hidden_state = self.children[f"hidden_states_norms.{stage}"](hidden_state)
            feature_maps.append(hidden_state)
        return tuple(feature_maps)


class ConvNextV2Backbone(ConvNextBackbone):
    layer_class = ConvNextV2Layer
