"""ViTDet: attention in windows, with numbers of distances down and across; convolutions behind some layers.

(transformers 5.23, models/vitdet/modeling_vitdet.py)
"""

from math import isqrt

from memplan.classes.pictures.backbones import Backbone
from memplan.classes.pictures.base import PictureModel
from memplan.classes.pictures.parts import InOrder, drop_paths
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import pair, ratio
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import (
    ActivationModule,
    Dropout,
    LayerNorm,
    Linear,
    fp32_under_autocast,
)
from memplan.graph.modules.contractions import einsum, matmul
from memplan.graph.modules.functional import divide, padded, rows_of, softmax
from memplan.graph.modules.grids import Conv2d, DropPath, interpolate, mean_along
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock


class VitDetEmbeddings(Module):
    """Positions are resized to the picture where they do not fit."""

    def __init__(self, config: ConfigReader) -> None:
        size, patch = config.integer("hidden_size"), pair(config, "patch_size")
        if config.flag("use_absolute_position_embeddings"):
            height, width = pair(config, "pretrain_image_size")
            count = (height // patch[0]) * (width // patch[1])
            self.side = isqrt(count)
            if self.side**2 != count:
                error = config.fail("pretrain_image_size", "must be a square number of patches")
                raise error
            self.position_embeddings = Weight(1, count + 1, size)
        self.projection = Conv2d(config.integer("num_channels"), size, *patch, stride=patch)

    def get_absolute_positions(self, height: int, width: int) -> Handle:
        """Without the first row, which is of no patch."""
        table = self.operand(self.position_embeddings)
        positions = table.narrow(table.shape[1] - 1, 1)
        if (self.side, self.side) == (height, width):
            return positions.view(1, height, width, table.shape[-1])
        grid = positions.view(1, self.side, self.side, table.shape[-1]).permute(0, 3, 1, 2)
        return interpolate(grid, height, width).permute(0, 2, 3, 1)

    def forward(self, pixel_values: Handle) -> Handle:
        embeddings = self.projection(pixel_values)
        if "position_embeddings" in self.weights:
            embeddings = embeddings.permute(0, 2, 3, 1)
            embeddings = embeddings + self.get_absolute_positions(*embeddings.shape[1:3])
            embeddings = embeddings.permute(0, 3, 1, 2)
        return embeddings


def decomposed_positions(
    attn: Handle, queries: Handle, tables: tuple[Handle, Handle], sides: tuple[int, int]
) -> Handle:
    """``add_decomposed_relative_positions``, of as many keys as queries."""
    height, width = sides
    relative_height = get_rel_pos(height, tables[0])
    relative_width = get_rel_pos(width, tables[1])
    batch, _, dim = queries.shape
    r_q = queries.reshape(batch, height, width, dim)
    relative_height = einsum("bhwc,hkc->bhwk", r_q, relative_height)
    relative_weight = einsum("bhwc,wkc->bhwk", r_q, relative_width)
    attn = (
        attn.view(batch, height, width, height, width)
        + relative_height.unsqueeze(-1)
        + relative_weight.unsqueeze(-2)
    ).view(batch, height * width, height * width)
    return attn


def get_rel_pos(size: int, rel_pos: Handle, *, resized: bool = False) -> Handle:
    """A row for each distance, of a table that is resized where it does not fit, or though it does."""
    rows, width = rel_pos.shape
    wanted = 2 * size - 1
    if resized or rows != wanted:
        table = rel_pos.view(1, rows, width).permute(0, 2, 1).unsqueeze(-1)
        rel_pos = interpolate(table, wanted, 1)
        rel_pos = rel_pos.view(width, wanted).permute(1, 0)
    return rows_of(rel_pos, (size, size, width))


class VitDetAttention(Module):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, sides: tuple[int, int]) -> None:
        size, self.num_heads = (
            config.integer("hidden_size"), config.integer("num_attention_heads"),
        )  # fmt: skip
        head_dim = config.divide("hidden_size", size, "num_attention_heads", self.num_heads)
        self.qkv = Linear(size, 3 * size, bias=config.flag("qkv_bias"))
        self.proj = Linear(size, size, bias=True)
        if config.flag("use_relative_position_embeddings"):
            self.rel_pos_h = Weight(2 * sides[0] - 1, head_dim)
            self.rel_pos_w = Weight(2 * sides[1] - 1, head_dim)

    def forward(self, hidden_state: Handle) -> Handle:
        batch, height, width, size = hidden_state.shape
        heads, tokens = self.num_heads, height * width
        qkv = self.qkv(hidden_state).view(batch, tokens, 3, heads, size // heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv.reshape(3, batch * heads, tokens, size // heads).unbind(0)
        attention_scores = matmul(queries * 0.5, keys.transpose(1, 2))
        if "rel_pos_h" in self.weights:
            tables = self.operand(self.rel_pos_h), self.operand(self.rel_pos_w)
            attention_scores = decomposed_positions(
                attention_scores, queries, tables, (height, width)
            )
        attention_probs = softmax(attention_scores)
        hidden_state = matmul(attention_probs, values)
        hidden_state = hidden_state.view(batch, heads, height, width, size // heads)
        hidden_state = hidden_state.permute(0, 2, 3, 1, 4)
        hidden_state = hidden_state.reshape(batch, height, width, size)
        hidden_state = self.proj(hidden_state)
        return hidden_state


class VitDetLayerNorm(LayerNorm):
    """Over the channels, in products and sums."""

    def forward(self, x: Handle) -> Handle:
        u = mean_along(x, 1)
        s = mean_along(fp32_under_autocast(x - u).pow(2), 1)
        x = divide(x - u, (s + 1e-6).unary(OperationKind.SQRT))
        weight, bias = (
            self.operand(each).unsqueeze(-1).unsqueeze(-1) for each in self.weights.values()
        )
        x = weight * x + bias
        return x


class VitDetResBottleneckBlock(InOrder):
    """Half as wide inside."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        active, half = tower_activation(config, "hidden_act"), size // 2
        shapes = (size, half, 1), (half, half, 3), (half, size, 1)
        for number, (before, after, kernel) in enumerate(shapes, 1):
            convolution = Conv2d(before, after, kernel, padding=kernel // 2, bias=False)
            setattr(self, f"conv{number}", convolution)
            setattr(self, f"norm{number}", VitDetLayerNorm(after))
            if number < len(shapes):
                setattr(self, f"act{number}", ActivationModule(active))

    def forward(self, x: Handle) -> Handle:
        out = super().forward(x)
        out = x + out
        return out


def window_partition(hidden_state: Handle, side: int) -> tuple[Handle, tuple[int, int]]:
    """Windows of a picture that is padded to whole ones, and its sides then."""
    batch, height, width, size = hidden_state.shape
    down, across = -(-height // side), -(-width // side)
    hidden_state = padded(hidden_state, (batch, down * side, across * side, size))
    hidden_state = hidden_state.view(batch, down, side, across, side, size)
    windows = hidden_state.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, side, side, size)
    return windows, (down * side, across * side)


def window_unpartition(
    windows: Handle, side: int, padded_sides: tuple[int, int], sides: tuple[int, int]
) -> Handle:
    """The picture again, without what it was padded with."""
    (down, across), size = (each // side for each in padded_sides), windows.shape[-1]
    hidden_state = windows.view(-1, down, across, side, side, size)
    hidden_state = hidden_state.permute(0, 1, 3, 2, 4, 5).contiguous()
    hidden_state = hidden_state.view(-1, *padded_sides, size)
    for dim, (before, after) in enumerate(zip(padded_sides, sides, strict=True), 1):
        if before != after:
            hidden_state = hidden_state.narrow(after, dim)
    return hidden_state.contiguous()


@dataclass(frozen=True, slots=True)
class Kind:
    """What sets a layer apart from others."""

    window: int
    """0: it sees the whole picture."""
    convolved: bool
    read: bool
    """What it gives is one of the sizes that another model reads."""
    drop_path: float


class VitDetLayer(Module):
    def __init__(self, config: ConfigReader, kind: Kind) -> None:
        size = config.integer("hidden_size")
        (height, width), patch = pair(config, "image_size"), pair(config, "patch_size")
        whole = height // patch[0], width // patch[1]
        inner, drop = (
            int(size * ratio(config, "mlp_ratio", default=4)),
            config.number("dropout_prob", default=0.0),
        )
        self.window_size = kind.window
        self.norm1 = LayerNorm(size)
        self.attention = VitDetAttention(config, (kind.window,) * 2 if kind.window else whole)
        self.drop_path = DropPath(kind.drop_path)
        self.norm2 = LayerNorm(size)
        self.mlp = InOrder(
            fc1=Linear(size, inner, bias=True),
            act=ActivationModule(tower_activation(config, "hidden_act")),
            drop=Dropout(drop),
            fc2=Linear(inner, size, bias=True),
            drop_again=Dropout(drop),
        )
        self.mlp.block = LayerBlock.NETWORK
        if kind.convolved:
            self.residual = VitDetResBottleneckBlock(config, size)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = hidden_states.permute(0, 2, 3, 1)
        shortcut = hidden_states
        hidden_states = self.norm1(hidden_states)
        sides, padded_sides = hidden_states.shape[1:3], (0, 0)
        if self.window_size:
            hidden_states, padded_sides = window_partition(hidden_states, self.window_size)
        self_attention_outputs = self.attention(hidden_states)
        hidden_states = self_attention_outputs
        if self.window_size:
            hidden_states = window_unpartition(
                hidden_states, self.window_size, padded_sides, (sides[0], sides[1])
            )
        hidden_states = shortcut + self.drop_path(hidden_states)
        hidden_states = hidden_states + self.drop_path(self.mlp(self.norm2(hidden_states)))
        hidden_states = hidden_states.permute(0, 3, 1, 2)
        if "residual" in self.children:
            hidden_states = self.residual(hidden_states)
        return hidden_states


class VitDetModel(PictureModel):
    """No norm stands behind its layers."""

    prefix = "vitdet"
    recomputes = True

    def __init__(self, config: ConfigReader) -> None:
        self.width, depth = config.integer("hidden_size"), config.layers("num_hidden_layers")
        self.channels = [self.width] * (depth + 1)
        self.embeddings = VitDetEmbeddings(config)
        window = config.integer("window_size", minimum=0)
        windowed = set(config.integers("window_block_indices"))
        convolved = set(config.integers("residual_block_indices"))
        read = config.texts("out_features")
        kinds = [
            Kind(
                window if number in windowed else 0,
                number in convolved,
                f"stage{number + 1}" in read,
                rate,
            )
            for number, rate in enumerate(drop_paths(config, depth))
        ]
        self.layer = LayerList("encoder.layer", kinds, lambda kind: VitDetLayer(config, kind))
        channels = config.integer("num_channels")
        self.picture = self.described(*pair(config, "image_size"), channels=channels)


class VitDetBackbone(Backbone, VitDetModel):
    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        embedding_output = self.embeddings(pixel_values)
        hidden_states = embedding_output
        all_hidden_states, number = {0: hidden_states}, 0
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states)
            number += layer_module.segment.repeat
            all_hidden_states[number] = hidden_states
        return self.feature_maps(all_hidden_states)
