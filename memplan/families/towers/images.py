"""Vision transformers of one language model each: what stands around their layers.

Classes of transformers 5.23: ``PixtralVisionModel``, ``InternVLVisionModel``, ``JanusVisionModel``,
``Kimi_K25VisionModel``, ``MuseGlimmerVisionModel``, ``Llama4VisionModel``, ``MllamaVisionModel``,
``InstructBlipVisionModel``, ``Ovis2VisionModel``, ``Step3p7VisionModel``,
``Kosmos2_5VisionModel``, ``Gemma4VisionModel``, ``VideoLlama3VisionModel``,
``MiniCPMV4_6VisionModel``.
"""

from dataclasses import replace
from functools import partial
from itertools import groupby
from math import isqrt

from memplan.families.towers.blocks import (
    TowerLayer,
    declare_attention,
    declare_layer,
    declare_layers,
    layer_body,
    perceptron,
)
from memplan.families.towers.clip import patches_across
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import PICTURE, pair, ratio
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, TowerBody
from memplan.model.towers.compared.pooling import SquaresBody
from memplan.model.towers.compared.projecting import (
    CopiedBody,
    CropBody,
    JoinedPatchesBody,
    WindowMergerBody,
)
from memplan.model.towers.gridded.nets import ConvolutionBody
from memplan.model.towers.layers import Turning
from memplan.model.towers.parts import ActivationBody, LinearBody, NormBody, SpareBody
from memplan.model.towers.patches import Cut, PatchesBody, Positions, ReorderedBody
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


def kimi_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """MoonViT: a grid of positions that is resampled to each image's."""
    size = reader.integer("hidden_size")
    patches = replace(
        _packed_patches(reader), positions=Positions.BAGGED, casts_pictures=False,
        position_module="patch_embed.pos_emb.position_embeddings",
    )  # fmt: skip
    with table.block(f"{name}.embed", body=patches):
        _patches(table, reader)
        grid = reader.integer("pos_emb_height"), reader.integer("pos_emb_width")
        table.parameter("patch_embed.pos_emb", "position_embeddings", *grid, size)
    _packed_layers(table, name, reader)
    with table.block(f"{name}.norm", body=NormBody(module="final_layernorm", size=size)):
        table.norm("final_layernorm", size)


def _packed_patches(reader: ConfigReader) -> PatchesBody:
    """Patches of pictures that keep their proportions, all in one row."""
    size, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    return PatchesBody(
        size=size, channels=reader.integer("num_channels", default=COLOURS), image=PICTURE,
        patch=pair(reader, "patch_size"), projection="patch_embedding", rotary_dim=size // heads,
    )  # fmt: skip


def _packed_layers(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """SigLIP's layers with rotary positions, each picture by itself."""
    layer, heads = plain_layer(reader), reader.integer("num_attention_heads")
    active = tower_activation(reader, "hidden_act", default="gelu_pytorch_tanh")
    body = replace(layer_body(layer, heads, active), turning=Turning.FULL, packed=True)
    count = reader.layers("num_hidden_layers")
    declare_layers(table, f"{name}.layers", count, layer, heads=heads, activation=active, body=body)


def muse_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """Muse Glimmer's: patches of several frames through a linear layer, norms around the layers."""
    size, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    side, frames = reader.integer("patch_size"), reader.integer("patch_temporal")
    high, wide = reader.integer("pos_emb_height"), reader.integer("pos_emb_width")
    patches = PatchesBody(
        size=size, channels=COLOURS, image=PICTURE, patch=(side, side), frames=frames,
        projection="patch_embedding", cut=Cut.FLAT, bias=False, rotary_dim=size // heads,
        positions=Positions.WEIGHED_FULL, position_module="position_embedding_table",
        cast_tables=True,
    )  # fmt: skip
    first = ChainBody(
        parts=(patches, NormBody(module="ln_pre", size=size), ReorderedBody(size=size))
    )
    with table.block(f"{name}.embed", body=first):
        table.linear("patch_embedding", frames * COLOURS * side**2, size, bias=False)
        table.embedding("position_embedding_table", high * wide, size)
        table.norm("ln_pre", size)
    layer, active = plain_layer(reader), tower_activation(reader, "hidden_act")
    whole = replace(layer_body(layer, heads, active), turning=Turning.FULL, packed=True)
    windowed = replace(whole, window=high * high)
    for is_whole, group in groupby(_sees_all(reader)):
        declare_layers(
            table, f"{name}.layers", len(list(group)), layer, heads=heads, activation=active,
            body=whole if is_whole else windowed,
        )  # fmt: skip
    merged = reader.integer("merge_size")
    last = ChainBody(
        parts=(
            ReorderedBody(size=size),
            NormBody(module="ln_post", size=size),
            ReorderedBody(size=size),
            JoinedPatchesBody(size=size, side=merged, copies=1),
        )
    )
    with table.block(f"{name}.norm", body=last):
        table.norm("ln_post", size)


def _sees_all(reader: ConfigReader) -> list[bool]:
    """Of each of Muse Glimmer's layers, whether it sees the picture or a window of it."""
    count = reader.layers("num_hidden_layers")
    listed = reader.texts("layer_types")
    if not listed:
        return [number % 4 == 3 or number == count - 1 for number in range(count)]
    for kind in listed:
        reader.choice("layer_types", kind, ("full_attention", "window_attention"))
    if len(listed) != count:
        key = "layer_types"
        raise reader.fail(key, f"has {len(listed)} entries for {count} layers")
    return [kind == "full_attention" for kind in listed]


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


def unplaced_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """VideoLLaMA 3's: SigLIP's with rotary positions, so that there is no table of them."""
    size = reader.integer("hidden_size")
    with table.block(f"{name}.embed", body=_packed_patches(reader)):
        _patches(table, reader)
    _packed_layers(table, name, reader)
    # Resized to a side of its own, a copy; and joined.
    last = ChainBody(parts=(NormBody(module="post_layernorm", size=size), CopiedBody(times=2)))
    with table.block(f"{name}.norm", body=last):
        table.norm("post_layernorm", size)


def paddle_vision(table: ParameterTable, name: str, reader: ConfigReader) -> None:
    """PaddleOCR-VL's: SigLIP's with rotary positions, and a table of others that is resampled."""
    size = reader.integer("hidden_size")
    patches = replace(
        _packed_patches(reader), positions=Positions.WEIGHED_FULL,
        position_module="position_embedding",
    )  # fmt: skip
    with table.block(f"{name}.embed", body=patches):
        _patches(table, reader)
        table.embedding("position_embedding", patches_across(reader) ** 2, size)
    _packed_layers(table, name, reader)
    with table.block(f"{name}.norm", body=NormBody(module="post_layernorm", size=size)):
        table.norm("post_layernorm", size)


def minicpm_vision(
    table: ParameterTable, name: str, reader: ConfigReader, *, merged_after: int
) -> None:
    """MiniCPM-V's: SigLIP's, and a layer that joins windows of patches amid the others.

    ``merged_after`` says behind how many of them; 0: it serves nothing.
    """
    size, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    patches = replace(_placed_patches(reader), image=PICTURE, positions=Positions.EACH)
    with table.block(f"{name}.embed", body=patches):
        _patches(table, reader)
        table.embedding("position_embedding", patches_across(reader) ** 2, size)
    layer = plain_layer(reader)
    active = tower_activation(reader, "hidden_act", default="gelu_pytorch_tanh")
    body = replace(layer_body(layer, heads, active), packed=True)
    count = reader.layers("num_hidden_layers")
    before = merged_after if 0 < merged_after <= count else count
    layers = partial(
        declare_layers,
        table,
        f"{name}.layers",
        layer=layer,
        heads=heads,
        activation=active,
        body=body,
    )
    layers(count=before)
    height, width = pair(reader, "window_kernel_size")
    inner_size = reader.integer("intermediate_size") * height * width
    merger = WindowMergerBody(
        size=size, inner_size=inner_size, side=height, module="window_merger",
        layer=replace(body, window=height * width),
    )  # fmt: skip
    with table.block(f"{name}.window_merger", body=merger if merged_after else SpareBody()):
        joined = size * height * width
        declare_attention(table, layer)
        table.norm("layer_norm1", size)
        table.norm("pre_norm", joined)
        perceptron(table, "window_merger", joined, inner_size, size)
    if before < count:
        layers(count=count - before)
    with table.block(f"{name}.norm", body=NormBody(module="post_layernorm", size=size)):
        table.norm("post_layernorm", size)
