"""Heads over a backbone that say something about every pixel: UPerNet, ViTMatte."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

from memplan.families.classes import dispatch, whole_model
from memplan.families.nesting import Part, PartSpec, read_part, unknown_part
from memplan.families.request import ReadRequest
from memplan.families.towers.networks.convnext import convnext_sizes, convnext_tower
from memplan.families.towers.networks.resnet import resnet_sizes, resnet_tower
from memplan.families.towers.sizes import few
from memplan.families.towers.vitdet import vitdet_tower
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.gridded.matting import MattingBody
from memplan.model.towers.gridded.parsing import AuxiliaryHead, NormedLevelsBody, ParsingBody

SEGMENTATION = "ForSemanticSegmentation"
MATTING = "ForImageMatting"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


def _upernet(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """UPerNet: the last stage pooled at several scales, the others joined to it one by one."""
    part = read_part(
        reader, request,
        PartSpec(key="backbone_config", model_type="resnet", fills=_DEFAULT_BACKBONE),
    )  # fmt: skip
    backbone = _STAGED_BACKBONES.get(part.model_type)
    if backbone is None:
        raise unknown_part(part, _STAGED_BACKBONES)
    channels = _stage_channels(part)
    width = reader.integer("hidden_size")

    def declare(table: ParameterTable, _ending: str) -> None:
        before = backbone(table, part.reader, channels)
        _upernet_heads(table, reader, channels, width, request.labels(reader), before)

    model = whole_model(
        reader, request, (SEGMENTATION,), declare, hidden_size=width, context_length=1
    )
    return replace(model, recomputes=False)


_DEFAULT_BACKBONE: Mapping[str, object] = {
    "model_type": "resnet",
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
"""What ``UperNetConfig`` makes where the config has no backbone."""


def _stage_channels(part: Part) -> list[int]:
    """Channels of the stages that ``out_features`` name; of the last one where there is none."""
    reader = part.reader
    sizes = convnext_sizes(reader) if "convnext" in part.model_type else resnet_sizes(reader)
    named = reader.texts("out_features")
    if not named:
        return sizes[-1:]
    known = {f"stage{index + 1}": size for index, size in enumerate(sizes)}
    for each in named:
        reader.choice("out_features", each, known)
    return [known[each] for each in named]


def _named_stages(reader: ConfigReader, count: int) -> list[int]:
    """Numbers of the stages that ``out_features`` name."""
    named = reader.texts("out_features") or [f"stage{count}"]
    return [int(each.removeprefix("stage")) - 1 for each in named]


def _convnext_backbone(
    table: ParameterTable, reader: ConfigReader, channels: list[int], *, normalized: bool
) -> tuple[TowerBody, ...]:
    convnext_tower(table, "backbone", reader, normalized=normalized, keeps_levels=True)
    stages = _named_stages(reader, len(convnext_sizes(reader)))
    norms = tuple(
        (stage, f"hidden_states_norms.stage{stage + 1}", size)
        for stage, size in zip(stages, channels, strict=True)
    )
    with table.block("backbone.norms", body=NormedLevelsBody(norms=norms)):
        for _, module, size in norms:
            table.norm(module, size)
    return ()


def _resnet_backbone(
    table: ParameterTable, reader: ConfigReader, channels: list[int]
) -> tuple[TowerBody, ...]:
    resnet_tower(table, "backbone", reader, keeps_levels=True)
    stages = _named_stages(reader, len(resnet_sizes(reader)))
    norms = tuple((stage, "", size) for stage, size in zip(stages, channels, strict=True))
    return (NormedLevelsBody(norms=norms),)


DeclareBackbone = Callable[[ParameterTable, ConfigReader, list[int]], tuple[TowerBody, ...]]
"""Declares a backbone; gives what the head computes first."""

_STAGED_BACKBONES: dict[str, DeclareBackbone] = {
    "convnext": partial(_convnext_backbone, normalized=False),
    "convnextv2": partial(_convnext_backbone, normalized=True),
    "resnet": _resnet_backbone,
}


def _batch_normed(table: ParameterTable, name: str, before: int, after: int, kernel: int) -> None:
    table.convolution(f"{name}.conv", before, after, kernel, kernel, bias=False)
    table.norm(f"{name}.batch_norm", after)


def _upernet_heads(
    table: ParameterTable,
    reader: ConfigReader,
    channels: list[int],
    width: int,
    num_labels: int,
    before: tuple[TowerBody, ...],
) -> None:
    scales = reader.integers("pool_scales", minimum=1)
    last = channels[-1]
    with table.block("head"):
        for number in range(len(scales)):
            _batch_normed(table, f"psp_modules.{number}", last, width, 1)
        _batch_normed(table, "bottleneck", last + len(scales) * width, width, 3)
        for index, size in enumerate(channels[:-1]):
            _batch_normed(table, f"lateral_convs.{index}", size, width, 1)
            _batch_normed(table, f"fpn_convs.{index}", width, width, 3)
        _batch_normed(table, "fpn_bottleneck", len(channels) * width, width, 3)
        table.convolution("classifier", width, num_labels, 1, 1)
        auxiliary: AuxiliaryHead | None = None
        if reader.flag("use_auxiliary_head", default=True):
            auxiliary = _auxiliary_head(table, reader, channels, num_labels)
        parsing = ParsingBody(
            channels=tuple(channels), width=width, scales=tuple(scales), num_classes=num_labels,
            auxiliary=auxiliary,
        )  # fmt: skip
        table.computes(ChainBody(parts=(*before, parsing)))


def _auxiliary_head(
    table: ParameterTable, reader: ConfigReader, channels: list[int], num_labels: int
) -> AuxiliaryHead:
    """``UperNetFCNHead`` on the third stage."""
    given = reader.optional_integer("auxiliary_in_channels")
    if given is None and len(channels) < 3:
        error = reader.fail("auxiliary_in_channels", "is missing for a backbone of so few stages")
        raise error
    before = channels[2] if given is None else given
    width = reader.integer("auxiliary_channels")
    count, joins = few(reader, "auxiliary_num_convs"), reader.flag("auxiliary_concat_input")
    first = before
    for index in range(count):
        _batch_normed(table, f"auxiliary.convs.{index}", first, width, 3)
        first = width
    if joins:
        _batch_normed(table, "auxiliary.conv_cat", before + width, width, 3)
    table.convolution("auxiliary.classifier", width, num_labels, 1, 1)
    level = min(2, len(channels) - 1)
    return AuxiliaryHead(level=level, width=width, num_convolutions=count, joins_input=joins)


def _vitmatte(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """ViTMatte: ViTDet's features, joined step by step with convolutions of the image."""
    part = read_part(reader, request, PartSpec(key="backbone_config", model_type="vitdet"))
    if part.model_type != "vitdet":
        raise unknown_part(part, {"vitdet": None})
    details = [part.reader.integer("num_channels"), *reader.integers("convstream_hidden_sizes")]
    fused = [reader.integer("hidden_size"), *reader.integers("fusion_hidden_sizes", minimum=1)]
    if len(fused) != len(details) + 1:
        error = reader.fail("fusion_hidden_sizes", "must be one more than convstream_hidden_sizes")
        raise error

    def declare(table: ParameterTable, _ending: str) -> None:
        vitdet_tower(table, "backbone", part.reader)
        body = MattingBody(details=tuple(details[1:]), fused=tuple(fused[1:]))
        with table.block("head", body=body):
            for index, (before, after) in enumerate(pairwise(details)):
                _batch_normed(table, f"convstream.{index}", before, after, 3)
            for index, (before, after) in enumerate(pairwise(fused)):
                joined = before + details[-(index + 1)]
                _batch_normed(table, f"fusion_blocks.{index}", joined, after, 3)
            _matting_head(table, fused[-1])

    return whole_model(reader, request, (MATTING,), declare, hidden_size=fused[0], context_length=1)


MATTING_CHANNELS = 16
"""Between the two convolutions of ``VitMatteHead``."""


def _matting_head(table: ParameterTable, size: int) -> None:
    table.convolution("matting_convs.0", size, MATTING_CHANNELS, 3, 3)
    table.norm("matting_convs.1", MATTING_CHANNELS)
    table.convolution("matting_convs.3", MATTING_CHANNELS, 1, 1, 1)


_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "upernet": _upernet,
    "vitmatte": _vitmatte,
}
