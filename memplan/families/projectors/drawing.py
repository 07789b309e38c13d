"""Models that draw as well: a VQGAN or its code book."""

from dataclasses import replace

from memplan.families.multimodal_spec import Whole
from memplan.families.projectors.towers import VISION, declare_tower, width_of
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.vqgan import code_book, vqgan
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.parts import ActivationBody, LinearBody, SpareBody


def janus(table: ParameterTable, whole: Whole) -> None:
    """A tower to see with, a VQGAN to draw with, and perceptrons to and from the text model."""
    vision, drawn = whole.part(VISION), whole.part("vq_config")
    declare_tower(table, vision)
    width, outputs = width_of(vision), vision.reader.integer("projection_dim")
    depth, active = vision.reader.integer("depth"), tower_activation(vision.reader, "hidden_act")
    body = ChainBody(parts=_deep_parts("aligner", width, outputs, depth, active))
    with table.block("projector", body=body):
        _deep_perceptron(table, "aligner", width, outputs, depth)
    own = ParameterTable()
    _drawing(own, drawn.reader)
    # A picture that is shown is not drawn.
    table.add(*(replace(block, body=SpareBody()) for block in own.blocks()))


def _drawing(table: ParameterTable, reader: ConfigReader) -> None:
    """A VQGAN, and perceptrons between its words and the text model."""
    vqgan(table, "vqgan", reader)
    words, width = reader.integer("num_embeddings"), reader.integer("embed_dim")
    outputs = reader.integer("projection_dim")
    with table.block("vqgan.drawing"):
        table.embedding("generation_embeddings", words, width)
        depth = reader.integer("num_hidden_layers")
        _deep_perceptron(table, "generation_aligner", width, outputs, depth)
        inputs = reader.integer("image_token_embed_dim")
        table.linear("generation_head.proj_out", inputs, outputs)
        table.linear("generation_head.vision_head", outputs, words)


def _deep_parts(
    name: str, inputs: int, outputs: int, depth: int, active: Activation
) -> tuple[TowerBody, ...]:
    """What ``_deep_perceptron`` declares, as it runs."""
    parts: list[TowerBody] = [LinearBody(module=f"{name}.fc1", inputs=inputs, outputs=outputs)]
    for number in range(1, depth):
        module = f"{name}.hidden_layers.{number}"
        parts.append(ActivationBody(activation=active))
        parts.append(LinearBody(module=module, inputs=outputs, outputs=outputs))
    return tuple(parts)


def _deep_perceptron(
    table: ParameterTable, name: str, inputs: int, outputs: int, depth: int
) -> None:
    table.linear(f"{name}.fc1", inputs, outputs)
    for number in range(1, depth):
        table.linear(f"{name}.hidden_layers.{number}", outputs, outputs)


def glm_image(table: ParameterTable, whole: Whole) -> None:
    """GLM's tower and a code book of image words, both idle where no picture is to be changed."""
    drawn, own = whole.part("vq_config"), ParameterTable()
    declare_tower(own, whole.part(VISION))
    latent, width = drawn.reader.integer("latent_channels"), drawn.reader.integer("embed_dim")
    with own.block("vqgan.code_book"):
        code_book(own, drawn.reader)
        own.convolution("quant_conv", latent, width, 1, 1)
        own.convolution("post_quant_conv", width, latent, 1, 1)
    table.add(*(replace(block, body=SpareBody()) for block in own.blocks()))
