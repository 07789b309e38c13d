"""Towers behind which little stands: a matrix, a perceptron, or nothing."""

from dataclasses import replace

from memplan.families.multimodal_spec import Whole
from memplan.families.projectors.towers import (
    AUDIO,
    VISION,
    declare_tower,
)
from memplan.families.towers.networks.davit import stage_widths
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody
from memplan.model.towers.gridded.davit import PlacedMeanBody
from memplan.model.towers.parts import LinearBody, NormBody, SpareBody


def llama4(table: ParameterTable, whole: Whole) -> None:
    """Llama 4's tower and one matrix."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    inputs, outputs = vision.reader.integer("vision_output_dim"), whole.text.hidden_size
    body = LinearBody(module="projector.linear_1", inputs=inputs, outputs=outputs, bias=False)
    with table.block("projector", body=body):
        table.linear("projector.linear_1", inputs, outputs, bias=False)


def mllama(table: ParameterTable, whole: Whole) -> None:
    """Llama 3.2's tower and one linear layer."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    inputs, outputs = vision.reader.integer("vision_output_dim"), whole.text.hidden_size
    body = LinearBody(module="projector", inputs=inputs, outputs=outputs)
    with table.block("projector", body=body):
        table.linear("projector", inputs, outputs)


def gemma4(table: ParameterTable, whole: Whole) -> None:
    """Towers for images and for sound, either of which a size of the family may lack."""
    for key, name in ((VISION, "vision_tower"), (AUDIO, "audio_tower")):
        if not whole.has(key):
            continue
        part, own = whole.part(key), ParameterTable()
        declare_tower(own, part, name)
        width = part.reader.integer("output_proj_dims", "hidden_size")
        outputs = whole.text.hidden_size
        plain = NormSpec(kind=NormKind.RMS_POWER, weight=False)
        body = ChainBody(
            parts=(
                NormBody(module="embedding_pre_projection_norm", size=width, norm=plain),
                LinearBody(
                    module="embedding_projection", inputs=width, outputs=outputs, bias=False
                ),
            )
        )
        with own.block(f"{name}_projector", body=body):
            own.linear("embedding_projection", width, outputs, bias=False)
        # A sample has pictures, no sound.
        heard = key == AUDIO
        idle = (replace(block, body=SpareBody()) for block in own.blocks())
        table.add(*(idle if heard else own.blocks()))


def florence2(table: ParameterTable, whole: Whole) -> None:
    """DaViT, a matrix and a norm, rows and columns as positions."""
    vision = whole.part(VISION)
    declare_tower(table, vision)
    reader = vision.reader
    width, outputs = stage_widths(reader)[-1], reader.integer("projection_dim")
    rows = reader.integer("max_position_embeddings")
    frames = reader.integer("max_temporal_embeddings")
    body = PlacedMeanBody(size=width, outputs=outputs, frames=frames)
    with table.block("projector", body=body):
        table.linear("image_projection", width, outputs, bias=False)
        table.norm("image_proj_norm", outputs)
        table.embedding("row_embeddings", rows, width // 2)
        table.embedding("column_embeddings", rows, width - width // 2)
