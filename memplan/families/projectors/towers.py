"""Which towers are known, and what of them a projector reads."""

from dataclasses import replace

from memplan.families.nesting import Part, same_class, unknown_part
from memplan.families.towers.clip import clip_vision, siglip2_vision, siglip_vision
from memplan.families.towers.images import (
    blip_vision,
    gemma4_vision,
    internvl_vision,
    janus_vision,
    kimi_vision,
    kosmos_vision,
    llama4_vision,
    mllama_vision,
    muse_vision,
    ovis2_vision,
    paddle_vision,
    pixtral_vision,
    step_vision,
    unplaced_vision,
)
from memplan.families.towers.networks.davit import davit
from memplan.families.towers.patch_vits import PATCH_VITS, declare_patch_vit
from memplan.families.towers.sam import got_vision, sam_vision
from memplan.families.towers.sounds.sound import (
    averaged_encoder,
    cast_encoder,
    gemma4_sound,
    glm_encoder,
    granite_encoder,
    omni_encoder,
)
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart, ParameterBlock, ParameterTable
from memplan.model.towers.body import TowerBody
from memplan.model.towers.compared.pooling import AttentionPoolerBody, PoolerBody
from memplan.model.towers.parts import ActivationBody, LinearBody, SpareBody
from memplan.model.towers.patches import PatchesBody, Positions

VISION, TEXT, AUDIO = "vision_config", "text_config", "audio_config"


TOWERS = {
    "clip_vision_model": clip_vision,
    "siglip_vision_model": siglip_vision,
    "siglip2_vision_model": siglip2_vision,
    "pixtral": pixtral_vision,
    "internvl_vision": internvl_vision,
    "kimi_k25_vision": kimi_vision,
    "muse_glimmer_vision": muse_vision,
    "video_llama_3_vision": unplaced_vision,
    "paddleocr_vl_vision": paddle_vision,
    "ovis2_vision": ovis2_vision,
    "instructblip_vision_model": blip_vision,
    "instructblipvideo_vision_model": blip_vision,
    "blip_2_vision_model": blip_vision,
    "janus_vision_model": janus_vision,
    "kosmos_2_5_vision_model": kosmos_vision,
    "llama4_vision_model": llama4_vision,
    "mllama_vision_model": mllama_vision,
    "step3p5_vision": step_vision,
    "gemma4_vision": gemma4_vision,
    "florence_vision": davit,
    "sam_vision_model": sam_vision,
    "got_ocr2_vision": got_vision,
    "gemma4_audio": gemma4_sound,
    "qwen2_5_omni_audio_encoder": omni_encoder,
    "qwen2_audio_encoder": averaged_encoder,
    "voxtral_encoder": cast_encoder,
    "glmasr_encoder": glm_encoder,
    "granite_speech_encoder": granite_encoder,
    "granite_speech_plus_encoder": granite_encoder,
}
"""Towers by the ``model_type`` of their config; those of ``PATCH_VITS`` beside them."""


PLAIN_SIGLIP = frozenset({"idefics3_vision", "smolvlm_vision"})
"""Towers that are SigLIP's without the pooling head."""


def declare_tower(table: ParameterTable, part: Part, name: str = "vision_tower") -> None:
    """Declare a tower of any kind that is known here.

    Raises ``ConfigError`` for another.
    """
    if part.model_type in PATCH_VITS:
        declare_patch_vit(table, name, part.reader, part.model_type)
        return
    if part.model_type in PLAIN_SIGLIP:
        siglip_vision(table, name, headless(part.reader))
        return
    declare = TOWERS.get(part.model_type)
    if declare is None:
        raise unknown_part(part, {**TOWERS, **PATCH_VITS})
    declare(table, name, part.reader)


def declare_features(
    table: ParameterTable, part: Part, *, layer: int = -1, name: str = "vision_tower"
) -> None:
    """Declare a tower of which what a layer gives is read, not what stands behind the layers.

    ``layer`` counts hidden states as transformers does: the first is the embedding, -1 the last.
    """
    own = ParameterTable()
    declare_tower(own, part, name)
    behind = False
    for block in own.blocks():
        if block.part is not ModelPart.LAYERS:
            table.add(replace(block, body=SpareBody()) if behind else block)
            continue
        behind = True
        count = block.count + layer + 1 if layer < 0 else layer
        if count <= 0 or count >= block.count:
            table.add(block)
            continue
        spare = replace(block, count=block.count - count, body=SpareBody(runs=True))
        table.add(replace(block, count=count), spare)


def declare_normed(table: ParameterTable, part: Part, name: str = "vision_tower") -> None:
    """Declare a tower of which all tokens are read behind its last norm, and no pooling head."""
    own = ParameterTable()
    declare_tower(own, part, name)
    for block in own.blocks():
        pools = isinstance(block.body, PoolerBody | AttentionPoolerBody)
        table.add(replace(block, body=SpareBody()) if pools else block)


def with_pictures(
    blocks: tuple[ParameterBlock, ...],
    *,
    crops: int = 1,
    picked: bool = False,
    positions: Positions | None = None,
) -> tuple[ParameterBlock, ...]:
    """The same tower for pictures that come in several crops, are picked out, or have other positions."""
    made = []
    for block in blocks:
        body = block.body
        if isinstance(body, PatchesBody):
            where = body.positions if positions is None else positions
            body = replace(body, crops=crops, picked=picked, positions=where)
        made.append(replace(block, body=body))
    return tuple(made)


def feature_layer(reader: ConfigReader) -> int | None:
    """The hidden states that are read; None where several are joined, or it is no number."""
    layer = reader.raw("vision_feature_layer")
    if isinstance(layer, list):
        return layer[0] if len(layer) == 1 and isinstance(layer[0], int) else None
    return layer if isinstance(layer, int) else -1


def headless(reader: ConfigReader) -> ConfigReader:
    """A SigLIP config whose tower's class has no pooling head, whatever it says."""
    return same_class(reader, {**reader.config, "vision_use_head": False})


def width_of(part: Part) -> int:
    """Hidden size of a tower."""
    return part.reader.integer("hidden_size")


def perceptron_bodies(
    name: str,
    inputs: int,
    inner: int,
    outputs: int,
    active: Activation,
    *,
    bias: bool = True,
) -> tuple[TowerBody, ...]:
    """What ``perceptron`` declares, as it runs."""
    return (
        LinearBody(module=f"{name}.fc1", inputs=inputs, outputs=inner, bias=bias),
        ActivationBody(activation=active),
        LinearBody(module=f"{name}.fc2", inputs=inner, outputs=outputs, bias=bias),
    )
