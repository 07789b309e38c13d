"""FocalNet's stages: surroundings of each position, gated and added up, in place of attention."""

from memplan.families.towers.layers import tower_activation
from memplan.families.towers.networks.pyramid_parts import declare_network, network
from memplan.families.towers.sizes import MAX_PARTS, each_stage, pair, ratio
from memplan.model.config import ConfigReader
from memplan.model.parameters import ParameterTable
from memplan.model.towers.body import ChainBody, ResidualBody, TowerBody
from memplan.model.towers.gridded.grids import FocalBody, ForgottenBody, NamedBody, ScaledBody
from memplan.model.towers.gridded.nets import ConvolutionBody, DropoutBody, PixelsBody
from memplan.model.towers.parts import NormBody

STEM = 7, 4, 2
"""Kernel, stride and padding of the first convolution where patches overlap."""
BETWEEN = 3, 2, 1
"""The same of those between stages."""


def focal_stages(
    table: ParameterTable, reader: ConfigReader, depths: list[int], *, masked: bool
) -> None:
    """Embedding and stages; checkpointing takes a stage as a whole."""
    width, channels = reader.integer("embed_dim"), reader.integer("num_channels")
    overlapping = reader.flag("use_conv_embed")
    kernel = (STEM[0], STEM[0]) if overlapping else pair(reader, "patch_size")
    stride, padding = STEM[1:] if overlapping else (kernel[0], 0)
    fewer = ConvolutionBody(
        module="patch_embeddings", kernel=kernel[0], stride=stride, padding=2 * padding, bias=True
    )
    drop = DropoutBody(probability=reader.number("hidden_dropout_prob", default=0.0))
    pixels = PixelsBody(channels=channels, image=pair(reader, "image_size"))
    embed = ChainBody(
        parts=(pixels, fewer, NormBody(module="embed_norm", size=width), drop, NamedBody())
    )
    # Pretraining hides patches: that is not written down, nor are patches that are no squares.
    written = not masked and kernel[0] == kernel[1]
    with table.block("embed", body=embed if written else None):
        table.convolution("patch_embeddings", channels, width, *kernel)
        table.norm("embed_norm", width)
        if masked:
            table.parameter("embeddings", "mask_token", 1, 1, width)
    drops = reader.number("drop_path_rate", default=0.0) > 0
    for index, depth in enumerate(depths):
        size, last = width * 2**index, index + 1 == len(depths)
        # The encoder's variable holds what each stage gave before it was made smaller.
        parts: list[TowerBody] = [ForgottenBody()] if index else []
        with table.block(f"stages.{index}.layers"):
            for number in range(depth):
                name = f"layers.{number}."
                dropped = drops and bool(index or number)
                parts += _layer(table, reader, name, size, index, len(depths), drops=dropped)
            if not last:
                across, step, around = BETWEEN if overlapping else (2, 2, 0)
                table.convolution("downsample", size, 2 * size, across, across)
                table.norm("downsample.norm", 2 * size)
                smaller = ConvolutionBody(
                    module="downsample", kernel=across, stride=step, padding=2 * around, bias=True
                )
                parts += [NamedBody(), smaller, NormBody(module="downsample.norm", size=2 * size)]
            table.computes(ChainBody(parts=tuple(parts)))


def _layer(
    table: ParameterTable,
    reader: ConfigReader,
    name: str,
    size: int,
    index: int,
    num_stages: int,
    *,
    drops: bool,
) -> list[TowerBody]:
    """``FocalNetLayer``; each level's window is two wider than the one's before."""
    levels = each_stage(reader, "focal_levels", num_stages, minimum=0, maximum=MAX_PARTS)[index]
    window = each_stage(reader, "focal_windows", num_stages)[index]
    module = f"{name}modulation"
    table.norm(f"{name}norm1", size)
    table.norm(f"{name}norm2", size)
    table.linear(f"{module}.projection_in", size, 2 * size + levels + 1)
    table.convolution(f"{module}.projection_context", size, size, 1, 1)
    table.linear(f"{module}.projection_out", size, size)
    kernels = tuple(window + 2 * level for level in range(levels))
    for level, kernel in enumerate(kernels):
        each = f"{module}.focal_layers.{level}"
        table.convolution(each, size, size, kernel, kernel, groups=size, bias=False)
    within = reader.flag("use_post_layernorm_in_modulation")
    if within:
        table.norm(f"{module}.layernorm", size)
    inner = int(size * ratio(reader, "mlp_ratio", default=4))
    declare_network(table, f"{name}mlp", size, inner)
    scaled = reader.flag("use_layerscale")
    if scaled:
        table.parameter(f"{name}layer", "gamma_1", size)
        table.parameter(f"{name}layer", "gamma_2", size)
    drop = reader.number("hidden_dropout_prob", default=0.0)
    mixed = FocalBody(
        module=module, size=size, kernels=kernels, normalized=reader.flag("normalize_modulator"),
        normed=within, dropout=drop,
    )  # fmt: skip
    fed = network(f"{name}mlp", size, inner, tower_activation(reader, "hidden_act"), dropout=drop)
    behind = reader.flag("use_post_layernorm")
    made: list[TowerBody] = []
    for number, part in ((1, mixed), (2, fed)):
        norm = NormBody(module=f"{name}norm{number}", size=size)
        scale = ScaledBody(weight=f"{name}layer.gamma_{number}" if scaled else "")
        branch: tuple[TowerBody, ...] = (part, norm) if behind else (norm, part)
        made.append(ResidualBody(branch=(*branch, scale), drop_path=drops))
    return made
