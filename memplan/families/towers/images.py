"""Vision transformers of one language model each: what stands around their layers.

Classes of transformers 5.23: ``PixtralVisionModel``, ``InternVLVisionModel``, ``JanusVisionModel``,
``Kimi_K25VisionModel``, ``MuseGlimmerVisionModel``, ``Llama4VisionModel``, ``MllamaVisionModel``,
``InstructBlipVisionModel``, ``Ovis2VisionModel``, ``Step3p7VisionModel``,
``Kosmos2_5VisionModel``, ``Gemma4VisionModel``, ``VideoLlama3VisionModel``,
``MiniCPMV4_6VisionModel``.
"""

from dataclasses import replace
from math import isqrt

from memplan.families.towers.blocks import (
    TowerLayer,
    declare_layer,
    declare_layers,
    layer_body,
)
from memplan.families.towers.clip import patches_across
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import pair, ratio
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.pooling import SquaresBody
from memplan.model.towers.compared.projecting import (
    CropBody,
    JoinedPatchesBody,
)
from memplan.model.towers.gridded.nets import ConvolutionBody
from memplan.model.towers.layers import Turning
from memplan.model.towers.parts import ActivationBody, LinearBody, NormBody
from memplan.model.towers.patches import Cut, PatchesBody, Positions
from memplan.model.towers.tiles import LayersJoinedBody, TilePlacesBody, TilesBody

COLOURS = 3
"""Channels, where the class writes them down."""


def _patches(table: ParameterTable, reader: ConfigReader, *, bias: bool = True) -> None:
    """A convolution that makes one vector of each square patch."""
    patch = pair(reader, "patch_size")
    channels = reader.integer("num_channels", default=COLOURS)
    size = reader.integer("hidden_size")
    table.convolution("patch_embedding", channels, size, *patch, bias=bias)


def _grid(reader: ConfigReader) -> int:
    """Patches of an image."""
    (height, width), (tall, wide) = pair(reader, "image_size"), pair(reader, "patch_size")
    count = (height // tall) * (width // wide)
    if not count:
        error = reader.fail("image_size", f"is smaller than patch_size ({tall} x {wide})")
        raise error
    return count


def plain_layer(reader: ConfigReader) -> TowerLayer:
    """A layer with a bias everywhere."""
    return TowerLayer(
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
    )


def _placed_patches(reader: ConfigReader) -> PatchesBody:
    """Square patches with rows of a table as positions."""
    return PatchesBody(
        size=reader.integer("hidden_size"), channels=reader.integer("num_channels", default=COLOURS),
        image=pair(reader, "image_size"), patch=pair(reader, "patch_size"),
        projection="patch_embedding", positions=Positions.TABLE,
        position_module="position_embedding",
    )  # fmt: skip


def llama4_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """Llama 4's: patches through a linear layer, and the perceptron behind the pixel shuffle."""
    size, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    height, width = pair(reader, "patch_size")
    patches = PatchesBody(
        size=size, channels=reader.integer("num_channels"), image=pair(reader, "image_size"),
        patch=(height, width), projection="patch_embedding.linear", cut=Cut.UNFOLDED, bias=False,
        tokens=("vision_model.class_embedding",), tokens_last=True, positions=Positions.PARAMETER,
        position_module="vision_model.positional_embedding_vlm", rotary_dim=size // heads,
        casts_pictures=False,
    )  # fmt: skip
    with table.block(f"{name}.embed", body=patches):
        table.parameter("vision_model", "class_embedding", size)
        table.parameter("vision_model", "positional_embedding_vlm", _grid(reader) + 1, size)
        features = reader.integer("num_channels") * height * width
        table.linear("patch_embedding.linear", features, size, bias=False)
    with table.block(f"{name}.norm", body=NormBody(module="layernorm_pre", size=size)):
        table.norm("layernorm_pre", size)
    body = replace(layer_body(plain_layer(reader), heads, Activation.GELU), turning=Turning.COMPLEX)
    declare_layers(
        table, f"{name}.layers", reader.layers("num_hidden_layers"), plain_layer(reader),
        heads=heads, activation=Activation.GELU, body=body,
    )  # fmt: skip
    inner_size, inputs = reader.integer("intermediate_size"), reader.integer("projector_input_dim")
    outputs = reader.integer("projector_output_dim")
    side = max(1, round(1 / (ratio(reader, "pixel_shuffle_ratio", default=0.5) or 1)))
    gelu = ActivationBody(activation=Activation.GELU)
    parts: tuple[TowerBody, ...] = (
        NormBody(module="layernorm_post", size=size),
        CropBody(size=size, last=True),
        JoinedPatchesBody(size=size, side=side, copies=2),
        LinearBody(module="adapter.fc1", inputs=inner_size, outputs=inputs, bias=False),
        gelu,
        LinearBody(module="adapter.fc2", inputs=outputs, outputs=outputs, bias=False),
        gelu,
    )
    with table.block(f"{name}.adapter", body=ChainBody(parts=parts)):
        table.norm("layernorm_post", size)
        table.linear("adapter.fc1", inner_size, inputs, bias=False)
        table.linear("adapter.fc2", outputs, outputs, bias=False)


def mllama_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """Llama 3.2's: tiles of an image, with a table of positions for each shape they can make."""
    size, tiles = reader.integer("hidden_size"), reader.integer("max_num_tiles")
    shapes = len(reader.sequence("supported_aspect_ratios")) or _num_shapes(tiles)
    positions = _grid(reader) + 1
    heads = reader.integer("attention_heads")
    body = TilesBody(
        size=size, channels=reader.integer("num_channels", default=COLOURS),
        image=pair(reader, "image_size"), patch=pair(reader, "patch_size"), crops=tiles,
    )  # fmt: skip
    with table.block(f"{name}.embed", body=body):
        table.parameter("vision_model", "class_embedding", size)
        _patches(table, reader, bias=False)
        table.parameter("gated_positional_embedding", "gate", 1)
        table.parameter("gated_positional_embedding", "embedding", positions, size)
        table.embedding("tile_embedding", shapes + 1, tiles * positions * size)
        _tile_places(table, "pre", shapes, tiles * size)
        table.norm("layernorm_pre", size)
    layer = TowerLayer(
        hidden_size=size,
        intermediate_size=reader.integer("intermediate_size"),
        attention_bias=False,
    )
    made = layer_body(layer, heads, tower_activation(reader, "hidden_act"))
    made = replace(made, masked=True, recomputed=False)
    with table.block(f"{name}.layers", count=reader.layers("num_hidden_layers"), body=made):
        declare_layer(table, layer)
    between = ChainBody(
        parts=(
            NormBody(module="layernorm_post", size=size),
            TilePlacesBody(module=_tile_module("post")),
        )
    )
    with table.block(f"{name}.global_embed", body=between):
        table.norm("layernorm_post", size)
        _tile_places(table, "post", shapes, tiles * size)
    gates = ("gate_attn", "gate_ffn")
    first, second = (f"global_transformer.layer.{gate}" for gate in gates)
    names = replace(made.names, first_scale=first, second_scale=second)
    gated = replace(made, gated=True, names=names)
    count = reader.layers("num_global_layers")
    with table.block(f"{name}.global_layers", count=count, body=gated):
        declare_layer(table, layer)
        for gate in gates:
            table.parameter("global_transformer.layer", gate, 1)
    chosen = tuple(reader.integers("intermediate_layers_indices"))
    depth = reader.layers("num_hidden_layers")
    for number in chosen:
        if not -depth <= number < depth:
            error = reader.fail(
                "intermediate_layers_indices", f"{number}: there are {depth} layers"
            )
            raise error
    with table.block(f"{name}.states", body=LayersJoinedBody(size=size, layers=chosen)):
        pass


def _tile_module(place: str) -> str:
    return f"{place}_tile_positional_embedding"


def _tile_places(table: ParameterTable, place: str, shapes: int, width: int) -> None:
    """A gate, and a row for each shape that tiles make."""
    table.parameter(_tile_module(place), "gate", 1)
    table.embedding(f"{_tile_module(place)}.embedding", shapes + 1, width)


def _num_shapes(tiles: int) -> int:
    """Ways to lay at most so many tiles out in rows and columns.

    >>> _num_shapes(4)
    8
    """
    return sum(1 for rows in range(1, tiles + 1) for _ in range(1, tiles // rows + 1))


def blip_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """InstructBLIP's: a class token, queries, keys and values in one linear layer."""
    size, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    reader.divide("hidden_size", size, "num_attention_heads", heads)
    patches = replace(
        _placed_patches(reader), tokens=("embeddings.class_embedding",),
        positions=Positions.PARAMETER, position_module="embeddings.position_embedding",
        resized=True,
    )  # fmt: skip
    with table.block(f"{name}.embed", body=patches):
        table.parameter("embeddings", "class_embedding", 1, 1, size)
        table.parameter("embeddings", "position_embedding", 1, _grid(reader) + 1, size)
        _patches(table, reader)
    layer = TowerLayer(
        hidden_size=size,
        intermediate_size=reader.integer("intermediate_size"),
        fused=True,
        attention_bias=reader.flag("qkv_bias"),
        output_bias=True,
    )
    active, count = tower_activation(reader, "hidden_act"), reader.layers("num_hidden_layers")
    body = layer_body(layer, heads, active)
    attention = replace(
        body.attention, fp32_softmax=False, dropout=reader.number("attention_dropout", default=0.0)
    )
    body = replace(body, attention=attention, selected=True)
    with table.block(f"{name}.layers", count=count, body=body):
        declare_layer(table, layer)
    with table.block(f"{name}.norm", body=NormBody(module="post_layernorm", size=size)):
        table.norm("post_layernorm", size)


def step_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """Step 3.7's: scaled residuals, and two convolutions that halve the sides."""
    size, heads = (
        reader.integer("width", "hidden_size"),
        reader.integer("heads", "num_attention_heads"),
    )
    patch, channels = reader.integer("patch_size"), reader.integer("num_channels")
    patches = PatchesBody(
        size=size, channels=channels, image=pair(reader, "image_size"), patch=(patch, patch),
        projection="patch_embedding", bias=False, positions=Positions.PARAMETER,
        position_module="position_embedding.weight", rotary_dim=size // heads, one_table=True,
    )  # fmt: skip
    first = ChainBody(parts=(patches, NormBody(module="pre_layernorm", size=size)))
    with table.block(f"{name}.embed", body=first):
        table.convolution("patch_embedding", channels, size, patch, patch, bias=False)
        table.embedding("position_embedding", patches_across(reader) ** 2, size)
        table.norm("pre_layernorm", size)
    layer = TowerLayer(
        hidden_size=size,
        intermediate_size=int(size * ratio(reader, "mlp_ratio")),
        layer_scales=2,
    )
    active = tower_activation(reader, "hidden_act", default="quick_gelu")
    body = replace(layer_body(layer, heads, active), turning=Turning.FULL)
    count = reader.layers("layers", "num_hidden_layers")
    declare_layers(table, f"{name}.layers", count, layer, heads=heads, activation=active, body=body)
    halving = tuple(
        ConvolutionBody(module=f"downsampler{number}", kernel=3, stride=2, padding=2, bias=True)
        for number in (1, 2)
    )
    with table.block(f"{name}.downsamplers", body=ChainBody(parts=halving)):
        table.convolution("downsampler1", size, 2 * size, 3, 3)
        table.convolution("downsampler2", 2 * size, 4 * size, 3, 3)


def kosmos_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """Pix2Struct's: flat patches, rows and columns as positions, T5's layers."""
    size = reader.integer("hidden_size")
    with table.block(f"{name}.embed"):
        table.linear("patch_projection", reader.integer("patch_embed_hidden_size"), size)
        for axis in ("row", "column"):
            table.embedding(f"{axis}_embedder", reader.integer("max_num_patches"), size)
    layer = TowerLayer(
        hidden_size=size,
        intermediate_size=reader.integer("intermediate_size"),
        width=reader.integer("num_attention_heads") * reader.integer("head_dim"),
        attention_bias=False,
        norm_bias=False,
        gated=True,
        bias=False,
    )
    declare_layers(table, f"{name}.layers", reader.layers("num_hidden_layers"), layer)
    with table.block(f"{name}.norm"):
        table.norm("layernorm", size, bias=False)


def gemma4_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """Gemma 4's: a table for each axis, four norms a layer, norms on heads."""
    size, head_size = reader.integer("hidden_size"), reader.integer("head_dim")
    side, pooled = reader.integer("patch_size"), reader.integer("pooling_kernel_size")
    rows = SOFT_TOKENS * pooled**2
    across = isqrt(rows) // pooled * pooled
    patches = PatchesBody(
        size=size, channels=COLOURS, image=(across * side, across * side), patch=(side, side),
        projection="patch_embedder.input_proj", cut=Cut.FLAT, bias=False, rows=rows, centred=True,
        positions=Positions.AXES, position_module="patch_embedder.position_embedding_table",
        rotary_dim=head_size,
    )  # fmt: skip
    with table.block(f"{name}.embed", body=patches):
        count = reader.integer("position_embedding_size")
        table.parameter("patch_embedder", "position_embedding_table", 2, count, size)
        table.linear("patch_embedder.input_proj", COLOURS * side**2, size, bias=False)
    layer = TowerLayer(
        hidden_size=size,
        intermediate_size=reader.integer("intermediate_size"),
        width=reader.integer("num_attention_heads") * head_size,
        key_value_width=reader.integer("num_key_value_heads") * head_size,
        attention_bias=False,
        head_norm_size=head_size,
        norm_bias=False,
        gated=True,
        bias=False,
    )
    active = tower_activation(reader, "hidden_activation", default="gelu_pytorch_tanh")
    body = layer_body(layer, reader.integer("num_attention_heads"), active)
    body = replace(
        body, norm=RMS_POWER, value_norm=True, masked=True, turning=Turning.AXES,
        clipped=reader.flag("use_clipped_linears"),
        names=replace(
            body.names, first_post_norm="post_attention_layernorm",
            second_post_norm="post_feedforward_layernorm",
        ),
    )  # fmt: skip
    with table.block(f"{name}.layers", count=reader.layers("num_hidden_layers"), body=body):
        declare_layer(table, layer)
        table.norm("post_attention_layernorm", size, bias=False)
        table.norm("post_feedforward_layernorm", size, bias=False)
    squares = SquaresBody(
        size=size, side=pooled, tokens=(across // pooled) ** 2,
        standardized=reader.flag("standardize"),
    )  # fmt: skip
    with table.block(f"{name}.pooler", body=squares):
        pass


SOFT_TOKENS = 280
"""The most tokens that Gemma 4's processor makes of a picture; it pads each to so many."""
RMS_POWER = NormSpec(kind=NormKind.RMS_POWER)
