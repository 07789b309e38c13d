"""Queries that attend to a tower's tokens: Q-Formers and their like."""

from dataclasses import replace

from memplan.families.multimodal_spec import Whole
from memplan.families.nesting import same_class
from memplan.families.projectors.towers import (
    VISION,
    declare_tower,
    width_of,
)
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.parts import attention
from memplan.families.towers.qformer import qformer
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.queried import (
    InstructionBody,
    QueriesOnlyBody,
    QueryLayerBody,
)
from memplan.model.towers.parts import LinearBody


def instructblip(table: ParameterTable, whole: Whole) -> None:
    """EVA's tower, a Q-Former that reads text too, and a linear layer."""
    own = ParameterTable()
    _blip(own, whole, reads_text=True)
    former, vision = whole.part("qformer_config", "blip_2_qformer").reader, whole.part(VISION)
    rows, size = whole.reader.integer("num_query_tokens"), former.integer("hidden_size")
    body = QueryLayerBody(
        size=size, inner_size=former.integer("intermediate_size"), num_queries=rows,
        num_heads=former.integer("num_attention_heads"), source=0, memory="vision_tower",
        activation=tower_activation(former, "hidden_act"),
        dropout=former.number("hidden_dropout_prob", default=0.1),
        attention_dropout=former.number("attention_probs_dropout_prob", default=0.1),
    )  # fmt: skip
    reading = replace(body, source=width_of(vision))
    linear = LinearBody(module="language_projection", inputs=size, outputs=whole.text.hidden_size)
    bodies: dict[str, TowerBody] = {
        "qformer.embed": InstructionBody(
            queries="model.query_tokens", size=size, num_queries=rows, dropout=body.dropout,
            num_positions=former.integer("max_position_embeddings"),
        ),
        "projector": ChainBody(parts=(QueriesOnlyBody(size=size, num_queries=rows), linear)),
    }  # fmt: skip
    blocks = {block.name: block for block in own.blocks()}
    asked, begun = blocks.pop("qformer.queries"), blocks["qformer.embed"]
    blocks["qformer.embed"] = replace(begun, parameters=(*asked.parameters, *begun.parameters))
    layers = [
        replace(blocks["qformer.reading_layers"], count=1, body=reading)
        if number % former.integer("cross_attention_frequency") == 0
        else replace(blocks["qformer.layers"], count=1, body=body)
        for number in range(former.layers("num_hidden_layers"))
    ]
    for name, block in blocks.items():
        if name == "qformer.reading_layers":
            table.add(*layers)
        elif name != "qformer.layers":
            table.add(replace(block, body=bodies.get(name, block.body)))


def blip2(table: ParameterTable, whole: Whole) -> None:
    """The same with a Q-Former that reads only images."""
    _blip(table, whole, reads_text=False)


def _blip(table: ParameterTable, whole: Whole, *, reads_text: bool) -> None:
    former = whole.part("qformer_config", "blip_2_qformer")
    size = width_of(former)
    vision = whole.part(VISION)
    declare_tower(table, vision)
    with table.block("qformer.queries"):
        rows = whole.reader.integer("num_query_tokens")
        table.parameter("model", "query_tokens", 1, rows, size)
    source = {**former.reader.config, "encoder_hidden_size": width_of(vision)}
    reader = same_class(former.reader, source)
    qformer(table, "qformer", reader, embeds_text=reads_text, reads_text=reads_text)
    with table.block("projector"):
        table.linear("language_projection", size, whole.text.hidden_size)


def kosmos(table: ParameterTable, whole: Whole) -> None:
    """Pix2Struct's tower, and queries that attend to its patches."""
    vision, size = whole.part(VISION), whole.text.hidden_size
    declare_tower(table, vision)
    with table.block("projector"):
        table.linear("projection.dense", width_of(vision), size)
        rows = whole.reader.integer("latent_query_num")
        table.parameter("projection", "latent_query", rows, size)
        attention(table, "projection.x_attn", size)
