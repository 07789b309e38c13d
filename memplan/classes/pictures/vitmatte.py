"""ViTMatte: a backbone's features, widened step by step, are joined with ever larger details of the picture.

(transformers 5.23, models/vitmatte/modeling_vitmatte.py)
"""

from itertools import pairwise
from typing import ClassVar

from memplan.classes.pictures.backbones import backbone_of
from memplan.classes.pictures.base import PictureModel, PictureTask
from memplan.classes.pictures.parts import InOrder
from memplan.families.nesting import PartSpec, read_part
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.basic import ActivationModule
from memplan.graph.modules.functional import relu_in_place
from memplan.graph.modules.grids import BatchNorm, Conv2d, interpolate
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation

MIDDLE = 16
"""Channels between the two convolutions of ``VitMatteHead``."""


def conv3x3(before: int, after: int, stride: int) -> InOrder:
    """``VitMatteBasicConv3x3``."""
    return InOrder(
        conv=Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
        batch_norm=BatchNorm(after),
        relu=ActivationModule(Activation.RELU),
    )


class VitMatteConvStream(Module):
    def __init__(self, channels: list[int]) -> None:
        for number, (before, after) in enumerate(pairwise(channels)):
            setattr(self, f"convs.{number}", conv3x3(before, after, 2))

    def forward(self, pixel_values: Handle) -> list[Handle]:
        out_dict = [pixel_values]
        embeddings = pixel_values
        for conv in self.children.values():
            embeddings = conv(embeddings)
            out_dict.append(embeddings)
        return out_dict


class VitMatteFusionBlock(Module):
    def __init__(self, before: int, after: int) -> None:
        self.conv = conv3x3(before, after, 1)

    def forward(self, features: Handle, detailed_feature_map: Handle) -> Handle:
        upscaled_features = interpolate(features, *(2 * side for side in features.shape[2:]))
        out = concatenate(detailed_feature_map, upscaled_features, dim=1)
        out = self.conv(out)
        return out


class ReluInPlace(Module):
    """``torch.nn.ReLU(True)``."""

    def forward(self, x: Handle) -> Handle:
        return relu_in_place(x)


class VitMatteDetailCaptureModule(Module):
    def __init__(self, config: ConfigReader, channels: int) -> None:
        details = [channels, *config.integers("convstream_hidden_sizes")]
        fused = [
            config.integer("hidden_size"), *config.integers("fusion_hidden_sizes", minimum=1),
        ]  # fmt: skip
        if len(fused) != len(details) + 1:
            error = config.fail(
                "fusion_hidden_sizes", "must be one more than convstream_hidden_sizes"
            )
            raise error
        self.convstream = VitMatteConvStream(details)
        for number, (before, after) in enumerate(pairwise(fused)):
            block = VitMatteFusionBlock(before + details[-1 - number], after)
            setattr(self, f"fusion_blocks.{number}", block)
        self.matting_head = InOrder(
            matting_convs=InOrder(
                _0=Conv2d(fused[-1], MIDDLE, 3, padding=1), _1=BatchNorm(MIDDLE), _2=ReluInPlace(),
                _3=Conv2d(MIDDLE, 1, 1),
            )
        )  # fmt: skip

    def forward(self, features: Handle, pixel_values: Handle) -> Handle:
        detail_features = self.convstream(pixel_values)
        for number, detail in enumerate(reversed(detail_features)):
            features = self.children[f"fusion_blocks.{number}"](features, detail)
        alphas: Handle = self.matting_head(features).unary(OperationKind.SIGMOID)
        return alphas


class VitMatteForImageMatting(PictureTask):
    """Its class has no loss of its own."""

    begins_head = False
    meant = "alphas kept until backward, their sum as the loss: the class has none"

    def add_head(self, config: ConfigReader) -> None:
        """The decoder."""
        assert isinstance(self.model, VitMatteModel)
        self.decoder = VitMatteDetailCaptureModule(config, self.model.picture.channels)

    def loss_of(self, *outputs: Handle) -> Tensor:
        """How much of each pixel is in front."""
        *features, pixel_values = outputs
        self.begin_head(features[-1])
        alphas: Handle = self.decoder(features[-1], pixel_values)
        return alphas.record


class VitMatteModel(PictureModel):
    """There is no class without the decoder."""

    prefix = ""
    recomputes = True
    bare = VitMatteForImageMatting
    stands_alone = False
    endings: ClassVar[dict[str, type[PictureTask]]] = {"ForImageMatting": VitMatteForImageMatting}

    def __init__(self, config: ConfigReader) -> None:
        part = read_part(config, PartSpec(key="backbone_config", model_type="vitdet"))
        self.backbone = backbone_of(part, ("vitdet",))
        self.width, self.picture = config.integer("hidden_size"), self.backbone.picture

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        return (*self.backbone(pixel_values), pixel_values)
