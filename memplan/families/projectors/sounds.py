"""Towers of sound."""

from memplan.families.multimodal_spec import Whole
from memplan.families.projectors.towers import (
    AUDIO,
    declare_tower,
    perceptron_bodies,
    width_of,
)
from memplan.families.towers.blocks import perceptron
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.qformer import qformer
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody
from memplan.model.towers.parts import LinearBody


def qwen2_audio(table: ParameterTable, whole: Whole) -> None:
    """Whisper's encoder and one linear layer."""
    audio = whole.part(AUDIO, "qwen2_audio_encoder")
    declare_tower(table, audio, "audio_tower")
    inputs, outputs = audio.reader.integer("d_model"), whole.text.hidden_size
    body = LinearBody(module="projector.linear", inputs=inputs, outputs=outputs)
    with table.block("projector", body=body):
        table.linear("projector.linear", inputs, outputs)


def voxtral(table: ParameterTable, whole: Whole) -> None:
    """Whisper's encoder and a perceptron over joined frames."""
    audio = whole.part(AUDIO, "voxtral_encoder")
    declare_tower(table, audio, "audio_tower")
    joined, outputs = audio.reader.integer("intermediate_size"), whole.text.hidden_size
    active = tower_activation(whole.reader, "projector_hidden_act")
    parts = perceptron_bodies("projector", joined, outputs, outputs, active, bias=False)
    with table.block("projector", body=ChainBody(parts=parts)):
        perceptron(table, "projector", joined, outputs, outputs, bias=False)


def glm_asr(table: ParameterTable, whole: Whole) -> None:
    """Whisper's encoder with rotary positions and a perceptron over joined frames."""
    audio = whole.part(AUDIO, "glmasr_encoder")
    declare_tower(table, audio, "audio_tower")
    joined, outputs = audio.reader.integer("intermediate_size"), whole.text.hidden_size
    active = tower_activation(whole.reader, "projector_hidden_act")
    parts = perceptron_bodies("projector", joined, 2 * outputs, outputs, active)
    with table.block("projector", body=ChainBody(parts=parts)):
        perceptron(table, "projector", joined, 2 * outputs, outputs)


def granite_speech(table: ParameterTable, whole: Whole) -> None:
    """A Conformer, a Q-Former over its windows, and a linear layer."""
    reader, former = whole.reader, whole.part("projector_config", "blip_2_qformer")
    declare_tower(table, whole.part("encoder_config"), "audio_tower")
    size = width_of(former)
    with table.block("qformer.queries"):
        count = reader.integer("window_size") // reader.integer("downsample_rate")
        table.parameter("projector", "query", 1, count, size)
    reads_text = former.reader.flag("use_qformer_text_input")
    qformer(table, "qformer", former.reader, reads_text=reads_text)
    with table.block("projector"):
        table.linear("projector.linear", size, whole.text.hidden_size)
