"""UPerNet: a backbone's sizes of a picture joined to one, and classes of every pixel.

(transformers 5.23, models/upernet/modeling_upernet.py)
"""

from collections.abc import Iterable
from typing import ClassVar

from memplan.classes.pictures.backbones import backbone_of
from memplan.classes.pictures.base import PictureModel, PictureTask
from memplan.classes.pictures.parts import InOrder
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec, read_part
from memplan.families.towers.sizes import few
from memplan.graph.core.tensors import Tensor
from memplan.graph.losses.tasks import hand_out
from memplan.graph.modules.basic import ActivationModule
from memplan.graph.modules.grids import BatchNorm, Conv2d, adaptive_mean, interpolate
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation

BACKBONE = PartSpec(
    key="backbone_config",
    model_type="resnet",
    fills={"model_type": "resnet", "out_features": [f"stage{number}" for number in range(1, 5)]},
)
"""What ``UperNetConfig`` makes where the config has no backbone."""
BACKBONES = "convnext", "convnextv2", "resnet"
AUXILIARY_LEVEL = 2
"""Which size the second head reads."""


def conv_module(before: int, after: int, kernel: int) -> InOrder:
    """``UperNetConvModule``."""
    return InOrder(
        conv=Conv2d(before, after, kernel, padding=kernel // 2, bias=False),
        batch_norm=BatchNorm(after),
        activation=ActivationModule(Activation.RELU),
    )


class PoolingBlock(Module):
    def __init__(self, scale: int, before: int, width: int) -> None:
        self.scale = scale
        setattr(self, "1", conv_module(before, width, 1))

    def forward(self, hidden_state: Handle) -> Handle:
        hidden_state = adaptive_mean(hidden_state, self.scale)
        hidden_state = self.children["1"](hidden_state)
        return hidden_state


class UperNetPyramidPoolingModule(Module):
    def __init__(self, scales: list[int], before: int, width: int) -> None:
        for number, scale in enumerate(scales):
            setattr(self, str(number), PoolingBlock(scale, before, width))

    def forward(self, x: Handle) -> list[Handle]:
        ppm_outs = []
        for ppm in self.children.values():
            ppm_out = ppm(x)
            upsampled_ppm_out = interpolate(ppm_out, *x.shape[2:])
            ppm_outs.append(upsampled_ppm_out)
        return ppm_outs


class UperNetHead(Module):
    """The smallest size pooled at several scales, the others joined to it one by one."""

    def __init__(self, config: ConfigReader, widths: list[int], num_labels: int) -> None:
        scales, width = config.integers("pool_scales", minimum=1), config.integer("hidden_size")
        self.classifier = Conv2d(width, num_labels, 1)
        self.psp_modules = UperNetPyramidPoolingModule(scales, widths[-1], width)
        self.bottleneck = conv_module(widths[-1] + len(scales) * width, width, 3)
        self.lateral_convs = Several(conv_module(each, width, 1) for each in widths[:-1])
        self.fpn_convs = Several(conv_module(width, width, 3) for _ in widths[:-1])
        self.fpn_bottleneck = conv_module(len(widths) * width, width, 3)

    def psp_forward(self, inputs: tuple[Handle, ...]) -> Handle:
        """The smallest size and its poolings."""
        x = inputs[-1]
        psp_outs = [x]
        psp_outs.extend(self.psp_modules(x))
        joined = concatenate(*psp_outs, dim=1)
        del psp_outs
        output: Handle = self.bottleneck(joined)
        return output

    def forward(self, encoder_hidden_states: tuple[Handle, ...]) -> Handle:
        laterals = [
            lateral_conv(encoder_hidden_states[i])
            for i, lateral_conv in enumerate(self.lateral_convs.children.values())
        ]
        laterals.append(self.psp_forward(encoder_hidden_states))
        last = len(laterals) - 1
        for i in range(last, 0, -1):
            laterals[i - 1] = laterals[i - 1] + interpolate(laterals[i], *laterals[i - 1].shape[2:])
        fpn_convs = self.fpn_convs.children.values()
        fpn_outs = [fpn_conv(laterals[i]) for i, fpn_conv in enumerate(fpn_convs)]
        fpn_outs.append(laterals[-1])
        for i in range(last, 0, -1):
            fpn_outs[i] = interpolate(fpn_outs[i], *fpn_outs[0].shape[2:])
        joined = concatenate(*fpn_outs, dim=1)
        del fpn_outs
        output = self.fpn_bottleneck(joined)
        output = self.classifier(output)
        return output


class Several(Module):
    """``torch.nn.ModuleList``."""

    def __init__(self, each: Iterable[InOrder]) -> None:
        for number, module in enumerate(each):
            setattr(self, str(number), module)


class UperNetFCNHead(Module):
    """Convolutions on one size, and classes of their own."""

    def __init__(self, config: ConfigReader, widths: list[int], num_labels: int) -> None:
        given = config.optional_integer("auxiliary_in_channels")
        if given is None and len(widths) <= AUXILIARY_LEVEL:
            error = config.fail(
                "auxiliary_in_channels", "is missing for a backbone of so few stages"
            )
            raise error
        first = widths[AUXILIARY_LEVEL] if given is None else given
        width, count = config.integer("auxiliary_channels"), few(config, "auxiliary_num_convs")
        self.level = min(AUXILIARY_LEVEL, len(widths) - 1)
        convs = {f"_{i}": conv_module(width if i else first, width, 3) for i in range(count)}
        self.convs = InOrder(**convs)
        if config.flag("auxiliary_concat_input"):
            self.conv_cat = conv_module(first + width, width, 3)
        self.classifier = Conv2d(width, num_labels, 1)

    def forward(self, encoder_hidden_states: tuple[Handle, ...]) -> Handle:
        hidden_states = encoder_hidden_states[self.level]
        output = self.convs(hidden_states)
        if "conv_cat" in self.children:
            output = self.conv_cat(concatenate(hidden_states, output, dim=1))
        output = self.classifier(output)
        return output


class UperNetForSemanticSegmentation(PictureTask):
    def add_head(self, config: ConfigReader) -> None:
        """One head, or two."""
        assert isinstance(self.model, UperNetModel)
        widths, num_labels = self.model.backbone.widths, self.spec.num_labels
        self.decode_head = UperNetHead(config, widths, num_labels)
        if config.flag("use_auxiliary_head"):
            self.auxiliary_head = UperNetFCNHead(config, widths, num_labels)

    def loss_of(self, *features: Handle) -> Tensor:
        """Cross-entropy of every pixel, of either head."""
        run, (batch, _, height, width) = self.run, self.model.pixels_shape()
        logits = self.decode_head(features)
        logits = interpolate(logits, height, width)
        auxiliary_logits = None
        if "auxiliary_head" in self.children:
            auxiliary_logits = self.auxiliary_head(features)
            auxiliary_logits = interpolate(auxiliary_logits, height, width)
        labels = from_batch(run, batch * height * width, DType.INT64)
        loss = Handle(run, cross_entropy(run, logits.record, labels), ())
        if auxiliary_logits is not None:
            auxiliary_loss = Handle(run, cross_entropy(run, auxiliary_logits.record, labels), ())
            loss += 0.4 * auxiliary_loss
        hand_out(run, logits.record)
        return loss.record


class UperNetModel(PictureModel):
    """There is no class without the heads."""

    prefix = ""
    bare = UperNetForSemanticSegmentation
    stands_alone = False
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        "ForSemanticSegmentation": UperNetForSemanticSegmentation
    }

    def __init__(self, config: ConfigReader) -> None:
        self.backbone = backbone_of(read_part(config, BACKBONE), BACKBONES)
        self.width, self.picture = config.integer("hidden_size"), self.backbone.picture

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        features: tuple[Handle, ...] = self.backbone(pixel_values)
        return features
