"""Models that draw as well: a VQGAN or its code book."""

from memplan.families.multimodal_spec import Whole
from memplan.families.projectors.towers import VISION, declare_tower, width_of
from memplan.families.towers.vqgan import code_book, vqgan
from memplan.model.parameters import ParameterTable


def janus(table: ParameterTable, whole: Whole) -> None:
    """A tower to see with, a VQGAN to draw with, and perceptrons to and from the text model."""
    vision, drawn = whole.part(VISION), whole.part("vq_config")
    declare_tower(table, vision)
    with table.block("projector"):
        width, outputs = width_of(vision), vision.reader.integer("projection_dim")
        _deep_perceptron(table, "aligner", width, outputs, vision.reader.integer("depth"))
    vqgan(table, "vqgan", drawn.reader)
    words, width = drawn.reader.integer("num_embeddings"), drawn.reader.integer("embed_dim")
    outputs = drawn.reader.integer("projection_dim")
    with table.block("vqgan.drawing"):
        table.embedding("generation_embeddings", words, width)
        depth = drawn.reader.integer("num_hidden_layers")
        _deep_perceptron(table, "generation_aligner", width, outputs, depth)
        inputs = drawn.reader.integer("image_token_embed_dim")
        table.linear("generation_head.proj_out", inputs, outputs)
        table.linear("generation_head.vision_head", outputs, words)


def _deep_perceptron(
    table: ParameterTable, name: str, inputs: int, outputs: int, depth: int
) -> None:
    table.linear(f"{name}.fc1", inputs, outputs)
    for number in range(1, depth):
        table.linear(f"{name}.hidden_layers.{number}", outputs, outputs)


def glm_image(table: ParameterTable, whole: Whole) -> None:
    """GLM's tower and a code book of image words."""
    drawn = whole.part("vq_config")
    declare_tower(table, whole.part(VISION))
    latent, width = drawn.reader.integer("latent_channels"), drawn.reader.integer("embed_dim")
    with table.block("vqgan.code_book"):
        code_book(table, drawn.reader)
        table.convolution("quant_conv", latent, width, 1, 1)
        table.convolution("post_quant_conv", width, latent, 1, 1)
