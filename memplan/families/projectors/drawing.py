"""Models that draw as well: a VQGAN or its code book."""

from dataclasses import replace

from memplan.families.multimodal_spec import Whole
from memplan.families.projectors.towers import VISION, declare_tower
from memplan.families.towers.vqgan import code_book
from memplan.model.parameters import ParameterTable
from memplan.model.towers.parts import SpareBody


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
