"""What ends the towers of Qwen-VL and its kin: neighbouring patches joined, and the text's width.

Each function declares one class's merger in the block that is open, and says what it computes
(``modeling_*.py`` of each type, transformers 5.23).
"""

from memplan.families.towers.blocks import perceptron
from memplan.families.towers.layers import tower_activation
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.norms import NormSpec
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.projecting import DeepMergersBody
from memplan.model.towers.gridded.nets import DownsamplingBody
from memplan.model.towers.parts import (
    LAYER_NORM,
    RMS_NORM,
    ActivationBody,
    GatedBody,
    LinearBody,
    NormBody,
)
from memplan.model.towers.patches import ReorderedBody

GELU = ActivationBody(activation=Activation.GELU)


def merged_width(reader: ConfigReader, width: int) -> int:
    """Width of neighbouring patches that are joined."""
    return width * reader.integer("spatial_merge_size") ** 2


def qwen2_merger(table: ParameterTable, reader: ConfigReader) -> ChainBody:
    """Qwen2-VL's: a layer norm and a perceptron."""
    width = reader.integer("embed_dim")
    outputs = reader.integer("hidden_size")
    return ChainBody(parts=_perceptron(table, reader, width, outputs, LAYER_NORM))


def qwen2_5_merger(table: ParameterTable, reader: ConfigReader) -> ChainBody:
    """Qwen2.5-VL's: an RMS norm, and rows put back from the order of windows."""
    width, outputs = reader.integer("hidden_size"), reader.integer("out_hidden_size")
    parts = _perceptron(table, reader, width, outputs, RMS_NORM)
    return ChainBody(parts=(*parts, ReorderedBody(size=outputs)))


def _perceptron(
    table: ParameterTable, reader: ConfigReader, width: int, outputs: int, norm: NormSpec
) -> tuple[TowerBody, ...]:
    table.norm("merger.ln_q", width, bias=norm.bias)
    merged = merged_width(reader, width)
    perceptron(table, "merger.mlp", merged, merged, outputs)
    return (
        NormBody(module="merger.ln_q", size=width, norm=norm),
        LinearBody(module="merger.mlp.fc1", inputs=merged, outputs=merged),
        GELU,
        LinearBody(module="merger.mlp.fc2", inputs=merged, outputs=outputs),
    )


def qwen3_merger(table: ParameterTable, reader: ConfigReader) -> ChainBody:
    """One merger behind the last layer, and one for each layer that is fed into the text model.

    The latter norm joined patches, the former single ones (``use_postshuffle_norm``).
    """
    width = reader.integer("hidden_size")
    merged = merged_width(reader, width)
    outputs = reader.integer("out_hidden_size")
    table.norm("merger.norm", width)
    perceptron(table, "merger", merged, merged, outputs)
    parts: tuple[TowerBody, ...] = (
        NormBody(module="merger.norm", size=width),
        LinearBody(module="merger.fc1", inputs=merged, outputs=merged),
        GELU,
        LinearBody(module="merger.fc2", inputs=merged, outputs=outputs),
    )
    if DEEP_LAYERS not in reader.defaults:
        return ChainBody(parts=parts)
    modules = []
    depth = reader.integer("depth")
    for number, layer in enumerate(reader.integers(DEEP_LAYERS)):
        module = f"deepstack_merger_list.{number}"
        if layer < depth:  # else there is no such layer, and what would merge it stands idle
            modules.append(module)
        table.norm(f"{module}.norm", merged)
        perceptron(table, module, merged, merged, outputs)
    deep = DeepMergersBody(modules=tuple(modules), merged=merged, outputs=outputs)
    return ChainBody(parts=(deep, *parts))


DEEP_LAYERS = "deepstack_visual_indexes"
"""Only classes that have a default for it read it: Qwen3.5's files hold an unused list."""


def glm_merger(table: ParameterTable, reader: ConfigReader) -> ChainBody:
    """GLM-4.1V's."""
    return _downsampled(table, reader, inner_size=reader.integer("intermediate_size"))


def glm_ocr_merger(table: ParameterTable, reader: ConfigReader) -> ChainBody:
    """GLM-OCR's, whose network is wider."""
    inner_size = reader.integer("out_hidden_size") * reader.integer("in_channels")
    return _downsampled(table, reader, inner_size=inner_size)


def _downsampled(table: ParameterTable, reader: ConfigReader, *, inner_size: int) -> ChainBody:
    """A norm, a convolution over neighbouring patches, a linear layer, a norm, a gated network."""
    width, outputs = reader.integer("hidden_size"), reader.integer("out_hidden_size")
    side = reader.integer("spatial_merge_size")
    table.norm("post_layernorm", width, bias=False)
    table.convolution("downsample", width, outputs, side, side)
    table.linear("merger.proj", outputs, outputs, bias=False)
    table.norm("merger.post_projection_norm", outputs)
    perceptron(table, "merger", outputs, inner_size, gated=True, bias=False)
    gated = GatedBody(
        module="merger", inputs=outputs, inner=inner_size, outputs=outputs, bias=False,
        activation=tower_activation(reader, "hidden_act", default="silu"),
    )  # fmt: skip
    return ChainBody(
        parts=(
            NormBody(module="post_layernorm", size=width, norm=RMS_NORM),
            DownsamplingBody(module="downsample", size=width, side=side),
            LinearBody(module="merger.proj", inputs=outputs, outputs=outputs, bias=False),
            NormBody(module="merger.post_projection_norm", size=outputs),
            GELU,
            gated,
        )
    )
