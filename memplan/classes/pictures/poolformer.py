"""PoolFormer: pooling for attention; only the classifier has a last norm.

(transformers 5.23, models/poolformer/modeling_poolformer.py)
"""

from functools import partial
from typing import ClassVar

from memplan.classes.pictures.base import (
    IMAGES,
    PICTURE,
    ImageClassification,
    PictureModel,
    PictureTask,
    begin,
)
from memplan.classes.pictures.parts import InOrder, drop_paths, stage_layers
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import each_stage, ratio
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import ActivationModule
from memplan.graph.modules.grids import Conv2d, DropPath, GroupNorm, mean_of_picture
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, ModelPart


class PoolFormerPooling(Module):
    """The mean of a window, which keeps what it was given, less that."""

    block = LayerBlock.MIXER

    def forward(self, hidden_states: Handle) -> Handle:
        made = empty(self.run, hidden_states.shape, hidden_states.dtype)
        given = hidden_states.record
        self.run.record(
            OperationKind.MEAN, (given,), (made.record,), saves=(given,),
            gradients=(Gradient.FRESH,),
        )  # fmt: skip
        return made - hidden_states


class PoolFormerLayer(Module):
    def __init__(self, config: ConfigReader, size: int, rate: float) -> None:
        inner = int(size * ratio(config, "mlp_ratio"))
        self.pooling = PoolFormerPooling()
        self.output = InOrder(
            conv1=Conv2d(size, inner, 1),
            act_fn=ActivationModule(tower_activation(config, "hidden_act")),
            drop=DropPath(rate),
            conv2=Conv2d(inner, size, 1),
            drop_again=DropPath(rate),
        )
        self.output.block = LayerBlock.NETWORK
        self.before_norm, self.after_norm = GroupNorm(1, size), GroupNorm(1, size)
        self.drop_path = DropPath(rate)
        if config.flag("use_layer_scale"):
            self.layer_scale_1, self.layer_scale_2 = Weight(size), Weight(size)

    def forward(self, hidden_states: Handle) -> Handle:
        pooling_output = self.pooling(self.before_norm(hidden_states))
        if "layer_scale_1" not in self.weights:
            pooling_output = self.drop_path(pooling_output)
            hidden_states = pooling_output + hidden_states
            layer_output = self.drop_path(self.output(self.after_norm(hidden_states)))
            return hidden_states + layer_output
        scaled_op = self.scaled(self.layer_scale_1, pooling_output)
        hidden_states = hidden_states + self.drop_path(scaled_op)
        layer_output = self.output(self.after_norm(hidden_states))
        scaled_op = self.scaled(self.layer_scale_2, layer_output)
        return hidden_states + self.drop_path(scaled_op)

    def scaled(self, weight: Weight, x: Handle) -> Handle:
        """A number for each channel times what it is."""
        return self.operand(weight).unsqueeze(-1).unsqueeze(-1) * x


class PoolFormerEncoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        count = config.layers("num_encoder_blocks")
        self.sizes = each_stage(config, "hidden_sizes", count)
        kernels, strides, depths = (
            each_stage(config, key, count) for key in ("patch_sizes", "strides", "depths")
        )
        padding = each_stage(config, "padding", count, minimum=0)
        before, rates = config.integer("num_channels"), drop_paths(config, sum(depths))
        for index, size in enumerate(self.sizes):
            projection = Conv2d(
                before, size, kernels[index], stride=strides[index], padding=padding[index]
            )
            setattr(self, f"patch_embeddings.{index}", InOrder(projection=projection))
            before = size
        for index, size in enumerate(self.sizes):
            own = rates[sum(depths[:index]) :][: depths[index]]
            make = partial(PoolFormerLayer, config, size)
            layers = stage_layers(f"stages.{index}.layers", own, make, behind=index > 0)
            setattr(self, f"block.{index}", layers)

    def forward(self, pixel_values: Handle) -> Handle:
        hidden_states = pixel_values
        for index in range(len(self.sizes)):
            if index:
                begin(self, f"stages.{index}.embed", ModelPart.EMBEDDING, hidden_states)
                self.run.outlive(hidden_states.record.storage)  # named until another layer returns
            hidden_states = self.children[f"patch_embeddings.{index}"](hidden_states)
            layers = self.children[f"block.{index}"]
            assert isinstance(layers, LayerList)
            for blk in layers:
                layer_outputs = blk(hidden_states)
                hidden_states = layer_outputs
        return hidden_states


class PoolFormerForImageClassification(ImageClassification):
    def add_head(self, config: ConfigReader) -> None:
        """A norm before the classifier."""
        self.norm = GroupNorm(1, self.model.width)
        super().add_head(config)

    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """The mean of the normed picture."""
        del others
        found = mean_of_picture(self.norm(last_hidden_state))
        return found.view(*found.shape[:2])


class PoolFormerModel(PictureModel):
    prefix = "poolformer"
    endings: ClassVar[dict[str, type[PictureTask]]] = {IMAGES: PoolFormerForImageClassification}

    def __init__(self, config: ConfigReader) -> None:
        self.encoder = PoolFormerEncoder(config)
        self.width = self.encoder.sizes[-1]
        self.picture = self.described(PICTURE, channels=config.integer("num_channels"))

    def forward(self, pixel_values: Handle) -> tuple[Handle]:
        return (self.encoder(pixel_values),)
