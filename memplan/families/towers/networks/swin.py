"""Swin Transformer V2: attention in shifted windows, patches merged between stages."""

from memplan.families.towers.layers import perceptron, tower_activation
from memplan.families.towers.parts import attention
from memplan.families.towers.sizes import at_least_one, each_stage, pair, ratio
from memplan.families.towers.vit import num_patches, patch_projection
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import CallBody, ChainBody, ResidualBody, TowerBody
from memplan.model.towers.gridded.grids import ForgottenBody, LocalBody, NamedBody
from memplan.model.towers.gridded.nets import ConvolutionBody, DropoutBody, PixelsBody
from memplan.model.towers.gridded.shifted import MergedSquaresBody, ShiftedWindowsBody
from memplan.model.towers.parts import ActivationBody, LinearBody, NormBody

POSITION_WIDTH = 512
"""Inside the network that makes position biases (``Swinv2SelfAttention``)."""


def swin_size(reader: ConfigReader) -> int:
    """Width of the last stage."""
    return int(reader.integer("embed_dim") * 2 ** (len(_depths(reader)) - 1))


def _depths(reader: ConfigReader) -> list[int]:
    return at_least_one(reader, "depths")


def swin_v2_tower(
    table: ParameterTable, name: str, reader: ConfigReader, *, masked: bool = False
) -> None:
    """The model without its last norm; checkpointing takes a stage as a whole."""
    width = reader.integer("embed_dim")
    with table.block(f"{name}.embed", body=_embedding(reader, width, masked=masked)):
        patch_projection(table, reader, width)
        table.norm("embed_norm", width)
        if masked:
            table.parameter("embeddings", "mask_token", 1, 1, width)
        if reader.flag("use_absolute_embeddings"):
            positions = num_patches(reader) + 1
            table.parameter("embeddings", "position_embeddings", 1, positions, width)
    depths = _depths(reader)
    heads = each_stage(reader, "num_heads", len(depths))
    for index, depth in enumerate(depths):
        size = width * 2**index
        reader.divide("embed_dim", size, "num_heads", heads[index])
        # The encoder's variable holds what each stage gave before its patches were merged.
        parts: list[TowerBody] = [ForgottenBody()] if index else []
        with table.block(f"{name}.stages.{index}.layers"):
            for number in range(depth):
                parts.append(_layer(table, reader, size, heads[index], index, number))
            if index + 1 < len(depths):
                table.linear("downsample.reduction", 4 * size, 2 * size, bias=False)
                table.norm("downsample.norm", 2 * size)
                merged = MergedSquaresBody(module="downsample", size=size)
                parts += [NamedBody(), merged, NormBody(module="downsample.norm", size=2 * size)]
            table.computes(ChainBody(parts=tuple(parts)))


def _embedding(reader: ConfigReader, width: int, *, masked: bool) -> TowerBody | None:
    """Pretraining hides patches: that is not written down, nor are patches that are no squares.

    Nor are absolute positions, whose table has a row too many for any picture (``Swinv2Embeddings``).
    """
    sides = pair(reader, "patch_size")
    if masked or sides[0] != sides[1] or reader.flag("use_absolute_embeddings"):
        return None
    fewer = ConvolutionBody(module="patch_embeddings", kernel=sides[0], stride=sides[0], bias=True)
    pixels = PixelsBody(channels=reader.integer("num_channels"), image=pair(reader, "image_size"))
    drop = DropoutBody(probability=reader.number("hidden_dropout_prob", default=0.0))
    return ChainBody(
        parts=(pixels, fewer, NormBody(module="embed_norm", size=width), drop, NamedBody())
    )


def _layer(
    table: ParameterTable, reader: ConfigReader, size: int, heads: int, index: int, number: int
) -> TowerBody:
    """``Swinv2Layer``: norms stand behind what is added; every second one is shifted."""
    name = f"layers.{number}."
    module, bias = f"{name}self_attn", reader.flag("qkv_bias", default=True)
    inner = int(size * ratio(reader, "mlp_ratio", default=4))
    attention(table, module, size, bias=bias, key_bias=False)
    table.parameter(module, "logit_scale", heads, 1, 1)
    table.linear(f"{module}.position_mlp.0", 2, POSITION_WIDTH)
    table.linear(f"{module}.position_mlp.2", POSITION_WIDTH, heads, bias=False)
    table.norm(f"{name}layernorm_before", size)
    table.norm(f"{name}layernorm_after", size)
    perceptron(table, f"{name}mlp", size, inner)
    sides = [
        length // patch // 2**index
        for length, patch in zip(
            pair(reader, "image_size"), pair(reader, "patch_size"), strict=True
        )
    ]
    asked = reader.integer("window_size", default=7)
    window = max(1, min(sides[0], asked))
    mixed = ShiftedWindowsBody(
        module=module, size=size, num_heads=heads, window=window,
        shift=asked // 2 if number % 2 and sides[0] > window else 0, bias_width=POSITION_WIDTH,
        bias=bias, dropout=reader.number("attention_probs_dropout_prob", default=0.0),
    )  # fmt: skip
    drop = DropoutBody(probability=reader.number("hidden_dropout_prob", default=0.0))
    active = ActivationBody(activation=tower_activation(reader, "hidden_act"))
    raised = CallBody(
        parts=(LinearBody(module=f"{name}mlp.fc1", inputs=size, outputs=inner), active)
    )
    lowered = LinearBody(module=f"{name}mlp.fc2", inputs=inner, outputs=size)
    drops = reader.number("drop_path_rate", default=0.0) > 0 and bool(index or number)
    norms = [
        NormBody(module=f"{name}layernorm_{place}", size=size) for place in ("before", "after")
    ]
    halves = (
        ResidualBody(branch=(mixed, norms[0]), drop_path=drops),
        ResidualBody(
            branch=(raised, CallBody(parts=(lowered, drop)), LocalBody(), norms[1]), drop_path=drops
        ),
    )
    return CallBody(parts=halves)
