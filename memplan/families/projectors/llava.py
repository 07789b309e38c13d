"""LLaVA and its kin: a perceptron over a layer of CLIP or SigLIP."""

from collections.abc import Mapping
from dataclasses import replace

from memplan.families.multimodal_spec import Whole
from memplan.families.projectors.towers import (
    VISION,
    declare_features,
    declare_tower,
    feature_layer,
    perceptron_bodies,
    width_of,
    with_pictures,
)
from memplan.families.towers.blocks import perceptron
from memplan.families.towers.layers import tower_activation
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.projecting import CropBody, JoinedPatchesBody, PackedCropsBody
from memplan.model.towers.parts import RMS_NORM, LinearBody, NormBody, SpareBody

CLIP_336: Mapping[str, object] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
}  # fmt: skip
"""CLIP ViT-L/14 at 336 pixels, which LLaVA's classes make where a file has no vision config."""


CLIP_224: Mapping[str, object] = {**CLIP_336, "image_size": 224}


SIGLIP_384: Mapping[str, object] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26,
    "num_attention_heads": 16, "image_size": 384, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip


PIXTRAL_1540: Mapping[str, object] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 1540, "patch_size": 14,
}  # fmt: skip


def feature_layers(reader: ConfigReader) -> int:
    """How many layers' outputs are joined: ``vision_feature_layer`` is a number or a list."""
    listed = reader.raw("vision_feature_layer")
    return len(listed) if isinstance(listed, list) and listed else 1


def _llava(table: ParameterTable, whole: Whole, fills: Mapping[str, object], kind: str) -> None:
    vision = whole.part(VISION, kind, fills)
    layer = feature_layer(whole.reader)
    declare_features(table, vision, layer=-1 if layer is None else layer)
    cropped = whole.reader.raw("vision_feature_select_strategy") in (None, "default")
    crops = vision.model_type == "clip_vision_model" and cropped
    first = (CropBody(size=width_of(vision)),) if crops else ()
    _llava_projector(table, whole, width_of(vision), first, known=layer is not None)


def _llava_projector(
    table: ParameterTable,
    whole: Whole,
    width: int,
    first: tuple[TowerBody, ...] = (),
    *,
    known: bool = False,
) -> None:
    reader, outputs = whole.reader, whole.text.hidden_size
    bias = reader.flag("multimodal_projector_bias")
    inputs = width * feature_layers(reader)
    active = tower_activation(reader, "projector_hidden_act")
    parts = perceptron_bodies("projector", inputs, outputs, outputs, active, bias=bias)
    with table.block("projector", body=ChainBody(parts=(*first, *parts)) if known else None):
        perceptron(table, "projector", inputs, outputs, outputs, bias=bias)


def vip_llava(table: ParameterTable, whole: Whole) -> None:
    """Several layers of CLIP, a norm over them, and a perceptron."""
    vision = whole.part(VISION, "clip_vision_model", CLIP_336)
    declare_tower(table, vision)
    inputs, outputs = width_of(vision) * feature_layers(whole.reader), whole.text.hidden_size
    with table.block("projector"):
        table.norm("projector.projector_layernorm", inputs)
        perceptron(table, "projector", inputs, outputs, outputs)


def _newline(table: ParameterTable, whole: Whole, crops: int = 0) -> None:
    """A vector that ends a row of patches; with ``crops`` of a picture, what is made with it."""
    size, newline = whole.text.hidden_size, "model.image_newline"
    body = PackedCropsBody(size=size, crops=crops, newline=newline) if crops else None
    with table.block("projector.newline", body=body):
        table.parameter("model", "image_newline", size)


NEXT_CROPS = 3
"""LLaVA-NeXT's processor: a picture twice as wide as the tower's side is the whole and two halves."""


ONEVISION_CROPS = 2
"""LLaVA-OneVision's: one of the tower's own side is the whole, twice."""


def llava(table: ParameterTable, whole: Whole) -> None:
    """CLIP by default, and a perceptron."""
    _llava(table, whole, CLIP_336, "clip_vision_model")


def llava_next(table: ParameterTable, whole: Whole) -> None:
    """LLaVA's, with a vector for line ends."""
    own = ParameterTable()
    llava(own, whole)
    table.add(*with_pictures(own.blocks(), crops=NEXT_CROPS))
    _newline(table, whole, NEXT_CROPS)


def llava_onevision(table: ParameterTable, whole: Whole) -> None:
    """SigLIP by default."""
    own = ParameterTable()
    _llava(own, whole, SIGLIP_384, "siglip_vision_model")
    table.add(*with_pictures(own.blocks(), crops=ONEVISION_CROPS))
    _newline(table, whole, ONEVISION_CROPS)


def video_llava(table: ParameterTable, whole: Whole) -> None:
    """Two towers of one config, for images and for videos; of the latter none is shown."""
    vision = whole.part(VISION, "clip_vision_model", CLIP_224)
    own = ParameterTable()
    declare_tower(own, vision, "video_tower")
    table.add(*(replace(block, body=SpareBody()) for block in own.blocks()))
    _llava(table, whole, CLIP_224, "clip_vision_model")


def mistral3(table: ParameterTable, whole: Whole) -> None:
    """Pixtral, a norm, neighbouring patches joined, a perceptron."""
    vision = whole.part(VISION, "pixtral", PIXTRAL_1540)
    declare_features(table, vision)
    width = width_of(vision)
    side = whole.reader.integer("spatial_merge_size")
    merger = ChainBody(
        parts=(
            NormBody(module="projector.norm", size=width, norm=RMS_NORM),
            JoinedPatchesBody(size=width, side=side, copies=2),
            LinearBody(
                module="patch_merger.merging_layer", inputs=width * side * side, outputs=width,
                bias=False,
            ),
        )
    )  # fmt: skip
    with table.block("projector.merger", body=merger):
        table.norm("projector.norm", width, bias=False)
        joined = width * whole.reader.integer("spatial_merge_size") ** 2
        table.linear("patch_merger.merging_layer", joined, width, bias=False)
    _llava_projector(table, whole, width, known=feature_layer(whole.reader) == -1)
