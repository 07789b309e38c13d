"""Image transformers in stages that narrow the image: Swin V2, CvT, LeViT, PVT, GLPN, FocalNet."""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.classes import BARE, classifier, dispatch, whole_model
from memplan.families.request import ReadRequest
from memplan.families.towers.networks.cvt import cvt_stages
from memplan.families.towers.networks.focalnet import focal_stages
from memplan.families.towers.networks.levit import levit_stages
from memplan.families.towers.networks.pvt import mix_tower, pvt_stages
from memplan.families.towers.networks.swin import swin_size, swin_v2_tower
from memplan.families.towers.sizes import at_least_one, each_stage, stage_flags
from memplan.families.towers.vit import num_patches
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.pooling import ClassifierBody, PoolerBody, TowerPooling
from memplan.model.towers.gridded.grids import FirstBody, ForgottenBody, NamedBody
from memplan.model.towers.gridded.levels import DepthBody, FusedLevelBody, UpsampledBody
from memplan.model.towers.gridded.nets import ConvolutionBody
from memplan.model.towers.parts import ActivationBody, NormBody

IMAGES = "ForImageClassification"
TEACHER = "ForImageClassificationWithTeacher"
MASKED_IMAGES = "ForMaskedImageModeling"
DEPTH = "ForDepthEstimation"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


def _swin_v2(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    size = swin_size(reader)

    def declare(table: ParameterTable, ending: str) -> None:
        swin_v2_tower(table, "model", reader, masked=ending == MASKED_IMAGES)
        with table.block("norm", body=_last_norm(size)):
            table.norm("layernorm", size)
        _image_head(table, reader, request, ending, size)

    return whole_model(
        reader, request, (IMAGES, BARE, MASKED_IMAGES), declare,
        hidden_size=size, context_length=num_patches(reader),
    )  # fmt: skip


def _last_norm(size: int) -> ChainBody:
    """Behind it nothing holds what the embedding gave."""
    return ChainBody(parts=(NormBody(module="layernorm", size=size), ForgottenBody()))


def _image_head(
    table: ParameterTable, reader: ConfigReader, request: ReadRequest, ending: str, size: int
) -> None:
    """A classifier, or the convolution that draws masked patches again."""
    if ending == IMAGES:
        labels = request.labels(reader)
        classifier(table, "classifier", size, labels, pooling=TowerPooling.MEAN)
    if ending == MASKED_IMAGES:
        with table.block("head"):
            pixels = reader.integer("encoder_stride") ** 2 * reader.integer("num_channels")
            table.convolution("decoder", size, pixels, 1, 1)


def _focalnet(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """FocalNet: each stage twice as wide as the one before, ``hidden_sizes`` are not read."""
    depths = at_least_one(reader, "depths")
    size = reader.integer("embed_dim") * 2 ** (len(depths) - 1)

    def declare(table: ParameterTable, ending: str) -> None:
        focal_stages(table, reader, depths, masked=ending == MASKED_IMAGES)
        with table.block("norm", body=_last_norm(size)):
            table.norm("layernorm", size)
        _image_head(table, reader, request, ending, size)

    return whole_model(
        reader, request, (IMAGES, BARE, MASKED_IMAGES), declare,
        hidden_size=size, context_length=num_patches(reader),
    )  # fmt: skip


def _cvt(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """CvT: its classifier reads the last stage's class token."""
    depths = at_least_one(reader, "depth")
    sizes = each_stage(reader, "embed_dim", len(depths))

    def declare(table: ParameterTable, ending: str) -> None:
        cvt_stages(table, reader, sizes)
        if ending == IMAGES:
            size = sizes[-1]
            if not stage_flags(reader, "cls_token", len(depths))[-1]:
                error = reader.fail("cls_token", "the last stage has none, which the class reads")
                raise error
            norm = NormBody(module="layernorm", size=size)
            mean = PoolerBody(pooling=TowerPooling.MEAN, size=size)
            parts: tuple[TowerBody, ...] = (FirstBody(size=size), norm, mean)
            if len(depths) > 1:
                parts = (ForgottenBody(), *parts)
            with table.block("norm", body=ChainBody(parts=parts)):
                table.norm("layernorm", size)
            classifier(table, "classifier", size, request.labels(reader), known=True)

    model = whole_model(
        reader, request, (IMAGES, BARE), declare, hidden_size=sizes[-1], context_length=1
    )
    return replace(model, recomputes=False)


def _pvt(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """PVT: learned positions in every stage, a class token in the last."""
    sizes = each_stage(reader, "hidden_sizes", reader.layers("num_encoder_blocks"))

    def declare(table: ParameterTable, ending: str) -> None:
        pvt_stages(table, reader, sizes)
        with table.block("norm", body=NormBody(module="layer_norm", size=sizes[-1])):
            table.norm("layer_norm", sizes[-1])
        if ending == IMAGES:
            labels = request.labels(reader)
            classifier(table, "classifier", sizes[-1], labels, pooling=TowerPooling.FIRST)

    model = whole_model(
        reader, request, (IMAGES, BARE), declare, hidden_size=sizes[-1], context_length=1
    )
    return replace(model, recomputes=False)


def _glpn(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """GLPN: SegFormer's encoder, and a decoder that puts the depth of all stages together."""
    count = reader.layers("num_encoder_blocks")
    sizes = each_stage(reader, "hidden_sizes", count)

    def declare(table: ParameterTable, ending: str) -> None:
        mix_tower(table, "encoder", reader)
        if ending == DEPTH:
            _glpn_decoder(table, sizes, reader.integer("decoder_hidden_size"))

    model = whole_model(
        reader, request, (DEPTH, BARE), declare, hidden_size=sizes[-1], context_length=1
    )
    return replace(model, recomputes=False)


def _glpn_decoder(table: ParameterTable, sizes: list[int], width: int) -> None:
    """``GLPNDecoder``: the narrowest stage has nothing to be fused with."""
    for index, size in enumerate(reversed(sizes)):
        fused = FusedLevelBody(size=size, width=width, first=not index)
        with table.block(f"decoder.stages.{index}", body=fused):
            if size != width:
                table.convolution("convolution", size, width, 1, 1)
            if index:
                half = width // 2
                table.convolution("fusion.convolution1", 2 * width, width, 3, 3)
                table.norm("fusion.norm1", width)
                table.convolution("fusion.convolution2", width, half, 3, 3)
                table.norm("fusion.norm2", half)
                table.convolution("fusion.convolution3", half, 2, 3, 3)
    convolutions = [
        ConvolutionBody(module=f"head.{number}", kernel=3, padding=2, bias=True)
        for number in (0, 2)
    ]
    relu = ActivationBody(activation=Activation.RELU)
    with table.block("decoder.whole", body=ChainBody(parts=(UpsampledBody(), NamedBody()))):
        pass
    parts = (convolutions[0], relu, convolutions[1], DepthBody(), ForgottenBody())
    with table.block("head", body=ChainBody(parts=parts)):
        table.convolution("head.0", width, width, 3, 3)
        table.convolution("head.2", width, 1, 3, 3)


def _levit(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """LeViT: a class with a teacher has two classifiers, whose logits are averaged."""
    depths = at_least_one(reader, "depths")
    sizes = each_stage(reader, "hidden_sizes", len(depths))

    def declare(table: ParameterTable, ending: str) -> None:
        levit_stages(table, reader, sizes)
        mean = PoolerBody(pooling=TowerPooling.MEAN, size=sizes[-1])
        held = (ForgottenBody(),) * min(2, len(depths))
        with table.block("pooler", body=ChainBody(parts=(*held, mean))):
            pass
        names = {IMAGES: ("classifier",), TEACHER: ("classifier", "classifier_distill")}
        _normed_classifiers(table, names.get(ending, ()), sizes[-1], request.labels(reader))

    model = whole_model(
        reader, request, (IMAGES, BARE, TEACHER), declare,
        hidden_size=sizes[-1], context_length=1,
    )  # fmt: skip
    return replace(model, recomputes=False)


def _normed_classifiers(
    table: ParameterTable, names: tuple[str, ...], size: int, num_labels: int
) -> None:
    """``LevitClassificationLayer``: a batch norm and a linear layer each."""
    if not (names and num_labels):
        return
    modules = tuple((f"{name}.linear", size, num_labels) for name in names)
    norms = tuple(f"{name}.batch_norm" for name in names)
    with table.block("head", body=ClassifierBody(modules=modules, batch_norms=norms)):
        for name in names:
            table.norm(f"{name}.batch_norm", size)
            table.linear(f"{name}.linear", size, num_labels)


_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "swinv2": _swin_v2,
    "focalnet": _focalnet,
    "cvt": _cvt,
    "pvt": _pvt,
    "glpn": _glpn,
    "levit": _levit,
}
