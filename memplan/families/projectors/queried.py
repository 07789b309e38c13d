"""Queries that attend to a tower's tokens: Q-Formers and their like."""

from memplan.families.multimodal_spec import Whole
from memplan.families.nesting import same_class
from memplan.families.projectors.towers import VISION, declare_tower, width_of
from memplan.families.towers.blocks import perceptron
from memplan.families.towers.layers import in_place_attention
from memplan.families.towers.parts import attention
from memplan.families.towers.qformer import qformer
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable


def aria(table: ParameterTable, whole: Whole) -> None:
    """SigLIP, then queries that attend to the patches, and a perceptron."""
    vision = whole.part(VISION, "idefics3_vision")
    declare_tower(table, vision)
    width, outputs = width_of(vision), whole.text.hidden_size
    with table.block("projector"):
        table.parameter("projector", "query", _aria_queries(whole.reader), width)
        for projection in ("q_proj", "k_proj", "v_proj"):
            table.linear(f"cross_attn.{projection}", width, width, bias=False)
        in_place_attention(table, "cross_attn.multihead_attn", width)
        table.linear("cross_attn.linear", width, width)
        for place in ("cross_attn.layer_norm", "cross_attn.layer_norm_kv", "projector.layer_norm"):
            table.norm(place, width)
        perceptron(table, "projector", width, outputs, outputs, bias=False)


def _aria_queries(reader: ConfigReader) -> int:
    """The most queries that any number of patches is given."""
    found = reader.mapping("projector_patch_to_query_dict")
    if not found:
        return 256
    counts = [each for each in found.values() if isinstance(each, int) and each > 0]
    if len(counts) < len(found):
        error = reader.fail("projector_patch_to_query_dict", "expected whole numbers above 0")
        raise error
    return max(counts)


def instructblip(table: ParameterTable, whole: Whole) -> None:
    """EVA's tower, a Q-Former that reads text too, and a linear layer."""
    _blip(table, whole, reads_text=True)


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
