"""MobileViT: inverted residuals, and small transformers between convolutions.

(transformers 5.23, models/mobilevit/modeling_mobilevit.py)
"""

from itertools import pairwise
from typing import ClassVar

from memplan.classes.pictures.base import IMAGES, PictureModel, PictureTask, PooledClassification
from memplan.classes.pictures.parts import InOrder, Projected, mixed_by_scores
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import each_stage, ratio
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.losses.tasks import hand_out
from memplan.graph.modules.attention import in_heads
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.grids import BatchNorm, Conv2d, interpolate, mean_of_picture
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import OneLayer
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.operations.elementwise import dropout_probability
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart

TRANSFORMER_DEPTHS = (2, 4, 3)
"""Layers of the three transformers (``MobileViTEncoder``)."""
PLAIN_LAYERS = (1, 3)
"""Inverted residuals of the two stages before them."""
NECKS = 7


def conv_layer(
    before: int,
    after: int,
    kernel: int,
    active: Activation | None,
    *,
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
) -> InOrder:
    """``MobileViTConvLayer``."""
    convolution = Conv2d(
        before, after, kernel, stride=stride, padding=(kernel - 1) // 2 * dilation, groups=groups,
        dilation=dilation, bias=False,
    )  # fmt: skip
    made = InOrder(convolution=convolution, normalization=BatchNorm(after))
    if active is not None:
        made.activation = ActivationModule(active)
    return made


class MobileViTInvertedResidual(Module):
    """The expanded width is a multiple of eight."""

    def __init__(
        self, config: ConfigReader, before: int, after: int, stride: int, dilation: int = 1
    ) -> None:
        active = activation_of(config)
        wanted = round(before * ratio(config, "expand_ratio"))
        inner = max(8, (wanted + 4) // 8 * 8)
        inner += 8 if inner < 0.9 * wanted else 0
        self.use_residual = stride == 1 and before == after
        self.expand_1x1 = conv_layer(before, inner, 1, active)
        self.conv_3x3 = conv_layer(
            inner, inner, 3, active, stride=stride, groups=inner, dilation=dilation
        )
        self.reduce_1x1 = conv_layer(inner, after, 1, None)

    def forward(self, features: Handle) -> Handle:
        residual = features
        features = self.expand_1x1(features)
        features = self.conv_3x3(features)
        features = self.reduce_1x1(features)
        return residual + features if self.use_residual else features


def activation_of(config: ConfigReader) -> Activation:
    """That of all convolutions but the head's."""
    return tower_activation(config, "hidden_act", default="silu")


class MobileViTSelfAttention(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        heads, bias = config.integer("num_attention_heads"), config.flag("qkv_bias")
        config.divide("hidden_sizes", size, "num_attention_heads", heads)
        self.head_dim = size // heads
        self.query = Linear(size, size, bias=bias)
        self.key = Linear(size, size, bias=bias)
        self.value = Linear(size, size, bias=bias)
        self.dropout = Dropout(config.number("attention_probs_dropout_prob", default=0.0))

    def forward(self, hidden_states: Handle) -> Handle:
        query_layer = in_heads(self.query(hidden_states), self.head_dim)
        key_layer = in_heads(self.key(hidden_states), self.head_dim)
        value_layer = in_heads(self.value(hidden_states), self.head_dim)
        return mixed_by_scores(query_layer, key_layer, value_layer, self.dropout)


class MobileViTTransformerLayer(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        inner = int(size * ratio(config, "mlp_ratio"))
        drop = config.number("hidden_dropout_prob", default=0.1)
        self.attention = Projected("attention", MobileViTSelfAttention(config, size), size, drop)
        self.intermediate = InOrder(
            dense=Linear(size, inner, bias=True),
            intermediate_act_fn=ActivationModule(activation_of(config)),
        )
        self.output = InOrder(dense=Linear(inner, size, bias=True), dropout=Dropout(drop))
        self.layernorm_before = LayerNorm(size)
        self.layernorm_after = LayerNorm(size)

    def forward(self, hidden_states: Handle) -> Handle:
        attention_output = self.attention(self.layernorm_before(hidden_states))
        hidden_states = attention_output + hidden_states
        layer_output = self.layernorm_after(hidden_states)
        layer_output = self.intermediate(layer_output)
        layer_output = self.output(layer_output) + hidden_states
        return layer_output


class MobileViTLayer(Module):
    """Checkpointing takes it as a whole."""

    def __init__(
        self, config: ConfigReader, before: int, after: int, size: int, depth: int, dilation: int
    ) -> None:
        kernel, active = config.integer("conv_kernel_size"), activation_of(config)
        self.side = config.integer("patch_size")
        self.downsampling_layer = MobileViTInvertedResidual(
            config, before, after, 1 if dilation > 1 else 2, max(1, dilation // 2)
        )
        self.conv_kxk = conv_layer(after, after, kernel, active)
        self.conv_1x1 = InOrder(convolution=Conv2d(after, size, 1, bias=False))
        layers = {f"_{each}": MobileViTTransformerLayer(config, size) for each in range(depth)}
        self.transformer = InOrder(layer=InOrder(**layers))
        self.layernorm = LayerNorm(size)
        self.conv_projection = conv_layer(size, after, 1, active)
        self.fusion = conv_layer(2 * after, after, kernel, active)

    def unfolding(self, features: Handle) -> Handle:
        """Positions at the same place in squares of a side become sequences of their own."""
        batch, channels, *sides = features.shape
        side, (height, width) = self.side, (-(-each // self.side) for each in sides)
        if [height * side, width * side] != sides:
            features = interpolate(features, height * side, width * side)
        patches = features.reshape(batch * channels * height, side, width, side)
        patches = patches.transpose(1, 2)
        patches = patches.reshape(batch, channels, height * width, side * side)
        patches = patches.transpose(1, 3)
        patches = patches.reshape(batch * side * side, height * width, channels)
        return patches

    def folding(self, patches: Handle, batch: int, sides: list[int]) -> Handle:
        """Those sequences become a picture again."""
        side, (height, width) = self.side, (-(-each // self.side) for each in sides)
        channels = patches.shape[-1]
        features = patches.contiguous().view(batch, side * side, height * width, channels)
        features = features.transpose(1, 3)
        features = features.reshape(batch * channels * height, width, side, side)
        features = features.transpose(1, 2)
        features = features.reshape(batch, channels, height * side, width * side)
        if [height * side, width * side] != sides:
            features = interpolate(features, *sides)
        return features

    def forward(self, features: Handle) -> Handle:
        features = self.downsampling_layer(features)
        residual = features
        batch, _, *sides = features.shape
        features = self.conv_kxk(features)
        features = self.conv_1x1(features)
        patches = self.unfolding(features)
        patches = self.transformer(patches)
        patches = self.layernorm(patches)
        features = self.folding(patches, batch, sides)
        features = self.conv_projection(features)
        features = self.fusion(concatenate(residual, features, dim=1))
        return features


class MobileViTEncoder(Module):
    """An output stride of 16 keeps the positions of the last stage, one of 8 those of the last two."""

    def __init__(self, config: ConfigReader, neck: list[int]) -> None:
        for index, (count, (before, after)) in enumerate(
            zip(PLAIN_LAYERS, pairwise(neck), strict=False)
        ):
            widths = [before, *(after,) * count]
            blocks = {
                f"_{number}": MobileViTInvertedResidual(
                    config, *pair, 2 if index and not number else 1
                )
                for number, pair in enumerate(pairwise(widths))
            }
            stage = InOrder(layer=InOrder(**blocks))
            stage.segment = f"stages.{index}", ModelPart.OTHER
            setattr(self, f"layer.{index}", stage)
        sizes = each_stage(config, "hidden_sizes", len(TRANSFORMER_DEPTHS))
        kept, dilation = {8: 2, 16: 1}.get(config.integer("output_stride", default=32), 0), 1
        first = len(PLAIN_LAYERS)
        for index, (size, depth) in enumerate(zip(sizes, TRANSFORMER_DEPTHS, strict=True), first):
            dilation *= 2 if index > first and kept >= len(sizes) - index + first else 1
            layer = MobileViTLayer(config, neck[index], neck[index + 1], size, depth, dilation)
            setattr(self, f"layer.{index}", OneLayer(f"stages.{index}.layers", layer))

    def forward(
        self, hidden_states: Handle, output_hidden_states: bool
    ) -> tuple[Handle, list[Handle]]:
        all_hidden_states: list[Handle] = []
        for layer_module in self.children.values():
            hidden_states = layer_module(hidden_states)
            if output_hidden_states:
                all_hidden_states.append(hidden_states)
        return hidden_states, all_hidden_states


class MobileViTForImageClassification(PooledClassification):
    def add_head(self, config: ConfigReader) -> None:
        """Dropout before the classifier."""
        self.dropout = Dropout(config.number("classifier_dropout_prob", default=0.1))
        super().add_head(config)

    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """The mean of the picture."""
        found: Handle = self.dropout(super().vector(last_hidden_state, *others))
        return found


class MobileViTASPPPooling(Module):
    def __init__(self, size: int, width: int) -> None:
        self.conv_1x1 = conv_layer(size, width, 1, Activation.RELU)

    def forward(self, features: Handle) -> Handle:
        sides = features.shape[2:]
        features = mean_of_picture(features)
        features = self.conv_1x1(features)
        features = interpolate(features, *sides)
        return features


class MobileViTASPP(Module):
    """Five views of the picture, one for each rate, one plain, one pooled."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        width, rates = (
            config.integer("aspp_out_channels"),
            config.integers("atrous_rates", minimum=1),
        )
        if len(rates) != 3:
            error = config.fail("atrous_rates", f"expected 3 numbers, got {len(rates)}")
            raise error
        relu = Activation.RELU
        views = [conv_layer(size, width, 1, relu)]
        views += [conv_layer(size, width, 3, relu, dilation=rate) for rate in rates]
        for number, each in enumerate((*views, MobileViTASPPPooling(size, width))):
            setattr(self, f"convs.{number}", each)
        self.project = conv_layer(5 * width, width, 1, relu)
        self.dropout = Dropout(config.number("aspp_dropout_prob", default=0.1))

    def forward(self, features: Handle) -> Handle:
        pyramid = [self.children[f"convs.{number}"](features) for number in range(5)]
        joined = concatenate(*pyramid, dim=1)
        del pyramid
        pooled_features = self.project(joined)
        pooled_features = self.dropout(pooled_features)
        return pooled_features


class Dropout2d(Dropout):
    """``torch.nn.Dropout2d``: nothing happens at probability 0."""

    def forward(self, x: Handle) -> Handle:
        if dropout_probability(self.run, self.probability) == 0.0:
            return x
        shape = *x.shape[:2], 1, 1
        return x * made_by(self.run, OperationKind.UNIFORM_IN_PLACE, shape, x.dtype)


class MobileViTForSemanticSegmentation(PictureTask):
    """The bare model's last convolution is left out; its loss is that of every pixel."""

    def add_head(self, config: ConfigReader) -> None:
        """``MobileViTDeepLabV3``."""
        assert isinstance(self.model, MobileViTModel)
        size, width = self.model.neck[-2], config.integer("aspp_out_channels")
        self.model.expand_output = False
        del self.model.children["conv_1x1_exp"]
        classifier = InOrder(convolution=Conv2d(width, self.spec.num_labels, 1))
        drop = Dropout2d(config.number("classifier_dropout_prob", default=0.1))
        self.segmentation_head = InOrder(
            aspp=MobileViTASPP(config, size), dropout=drop, classifier=classifier
        )

    def loss_of(self, *hidden_states: Handle) -> Tensor:
        """Scores are made as large as the picture."""
        run, (batch, _, height, width) = self.run, self.model.pixels_shape()
        logits = self.segmentation_head(hidden_states[-1])
        upsampled_logits = interpolate(logits, height, width)
        labels = from_batch(run, batch * height * width, DType.INT64)
        loss = cross_entropy(run, upsampled_logits.record, labels)
        hand_out(run, logits.record)
        return loss


class MobileViTModel(PictureModel):
    prefix = "mobilevit"
    recomputes = True
    expand_output = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        IMAGES: MobileViTForImageClassification,
        "ForSemanticSegmentation": MobileViTForSemanticSegmentation,
    }

    def __init__(self, config: ConfigReader) -> None:
        self.neck = each_stage(config, "neck_hidden_sizes", NECKS)
        self.width = self.neck[-1]
        channels, active = config.integer("num_channels"), activation_of(config)
        self.conv_stem = conv_layer(channels, self.neck[0], 3, active, stride=2)
        self.encoder = MobileViTEncoder(config, self.neck)
        self.conv_1x1_exp = conv_layer(self.neck[-2], self.width, 1, active)
        self.conv_1x1_exp.segment = "norm", ModelPart.NORM
        self.picture = self.described(config.integer("image_size"), channels=channels)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        embedding_output = self.conv_stem(pixel_values)
        encoder_outputs = self.encoder(embedding_output, not self.expand_output)
        if not self.expand_output:
            return tuple(encoder_outputs[1])
        last_hidden_state = self.conv_1x1_exp(encoder_outputs[0])
        with self.pooling(last_hidden_state):
            batch, size, *_ = last_hidden_state.shape
            pooled_output = mean_of_picture(last_hidden_state).view(batch, size)
        return last_hidden_state, pooled_output
