"""RegNet, ResNet and BiT: residual stages of convolutions.

(transformers 5.23, modeling_*.py of models/regnet, models/resnet and models/bit)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.pictures.backbones import Backbone
from memplan.classes.pictures.base import (
    IMAGES,
    PICTURE,
    PictureModel,
    PictureTask,
    PooledClassification,
    begin,
)
from memplan.classes.pictures.parts import InOrder, Stages, drop_paths
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import at_least_one, each_stage, ratio
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import ActivationModule, Linear
from memplan.graph.modules.functional import add_in_place, padded
from memplan.graph.modules.grids import (
    BatchNorm,
    Conv2d,
    DropPath,
    GroupNorm,
    max_pool2d,
    mean_of_picture,
)
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.operations.convolutions import convolve
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart

STRIDE_OF_STEM = 4
"""How much smaller a picture is behind BiT's stem (``BitEncoder``)."""


class StagedEncoder(Stages):
    """Stages of layers, whose first one changes the width."""

    def add_stage(self, index: int, depth: int, make: Callable[[int], Module]) -> None:
        """Declare a stage; ``make`` is given the layer's number, that of the second for those behind it."""
        kinds = [min(number, 1) for number in range(depth)]
        setattr(self, f"stages.{index}", Stage(f"stages.{index}.layers", kinds, make))


class Stage(Module):
    def __init__(self, segment: str, kinds: list[int], make: Callable[[int], Module]) -> None:
        self.layers = LayerList(segment, kinds, make)

    def forward(self, hidden_state: Handle) -> Handle:
        for layer in self.layers:
            hidden_state = layer(hidden_state)
        return hidden_state


class StagedClassification(PooledClassification):
    def add_head(self, config: ConfigReader) -> None:
        """A sequence of what makes a vector of the mean, and the classifier."""
        del config
        if self.spec.num_labels:
            classifier = Linear(self.model.width, self.spec.num_labels, bias=True)
            setattr(self, "classifier", InOrder(_1=classifier))  # noqa: B010

    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """The mean of the picture, flattened."""
        pooled = super().vector(last_hidden_state, *others)
        return pooled.view(*pooled.shape[:2])


class StagedModel(PictureModel):
    """A stem, stages, and the mean of the picture."""

    endings: ClassVar[dict[str, type[PictureTask]]] = {IMAGES: StagedClassification}
    embedder: Module
    encoder: StagedEncoder
    norm: Module

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        embedding_output = self.embedder(pixel_values)
        last_hidden_state = self.encoder(embedding_output)
        if "norm" in self.children:
            begin(self, "norm", ModelPart.NORM, last_hidden_state)
            last_hidden_state = self.norm(last_hidden_state)
        with self.pooling(last_hidden_state):
            pooled_output = mean_of_picture(last_hidden_state)
        return last_hidden_state, pooled_output


def conv_layer(
    before: int,
    after: int,
    kernel: int,
    active: Activation | None = None,
    stride: int = 1,
    groups: int = 1,
) -> InOrder:
    """``RegNetConvLayer``."""
    convolution = Conv2d(
        before, after, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False
    )
    made = InOrder(convolution=convolution, normalization=BatchNorm(after))
    if active is not None:
        made.activation = ActivationModule(active)
    return made


class RegNetSELayer(Module):
    """Squeeze and excitation."""

    def __init__(self, size: int, squeezed: int) -> None:
        self.attention = InOrder(
            _0=Conv2d(size, squeezed, 1), _1=ActivationModule(Activation.RELU),
            _2=Conv2d(squeezed, size, 1),
        )  # fmt: skip

    def forward(self, hidden_state: Handle) -> Handle:
        pooled = mean_of_picture(hidden_state)
        attention = self.attention(pooled).unary(OperationKind.SIGMOID)
        hidden_state = hidden_state * attention
        return hidden_state


class ResidualLayer(Module):
    """Parts in order, past a shortcut where the width or the stride changes; the sum is made in place."""

    def __init__(
        self, active: Activation, before: int, after: int, stride: int, parts: list[Module]
    ) -> None:
        if before != after or stride != 1:
            self.shortcut = conv_layer(before, after, 1, stride=stride)
        self.layer = InOrder(**{f"_{number}": each for number, each in enumerate(parts)})
        self.activation = ActivationModule(active)

    def forward(self, hidden_state: Handle) -> Handle:
        residual = hidden_state
        hidden_state = self.layer(hidden_state)
        if "shortcut" in self.children:
            residual = self.shortcut(residual)
        hidden_state = add_in_place(hidden_state, residual)
        hidden_state = self.activation(hidden_state)
        return hidden_state


class RegNetModel(StagedModel):
    """Its layers' convolutions are grouped."""

    prefix = "regnet"

    def __init__(self, config: ConfigReader) -> None:
        sizes = at_least_one(config, "hidden_sizes")
        depths = each_stage(config, "depths", len(sizes))
        channels, before = config.integer("num_channels"), config.integer("embedding_size")
        active = tower_activation(config, "hidden_act", default="relu")
        self.width, self.channels = sizes[-1], [before, *sizes]
        self.embedder = self.stem(channels, before, active)
        self.encoder = StagedEncoder()
        for index, (after, depth) in enumerate(zip(sizes, depths, strict=True)):
            stride = 2 if index or config.flag("downsample_in_first_stage") else 1
            steps = (before, after, stride), (after, after, 1)

            def layer(number: int, steps: tuple[tuple[int, int, int], ...] = steps) -> Module:
                parts = self.parts(config, active, *steps[number])
                return ResidualLayer(active, *steps[number], parts)

            self.encoder.add_stage(index, depth, layer)
            before = after
        self.picture = self.described(PICTURE, channels=channels)

    def stem(self, channels: int, size: int, active: Activation) -> InOrder:
        """What halves the picture first."""
        return InOrder(embedder=conv_layer(channels, size, 3, active, 2))

    def parts(
        self, config: ConfigReader, active: Activation, before: int, after: int, stride: int
    ) -> list[Module]:
        """``RegNetXLayer``, or with squeeze and excitation ``RegNetYLayer``."""
        groups = max(1, after // config.integer("groups_width"))
        config.divide("hidden_sizes", after, "groups_width", groups)
        parts: list[Module] = [
            conv_layer(before, after, 1, active),
            conv_layer(after, after, 3, active, stride, groups),
        ]
        if config.choice("layer_type", config.text("layer_type"), ("x", "y")) == "y":
            parts.append(RegNetSELayer(after, round(before / 4)))
        return [*parts, conv_layer(after, after, 1)]


class MaxPool2d(Module):
    """``torch.nn.MaxPool2d(kernel_size=3, stride=2, padding=1)``."""

    def forward(self, x: Handle) -> Handle:
        return max_pool2d(x, 3, 2, padding=1)


class ResNetModel(RegNetModel):
    """Its layers' own nonlinearities are ReLU, whatever that behind the sum is."""

    prefix = "resnet"

    def stem(self, channels: int, size: int, active: Activation) -> InOrder:
        """A wide convolution, and the greatest of each window."""
        return InOrder(embedder=conv_layer(channels, size, 7, active, 2), pooler=MaxPool2d())

    def parts(
        self, config: ConfigReader, active: Activation, before: int, after: int, stride: int
    ) -> list[Module]:
        """``ResNetBasicLayer``, or ``ResNetBottleNeckLayer``, four times as narrow inside."""
        del active
        relu, narrow = Activation.RELU, after // 4
        if config.text("layer_type", default="bottleneck") != "bottleneck":
            return [conv_layer(before, after, 3, relu, stride), conv_layer(after, after, 3)]
        early = config.flag("downsample_in_bottleneck")
        return [
            conv_layer(before, narrow, 1, relu, stride if early else 1),
            conv_layer(narrow, narrow, 3, relu, 1 if early else stride),
            conv_layer(narrow, after, 1),
        ]


class ResNetBackbone(Backbone, ResNetModel):
    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        embedding_output = self.embedder(pixel_values)
        hidden_states: list[Handle] = []
        hidden_states.append(self.encoder(embedding_output, hidden_states))
        return self.feature_maps(dict(enumerate(hidden_states)))


class WeightStandardizedConv2d(Conv2d):
    """Its weight is normed at each step."""

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1) -> None:
        padding = (stride - 1 + kernel - 1) // 2
        super().__init__(before, after, kernel, stride=stride, padding=padding, bias=False)

    def forward(self, hidden_state: Handle) -> Handle:
        run, weight = self.run, self.parameter(self.weight)
        batch, _, *sides = hidden_state.shape
        out_channels, _, *kernel = self.weight.shape
        shape = batch, out_channels, *self.fewer(*sides, *kernel)
        normed = run.tensor(weight.numel, weight.dtype)
        statistics = [run.tensor(out_channels, DType.FP32) for _ in range(2)]
        run.record(
            OperationKind.BATCH_NORM, (weight,), (normed, *statistics),
            saves=(weight, *statistics), gradients=(Gradient.FRESH,),
        )  # fmt: skip
        made = convolve(
            run, hidden_state.record, normed, None, batch * shape[2] * shape[3], out_channels
        )
        return Handle(run, made, shape)


class BitEmbeddings(Module):
    def __init__(self, config: ConfigReader, size: int, norm: Module | None) -> None:
        self.convolution = WeightStandardizedConv2d(config.integer("num_channels"), size, 7, 2)
        self.pads = config.flag("embedding_dynamic_padding")
        if norm is not None:
            self.norm = norm

    def forward(self, pixel_values: Handle) -> Handle:
        embedding = self.convolution(pixel_values)
        embedding = wider(embedding, 2)
        if "norm" in self.children:
            embedding = self.norm(embedding)
        if self.pads:
            embedding = wider(embedding, 1)
        embedding = max_pool2d(embedding, 3, 2)
        return embedding


def wider(x: Handle, rows: int) -> Handle:
    """So many rows and columns more."""
    batch, channels, height, width = x.shape
    return padded(x, (batch, channels, height + rows, width + rows))


def norm_of(config: ConfigReader, size: int, *, active: bool = True) -> Module:
    """``BitGroupNormActivation``."""
    norm = GroupNormActivation(config.integer("num_groups"), size)
    if active:
        kind = tower_activation(config, "hidden_act", default="relu")
        norm.activation = ActivationModule(kind)
    return norm


class GroupNormActivation(GroupNorm):
    """With a nonlinearity behind it, where it has one."""

    activation: Module

    def forward(self, hidden_state: Handle) -> Handle:
        hidden_state = super().forward(hidden_state)
        if "activation" in self.children:
            hidden_state = self.activation(hidden_state)
        return hidden_state


class BitDownsampleConv(Module):
    def __init__(self, before: int, after: int, stride: int, norm: Module | None) -> None:
        self.conv = WeightStandardizedConv2d(before, after, 1, stride)
        if norm is not None:
            self.norm = norm

    def forward(self, x: Handle) -> Handle:
        x = self.conv(x)
        return self.norm(x) if "norm" in self.children else x


class BitLayer(Module):
    """``BitBottleneckLayer``, or, ``preactivated``, the one whose norms stand before its convolutions."""

    norm1: Module
    norm2: Module
    norm3: Module
    conv1: Module
    conv2: Module
    conv3: Module

    def __init__(
        self,
        config: ConfigReader,
        sizes: tuple[int, int],
        stride: int,
        rate: float,
        *,
        preactivated: bool,
        is_first: bool,
    ) -> None:
        before, after = sizes
        narrow = to_eights(after / 4)
        self.preactivated = preactivated
        if is_first:
            norm = None if preactivated else norm_of(config, after, active=False)
            self.downsample = BitDownsampleConv(before, after, stride, norm)
        widths = (before, narrow, narrow) if preactivated else (narrow, narrow, after)
        shapes = (before, narrow, 1, 1), (narrow, narrow, 3, stride), (narrow, after, 1, 1)
        for number in range(3):
            active = preactivated or number < 2
            norm = norm_of(config, widths[number], active=active)
            convolution = WeightStandardizedConv2d(*shapes[number])
            pair = {f"norm{number + 1}": norm, f"conv{number + 1}": convolution}
            for name in pair if preactivated else reversed(pair):
                setattr(self, name, pair[name])
        self.drop_path = DropPath(rate)
        if not preactivated:
            kind = tower_activation(config, "hidden_act", default="relu")
            self.activation = ActivationModule(kind)

    def forward(self, hidden_states: Handle) -> Handle:
        return (self.before_norms if self.preactivated else self.behind_norms)(hidden_states)

    def before_norms(self, hidden_states: Handle) -> Handle:
        """``BitPreActivationBottleneckLayer``."""
        hidden_states_preact = self.norm1(hidden_states)
        shortcut = hidden_states
        if "downsample" in self.children:
            shortcut = self.downsample(hidden_states_preact)
        hidden_states = self.conv1(hidden_states_preact)
        hidden_states = self.conv2(self.norm2(hidden_states))
        hidden_states = self.conv3(self.norm3(hidden_states))
        hidden_states = self.drop_path(hidden_states)
        return hidden_states + shortcut

    def behind_norms(self, hidden_states: Handle) -> Handle:
        """``BitBottleneckLayer``."""
        shortcut = hidden_states
        if "downsample" in self.children:
            shortcut = self.downsample(hidden_states)
        for number in range(1, 4):
            hidden_states = self.children[f"conv{number}"](hidden_states)
            hidden_states = self.children[f"norm{number}"](hidden_states)
        hidden_states = self.drop_path(hidden_states)
        hidden_states = self.activation(hidden_states + shortcut)
        return hidden_states


def to_eights(value: float) -> int:
    """The nearest multiple of eight, not more than a tenth below (``make_div``)."""
    rounded = max(8, int(value + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * value else rounded


class BitModel(StagedModel):
    prefix = "bit"

    def __init__(self, config: ConfigReader) -> None:
        sizes = at_least_one(config, "hidden_sizes")
        depths = each_stage(config, "depths", len(sizes))
        preactivated = config.text("layer_type") == "preactivation"
        before, factor = config.integer("embedding_size"), ratio(config, "width_factor", default=1)
        self.width = sizes[-1]
        norm = None if preactivated else norm_of(config, before)
        self.embedder = BitEmbeddings(config, before, norm)
        self.encoder = StagedEncoder()
        rates = drop_paths(config, sum(depths))
        for index, (size, depth) in enumerate(zip(sizes, depths, strict=True)):
            after, first = to_eights(size * factor), sum(depths[:index])
            rate = rates[first], rates[min(first + 1, len(rates) - 1)]
            sides = ((before, after), 2 if index else 1), ((after, after), 1)

            def layer(
                number: int,
                rate: tuple[float, float] = rate,
                sides: tuple[tuple[tuple[int, int], int], ...] = sides,
            ) -> BitLayer:
                return BitLayer(
                    config, *sides[number], rate[number], preactivated=preactivated,
                    is_first=not number,
                )  # fmt: skip

            self.encoder.add_stage(index, depth, layer)
            before = after
        if preactivated:
            self.norm = norm_of(config, sizes[-1])
        dilated = config.integer("output_stride", default=32) < STRIDE_OF_STEM * 2 ** (
            len(sizes) - 1
        )
        self.is_unusual = config.raw("global_padding") is not None or dilated
        self.picture = self.described(PICTURE, channels=config.integer("num_channels"))

    def left_out(self, ending: str) -> bool:
        """Convolutions that pad otherwise, or are dilated, are not written down."""
        del ending
        return self.is_unusual
