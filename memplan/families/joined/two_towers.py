"""Models that compare images with texts: a tower for each, and two projections to one width.

CLIP and its kin. Where a config still has ``text_config_dict`` or ``vision_config_dict``, CLIP's
classes take that one (``CLIPConfig.__post_init__`` of transformers 5.23).
"""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.classes import BARE, classifier, dispatch, whole_model
from memplan.families.nesting import PartSpec, read_part, unknown_part
from memplan.families.request import ReadRequest
from memplan.families.towers.bert import bert_text, roberta_text
from memplan.families.towers.clip import (
    clip_text,
    clip_vision,
    patches_across,
    siglip2_vision,
    siglip_text,
    siglip_vision,
)
from memplan.families.towers.networks.efficientnet import efficientnet_tower
from memplan.families.towers.vit import VIT_TOWERS, vit_model
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterBlock, ParameterTable
from memplan.model.spec import ModelSpec
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.contrast import Contrast, ContrastBody, PatchQueriesBody
from memplan.model.towers.compared.pooling import PoolerBody, TowerPooling
from memplan.model.towers.gridded.nets import Window, WindowBody
from memplan.model.towers.parts import LinearBody, NormBody, SpareBody

DeclareTower = Callable[[ParameterTable, str, ConfigReader], None]

WITH_PROJECTION = "ModelWithProjection"
IMAGES = "ForImageClassification"
DETECTION = "ForObjectDetection"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type of this module."""
    return dispatch(_READERS, reader, request)


def towers(reader: ConfigReader, request: ReadRequest) -> tuple[ConfigReader, ConfigReader]:
    """Readers of the text tower's config and of the vision tower's."""
    text, vision = (
        read_part(
            reader,
            PartSpec(
                key=f"{part}_config_dict" if reader.has(f"{part}_config_dict") else f"{part}_config",
                model_type=f"{request.model_type}_{part}_model",
            ),
        ).reader
        for part in ("text", "vision")
    )  # fmt: skip
    return text, vision


def _two_towers(
    reader: ConfigReader,
    request: ReadRequest,
    declare: Callable[[ParameterTable, str], None],
    text: ConfigReader,
    *endings: str,
) -> ModelSpec:
    return whole_model(
        reader, request, (BARE, *endings), declare,
        hidden_size=text.integer("hidden_size"), vocab_size=text.integer("vocab_size"),
        context_length=text.integer("max_position_embeddings"),
    )  # fmt: skip


def _contrast(
    table: ParameterTable,
    reader: ConfigReader,
    text_size: int,
    vision_size: int,
    *,
    is_projected: bool = False,
) -> None:
    """CLIP's projections without biases, and its temperature; pictures are projected there or before."""
    width = reader.integer("projection_dim")
    body = ContrastBody(
        kind=Contrast.SOFTMAX, image="projected" if is_projected else "vision_model",
        text="text_model", image_size=width if is_projected else vision_size,
        text_size=text_size, width=width,
        image_projection="" if is_projected else "visual_projection",
        text_projection="text_projection",
    )  # fmt: skip
    with table.block("head", body=body):
        if not is_projected:
            table.linear("visual_projection", vision_size, width, bias=False)
        table.linear("text_projection", text_size, width, bias=False)
        table.parameter("model", "logit_scale")


def _project_pictures(table: ParameterTable, size: int, width: int) -> None:
    body = LinearBody(module="visual_projection", inputs=size, outputs=width, bias=False)
    with table.block("projected", body=body):
        table.linear("visual_projection", size, width, bias=False)


def _clip(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """CLIP, Chinese-CLIP with a BERT and AltCLIP with a RoBERTa for texts."""
    text, vision = towers(reader, request)
    read_text, projected = _TEXT_TOWERS[request.model_type]
    text_size = text.integer(projected)
    vision_size = vision.integer("hidden_size")

    def declare(table: ParameterTable, ending: str) -> None:
        if ending == IMAGES:
            clip_vision(table, "vision_model", vision, pooled=False)
            pooling = TowerPooling.PATCHES_MEAN
            classifier(table, "classifier", vision_size, request.labels(reader), pooling=pooling)
            return
        clip_vision(table, "vision_model", vision)
        # AltCLIP projects both behind both towers, the others what each gives at once (get_image_features).
        is_projected = request.model_type != "altclip"
        if is_projected:
            _project_pictures(table, vision_size, reader.integer("projection_dim"))
        read_text(table, "text_model", text)
        _contrast(table, reader, text_size, vision_size, is_projected=is_projected)

    return _two_towers(reader, request, declare, text, IMAGES)


def _unpooled_bert(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    bert_text(table, name, reader, pooled=False, fp32_softmax=True, sums_in_place=True)
    _first_token(table, name, reader.integer("hidden_size"))


def _first_token(table: ParameterTable, name: str, size: int) -> None:
    first = PoolerBody(pooling=TowerPooling.FIRST, size=size)
    with table.block(f"{name}.pooled", body=first):
        pass


def _transformed_bert(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """``AltCLIPTextModel``: a norm and a linear layer to the width that is projected."""
    bert_text(table, name, reader, pooled=False, counted=True, fp32_softmax=True)
    size, width = reader.integer("hidden_size"), reader.integer("project_dim")
    projected: tuple[TowerBody, ...] = (
        NormBody(module="pre_norm", size=size),
        LinearBody(module="transformation", inputs=size, outputs=width),
        PoolerBody(pooling=TowerPooling.FIRST, size=width),
    )
    with table.block(f"{name}.pooler", body=ChainBody(parts=projected)):
        table.linear("transformation", size, width)
        table.norm("pre_norm", size)


_TEXT_TOWERS: dict[str, tuple[DeclareTower, str]] = {
    "clip": (clip_text, "hidden_size"),
    "chinese_clip": (_unpooled_bert, "hidden_size"),
    "altclip": (_transformed_bert, "project_dim"),
}
"""For each type, its text tower and the key for the width that comes out of it."""


def _siglip2_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """As many patches as the table has, which is what its processor cuts (``max_num_patches``)."""
    siglip2_vision(table, name, reader, times=1)


def _siglip(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """SigLIP: no projections, but a temperature and a bias."""
    text, vision = towers(reader, request)
    read_vision = siglip_vision if request.model_type == "siglip" else _siglip2_vision

    def declare(table: ParameterTable, ending: str) -> None:
        read_vision(table, "vision_model", vision)
        if ending == IMAGES:
            size = vision.integer("hidden_size")
            labels, pooling = request.labels(reader), TowerPooling.MEAN
            classifier(table, "classifier", size, labels, pooling=pooling)
            return
        siglip_text(table, "text_model", text)
        width = vision.integer("hidden_size")
        body = ContrastBody(
            kind=Contrast.SIGMOID, image="vision_model", text="text_model", image_size=width,
            text_size=width, width=width, shift="model.logit_bias",
        )  # fmt: skip
        with table.block("head", body=body):
            table.parameter("model", "logit_scale", 1)
            table.parameter("model", "logit_bias", 1)

    return _two_towers(reader, request, declare, text, IMAGES)


def _owlv2(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """OWLv2: CLIP, and for detection three small networks on every patch."""
    text, vision = towers(reader, request)
    text_size, size = text.integer("hidden_size"), vision.integer("hidden_size")

    def declare(table: ParameterTable, ending: str) -> None:
        if ending != DETECTION:
            clip_vision(table, "vision_model", vision)
            clip_text(table, "text_model", text)
            _contrast(table, reader, text_size, size)
        else:
            own = ParameterTable()
            clip_vision(own, "vision_model", vision)
            table.add(*_all_tokens(own.blocks(), size))
            clip_text(table, "text_model", text)
            own = ParameterTable()
            _contrast(own, reader, text_size, size)
            width = reader.integer("projection_dim")
            projection = LinearBody(
                module="text_projection", inputs=text_size, outputs=width, bias=False
            )
            # The picture's vector and the scale reach nothing that a detector returns.
            made = (replace(each, name="projections", body=projection) for each in own.blocks())
            table.add(*made)
            with table.block("head", body=PatchQueriesBody(size=size, width=text_size)):
                table.linear("class_head.dense0", size, text_size)
                table.linear("class_head.logit_shift", size, 1)
                table.linear("class_head.logit_scale", size, 1)
                _patch_head(table, "box_head", size, 4)
                _patch_head(table, "objectness_head", size, 1)
                table.norm("layer_norm", size)

    return _two_towers(reader, request, declare, text, DETECTION)


def _all_tokens(blocks: tuple[ParameterBlock, ...], size: int) -> tuple[ParameterBlock, ...]:
    """CLIP's tower, with the last norm on every token."""
    norm = NormBody(module="post_layer_norm", size=size)
    return tuple(
        replace(block, body=norm) if isinstance(block.body, PoolerBody) else block
        for block in blocks
    )


def _patch_head(table: ParameterTable, name: str, size: int, out: int) -> None:
    table.linear(f"{name}.dense0", size, size)
    table.linear(f"{name}.dense1", size, size)
    table.linear(f"{name}.dense2", size, out)


def _align(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """ALIGN: a BERT with its pooler and an EfficientNet, only the text projected."""
    text, vision = towers(reader, request)

    def declare(table: ParameterTable, _ending: str) -> None:
        efficientnet_tower(table, "vision_model", vision, topped=False)
        with table.block("vision_model.pooler", body=WindowBody(window=Window.MEAN)):
            pass
        size, width = text.integer("hidden_size"), reader.integer("projection_dim")
        bert_text(table, "text_model", text, pooled=False, fp32_softmax=True, sums_in_place=True)
        # Its pooler runs, and its result serves nothing.
        with table.block("text_model.pooler", body=SpareBody(runs=True)):
            table.linear("pooler.dense", size, size)
        _first_token(table, "text_model", size)
        body = ContrastBody(
            kind=Contrast.SOFTMAX, image="vision_model", text="text_model", image_size=width,
            text_size=size, width=width, text_projection="text_projection",
            scale="model.temperature", divides=True,
        )  # fmt: skip
        with table.block("head", body=body):
            table.linear("text_projection", size, width)
            table.parameter("model", "temperature")

    model = _two_towers(reader, request, declare, text)
    return replace(model, eager_attention_only=True)


def _dual_encoder(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Any two towers, each of a type of its own."""
    text_part = read_part(reader, PartSpec(key="text_config", model_type="bert"))
    vision_part = read_part(reader, PartSpec(key="vision_config", model_type="clip_vision_model"))
    declare_text = _ANY_TEXT.get(text_part.model_type)
    declare_vision = _ANY_VISION.get(vision_part.model_type)
    if declare_text is None:
        raise unknown_part(text_part, _ANY_TEXT)
    if declare_vision is None:
        raise unknown_part(vision_part, _ANY_VISION)
    text, vision = text_part.reader, vision_part.reader

    def declare(table: ParameterTable, _ending: str) -> None:
        declare_vision(table, "vision_model", vision)
        kind = VIT_TOWERS.get(vision_part.model_type)
        if kind is not None and not kind.pooled:
            size = vision.integer("hidden_size")
            first = PoolerBody(pooling=TowerPooling.FIRST, size=size)
            with table.block("vision_model.pooler", body=first):
                pass
        declare_text(table, "text_model", text)
        _contrast(table, reader, text.integer("hidden_size"), vision.integer("hidden_size"))

    return _two_towers(reader, request, declare, text)


_ANY_TEXT: dict[str, DeclareTower] = {
    "bert": bert_text,
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), roberta_text),
    "clip_text_model": clip_text,
}
_ANY_VISION: dict[str, DeclareTower] = {
    "clip": clip_vision,
    "clip_vision_model": clip_vision,
    "siglip_vision_model": siglip_vision,
    **dict.fromkeys(VIT_TOWERS, vit_model),
}


def _text_tower(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """CLIP's text tower by itself, or with its projection."""
    size = reader.integer("hidden_size")

    def declare(table: ParameterTable, ending: str) -> None:
        clip_text(table, "text_model", reader)
        if ending == WITH_PROJECTION:
            width = reader.integer("projection_dim")
            body = LinearBody(module="text_projection", inputs=size, outputs=width, bias=False)
            with table.block("head", body=body):
                table.linear("text_projection", size, width, bias=False)

    return _two_towers(reader, request, declare, reader, WITH_PROJECTION)


def _vision_tower(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """CLIP's or SigLIP's vision tower by itself, or with its projection."""
    size = reader.integer("hidden_size")
    declare_tower = _VISION_TOWERS[request.model_type]

    def declare(table: ParameterTable, ending: str) -> None:
        declare_tower(table, "vision_model", reader)
        if ending == WITH_PROJECTION:
            width = reader.integer("projection_dim")
            body = LinearBody(module="visual_projection", inputs=size, outputs=width, bias=False)
            with table.block("head", body=body):
                table.linear("visual_projection", size, width, bias=False)

    clip = declare_tower is clip_vision
    return whole_model(
        reader, request, (BARE, WITH_PROJECTION) if clip else (BARE,), declare,
        hidden_size=size, context_length=_num_patches(reader),
    )  # fmt: skip


def _num_patches(reader: ConfigReader) -> int:
    return reader.optional_integer("num_patches") or patches_across(reader) ** 2


_VISION_TOWERS: dict[str, DeclareTower] = {
    "clip_vision_model": clip_vision,
    "siglip_vision_model": siglip_vision,
    "siglip2_vision_model": _siglip2_vision,
}
_READERS: dict[str, Callable[[ConfigReader, ReadRequest], ModelSpec]] = {
    "clip": _clip,
    "chinese_clip": _clip,
    "altclip": _clip,
    "siglip": _siglip,
    "siglip2": _siglip,
    "owlv2": _owlv2,
    "align": _align,
    "vision-text-dual-encoder": _dual_encoder,
    "clip_text_model": _text_tower,
    "clip_vision_model": _vision_tower,
    "siglip_vision_model": _vision_tower,
    "siglip2_vision_model": _vision_tower,
}
