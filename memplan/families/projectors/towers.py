"""Which towers are known, and what of them a projector reads."""

from dataclasses import replace

from memplan.families.nesting import Part, unknown_part
from memplan.families.towers.clip import siglip_vision
from memplan.families.towers.images import (
    blip_vision,
    gemma4_vision,
    kosmos_vision,
    llama4_vision,
    mllama_vision,
    step_vision,
)
from memplan.families.towers.networks.davit import davit
from memplan.families.towers.sam import got_vision, sam_vision
from memplan.families.towers.sounds.sound import (
    averaged_encoder,
    cast_encoder,
    gemma4_sound,
    glm_encoder,
    granite_encoder,
)
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import TowerBody
from memplan.model.towers.compared.pooling import AttentionPoolerBody, PoolerBody
from memplan.model.towers.parts import ActivationBody, LinearBody, SpareBody

VISION, TEXT, AUDIO = "vision_config", "text_config", "audio_config"


TOWERS = {
    "siglip_vision_model": siglip_vision,
    "instructblip_vision_model": blip_vision,
    "instructblipvideo_vision_model": blip_vision,
    "blip_2_vision_model": blip_vision,
    "kosmos_2_5_vision_model": kosmos_vision,
    "llama4_vision_model": llama4_vision,
    "mllama_vision_model": mllama_vision,
    "step3p5_vision": step_vision,
    "gemma4_vision": gemma4_vision,
    "florence_vision": davit,
    "sam_vision_model": sam_vision,
    "got_ocr2_vision": got_vision,
    "gemma4_audio": gemma4_sound,
    "qwen2_audio_encoder": averaged_encoder,
    "voxtral_encoder": cast_encoder,
    "glmasr_encoder": glm_encoder,
    "granite_speech_encoder": granite_encoder,
    "granite_speech_plus_encoder": granite_encoder,
}
"""Towers by the ``model_type`` of their config."""


def declare_tower(table: ParameterTable, part: Part, name: str = "vision_tower") -> None:
    """Declare a tower of any kind that is known here.

    Raises ``ConfigError`` for another.
    """
    declare = TOWERS.get(part.model_type)
    if declare is None:
        raise unknown_part(part, TOWERS)
    declare(table, name, part.reader)


def declare_normed(table: ParameterTable, part: Part, name: str = "vision_tower") -> None:
    """Declare a tower of which all tokens are read behind its last norm, and no pooling head."""
    own = ParameterTable()
    declare_tower(own, part, name)
    for block in own.blocks():
        pools = isinstance(block.body, PoolerBody | AttentionPoolerBody)
        table.add(replace(block, body=SpareBody()) if pools else block)


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
