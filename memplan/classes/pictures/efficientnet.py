"""EfficientNet: inverted residuals with squeeze and excitation, each stage wider and deeper by a coefficient.

(transformers 5.23, models/efficientnet/modeling_efficientnet.py; ALIGN's tower in models/align/modeling_align.py)
"""

from itertools import count
from math import ceil
from typing import ClassVar

from memplan.classes.pictures.base import IMAGES, PictureModel, PictureTask, PooledClassification
from memplan.classes.pictures.parts import InOrder
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import at_least_one, each_stage, pair, ratio
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import ActivationModule, Dropout
from memplan.graph.modules.functional import padded
from memplan.graph.modules.grids import (
    BatchNorm,
    Conv2d,
    greatest_of_picture,
    mean_of_picture,
    mean_of_windows,
)
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart

STEM_CHANNELS, TOP_CHANNELS = 32, 1280
"""Of the first and the last convolution, before they are widened."""


def round_filters(config: ConfigReader, num_channels: int) -> int:
    """Channels times the width coefficient, to a multiple of the divisor."""
    divisor = config.integer("depth_divisor")
    wanted = num_channels * ratio(config, "width_coefficient")
    rounded = max(divisor, int(wanted + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * wanted else rounded


class ZeroPad2d(Module):
    """So many rows and columns more."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def forward(self, x: Handle) -> Handle:
        batch, channels, height, width = x.shape
        return padded(x, (batch, channels, height + self.rows, width + self.rows))


@dataclass(frozen=True, slots=True)
class Kind:
    """What sets a block apart from others."""

    before: int
    after: int
    stride: int
    kernel: int
    expand_ratio: int
    drop_rate: float
    goes_past: bool
    """It is added to what it was given."""
    adjusts: bool
    """Zeros stand behind the picture alone."""


def block_kinds(config: ConfigReader) -> list[Kind]:
    """All blocks', stage by stage."""
    before = [round_filters(config, each) for each in at_least_one(config, "in_channels")]
    keys = "out_channels", "strides", "kernel_sizes", "expand_ratios", "num_block_repeats"
    stages = zip(*(each_stage(config, key, len(before)) for key in keys), strict=True)
    deeper, unpadded = ratio(config, "depth_coefficient"), config.integers("depthwise_padding")
    drops, numbers = config.number("drop_connect_rate", default=0.0), count()
    found = []
    for given, (after, stride, kernel, expand, repeats) in zip(before, stages, strict=True):
        wide = round_filters(config, after)
        for j in range(ceil(deeper * repeats)):
            number, step = next(numbers), 1 if j else stride
            goes_past = step == 1 and j > 0
            kind = Kind(
                wide if j else given, wide, step, kernel, expand, drops * number if goes_past else 0,
                goes_past, number not in unpadded or step == 1,
            )  # fmt: skip
            found.append(kind)
    return found


def normed(name: str, convolution: Conv2d, active: Activation) -> dict[str, Module]:
    """A convolution, a norm and a nonlinearity."""
    channels = convolution.weight.shape[0]
    return {
        f"{name}_conv": convolution, f"{name}_bn": BatchNorm(channels),
        f"{name}_act": ActivationModule(active),
    }  # fmt: skip


class SqueezeExcite(Module):
    def __init__(self, size: int, squeezed: int, active: Activation) -> None:
        self.reduce, self.expand = Conv2d(size, squeezed, 1), Conv2d(squeezed, size, 1)
        self.act_reduce = ActivationModule(active)

    def forward(self, hidden_states: Handle) -> Handle:
        inputs = hidden_states
        hidden_states = mean_of_picture(hidden_states)
        hidden_states = self.reduce(hidden_states)
        hidden_states = self.act_reduce(hidden_states)
        hidden_states = self.expand(hidden_states)
        hidden_states = hidden_states.unary(OperationKind.SIGMOID)
        hidden_states = inputs * hidden_states
        return hidden_states


class FinalBlockLayer(Module):
    def __init__(self, before: int, kind: Kind) -> None:
        self.project_conv = Conv2d(before, kind.after, 1, bias=False)
        self.project_bn = BatchNorm(kind.after)
        if kind.goes_past:
            self.dropout = Dropout(kind.drop_rate)

    def forward(self, embeddings: Handle, hidden_states: Handle) -> Handle:
        hidden_states = self.project_conv(hidden_states)
        hidden_states = self.project_bn(hidden_states)
        if "dropout" in self.children:
            hidden_states = self.dropout(hidden_states)
            hidden_states = hidden_states + embeddings
        return hidden_states


class EfficientNetBlock(Module):
    def __init__(self, config: ConfigReader, kind: Kind) -> None:
        active = tower_activation(config, "hidden_act", default="swish")
        inner, kernel = kind.before * kind.expand_ratio, kind.kernel
        if kind.expand_ratio != 1:
            widening = Conv2d(kind.before, inner, 1, bias=False)
            self.expansion = InOrder(**normed("expand", widening, active))
        self.depthwise_conv = InOrder()
        if kind.stride == 2:
            rows = 2 * (kernel // 2) - kind.adjusts
            self.depthwise_conv.depthwise_conv_pad = ZeroPad2d(rows)
        convolution = Conv2d(
            inner, inner, kernel, stride=kind.stride, padding=kernel // 2 if kind.stride == 1 else 0,
            groups=inner, bias=False,
        )  # fmt: skip
        for name, each in normed("depthwise", convolution, active).items():
            setattr(self.depthwise_conv, name.replace("_bn", "_norm"), each)
        squeezed = max(1, int(kind.before * ratio(config, "squeeze_expansion_ratio")))
        self.squeeze_excite = SqueezeExcite(inner, squeezed, active)
        self.projection = FinalBlockLayer(inner, kind)

    def forward(self, hidden_states: Handle) -> Handle:
        embeddings = hidden_states
        if "expansion" in self.children:
            hidden_states = self.expansion(hidden_states)
        hidden_states = self.depthwise_conv(hidden_states)
        hidden_states = self.squeeze_excite(hidden_states)
        hidden_states = self.projection(embeddings, hidden_states)
        return hidden_states


class EfficientNetEncoder(Module):
    def __init__(self, config: ConfigReader, segment: str, top: InOrder | None) -> None:
        kinds = block_kinds(config)
        self.width = kinds[-1].after
        self.blocks = LayerList(segment, kinds, lambda kind: EfficientNetBlock(config, kind))
        if top is not None:
            for name, each in top.children.items():
                setattr(self, name, each)
            self.children["top_conv"].segment = "top", ModelPart.OTHER

    def forward(self, hidden_states: Handle) -> Handle:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        for each in list(self.children.values())[1:]:
            hidden_states = each(hidden_states)
        return hidden_states


class EfficientNetForImageClassification(PooledClassification):
    def add_head(self, config: ConfigReader) -> None:
        """Dropout before the classifier."""
        self.dropout = Dropout(config.number("dropout_rate", default=0.5))
        super().add_head(config)

    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """The pooled picture."""
        found: Handle = self.dropout(super().vector(last_hidden_state, *others))
        return found


class EfficientNetModel(PictureModel):
    prefix = "efficientnet"
    endings: ClassVar[dict[str, type[PictureTask]]] = {IMAGES: EfficientNetForImageClassification}

    def __init__(self, config: ConfigReader) -> None:
        stem, channels = round_filters(config, STEM_CHANNELS), config.integer("num_channels")
        self.embeddings = InOrder(
            padding=ZeroPad2d(1), convolution=Conv2d(channels, stem, 3, stride=2, bias=False),
            batchnorm=BatchNorm(stem),
            activation=ActivationModule(tower_activation(config, "hidden_act", default="swish")),
        )  # fmt: skip
        self.add_encoder(config)
        self.pools_mean = self.pooling_type(config) == "mean"
        self.picture = self.described(*pair(config, "image_size"), channels=channels)

    def add_encoder(self, config: ConfigReader) -> None:
        """With a last convolution."""
        active = tower_activation(config, "hidden_act", default="swish")
        before, self.width = block_kinds(config)[-1].after, config.integer("hidden_dim")
        convolution = Conv2d(before, round_filters(config, TOP_CHANNELS), 1, bias=False)
        top = InOrder(
            top_conv=convolution, top_bn=BatchNorm(self.width),
            top_activation=ActivationModule(active),
        )  # fmt: skip
        self.encoder = EfficientNetEncoder(config, "encoder.blocks", top)

    def pooling_type(self, config: ConfigReader) -> str:
        """What a picture becomes."""
        kind = config.text("pooling_type", default="mean")
        return config.choice("pooling_type", kind, ("mean", "max"))

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        embedding_output = self.embeddings(pixel_values)
        last_hidden_state = self.encoder(embedding_output)
        with self.pooling(last_hidden_state):
            pool = mean_of_windows if self.pools_mean else greatest_of_picture
            pooled_output = pool(last_hidden_state)
            pooled_output = pooled_output.view(*pooled_output.shape[:2])
        return last_hidden_state, pooled_output
