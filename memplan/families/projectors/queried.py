"""Queries that attend to a tower's tokens: Q-Formers and their like."""

from dataclasses import replace

from memplan.families.multimodal_spec import Whole
from memplan.families.nesting import same_class
from memplan.families.projectors.towers import (
    VISION,
    declare_features,
    declare_tower,
    feature_layer,
    width_of,
    with_pictures,
)
from memplan.families.towers.blocks import perceptron
from memplan.families.towers.layers import in_place_attention, tower_activation
from memplan.families.towers.parts import attention
from memplan.families.towers.qformer import qformer
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.queried import (
    InstructionBody,
    MaskedQueriesBody,
    QueriesOnlyBody,
    QueryLayerBody,
)
from memplan.model.towers.parts import LinearBody
from memplan.model.towers.patches import PatchesBody, Positions


def aria(table: ParameterTable, whole: Whole) -> None:
    """SigLIP, then queries that attend to the patches, and a perceptron."""
    vision = whole.part(VISION, "idefics3_vision")
    own, layer = ParameterTable(), feature_layer(whole.reader)
    declare_features(own, vision, layer=-1 if layer is None else layer)
    placed = with_pictures(own.blocks(), positions=Positions.EACH)
    for block in placed:
        body = block.body
        if isinstance(body, PatchesBody):
            body = replace(body, casts_pictures=False)
        table.add(replace(block, body=body))
    width, outputs = width_of(vision), whole.text.hidden_size
    counts = _aria_counts(whole.reader)
    queries = MaskedQueriesBody(
        size=width, outputs=outputs, num_heads=vision.reader.integer("num_attention_heads"),
        counts=tuple(counts.items()), query="projector.query", module="cross_attn",
        norm="projector.layer_norm", network="projector", activation=Activation.GELU_NEW,
    )  # fmt: skip
    with table.block("projector", body=queries if layer is not None else None):
        table.parameter("projector", "query", max(counts.values()), width)
        for projection in ("q_proj", "k_proj", "v_proj"):
            table.linear(f"cross_attn.{projection}", width, width, bias=False)
        in_place_attention(table, "cross_attn.multihead_attn", width)
        table.linear("cross_attn.linear", width, width)
        for place in ("cross_attn.layer_norm", "cross_attn.layer_norm_kv", "projector.layer_norm"):
            table.norm(place, width)
        perceptron(table, "projector", width, outputs, outputs, bias=False)


def _aria_counts(reader: ConfigReader) -> dict[int, int]:
    """How many queries read so many patches."""
    found = reader.mapping("projector_patch_to_query_dict")
    if not found:
        return dict(ARIA_COUNTS)
    counts = {
        int(patches): queries
        for patches, queries in found.items()
        if patches.isdecimal() and isinstance(queries, int) and queries > 0
    }
    if len(counts) < len(found):
        error = reader.fail("projector_patch_to_query_dict", "expected whole numbers above 0")
        raise error
    return counts


ARIA_COUNTS = {1225: 128, 4900: 256}
"""Where a file does not say (``AriaConfig``)."""


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
