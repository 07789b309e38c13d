"""Towers for pictures that keep their proportions: the patches of all of them in one row, of which each stretch (a picture,
or a window of one) sees itself alone.

(transformers 5.23, models/qwen2_vl/modeling_qwen2_vl.py: ``VisionAttention``, ``Qwen2VLVisionRotaryEmbedding``)
"""

from collections import Counter
from collections.abc import Iterator
from math import prod

from memplan.classes.pictures.base import PictureModel
from memplan.classes.pictures.vit import two_linear
from memplan.dtypes import DType
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import PICTURE
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import allocated_bytes
from memplan.graph.modules.attention import attention_function
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import made_from, summed_over
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import RotaryEmbedding, Tables, concatenate, rotate_half
from memplan.graph.modules.strides import view_strides
from memplan.graph.towers.images import picture_size
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.training.choices_of_kernels.kernels import AttentionKernel

Stretches = tuple[int, ...]
"""Rows of each part of a row of patches that sees itself alone."""


def equal_stretches(rows: int, count: int) -> Stretches:
    """Of pictures that are as large as each other."""
    return (rows // count,) * count


def windows_of(grid: tuple[int, int], side: int) -> Stretches:
    """Patches of each window of a picture: those at its right and its lower edge are what is left (``get_vision_window_index``).

    >>> windows_of((12, 20), 8)
    (64, 64, 32, 32, 32, 16)
    """
    tall, wide = ([min(side, size - at) for at in range(0, size, side)] for size in grid)
    return tuple(height * width for height in tall for width in wide)


def window_side(config: ConfigReader, key: str, patches: int, joins: int) -> int:
    """Patches along a window's side: whole groups of those that become one token (``get_window_index``).

    Raises ``ConfigError`` where a window has room for none, with which transformers divides by zero.
    """
    if patches < joins:
        problem = f"a window {patches} patches wide has no room for the {joins} that are joined"
        raise config.fail(key, problem)
    return patches // joins * joins


class PackedTower(PictureModel):
    """Its pictures come cut into patches."""

    recomputes = casts = True
    frames_spanned = 1
    """Pictures that a patch spans, the same one where there is no video."""
    joins = 1
    """Patches along a side that become one of the text's tokens: its processor resizes pictures to multiples of these."""

    def cut_into(self, height: int, width: int, *, channels: int) -> None:
        """Say how large patches are, once its layers are there."""
        self.picture = replace(self.described(*PICTURE, channels=channels), patch=(height, width))

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of a picture down and across."""
        height, width = picture_size(self.run.options.image_size, self.picture)
        tall, wide = (each * self.joins for each in self.picture.patch)
        return max(1, height // tall) * self.joins, max(1, width // wide) * self.joins

    def windows(self, side: int) -> Stretches:
        """Of all pictures, so many patches a side."""
        return windows_of(self.grid, side) * self.num_pictures

    def pixels_shape(self) -> tuple[int, ...]:
        """Of all patches."""
        high, wide = self.grid
        features = self.picture.channels * self.frames_spanned * prod(self.picture.patch)
        return self.num_pictures * high * wide, features


class AxialRotaryEmbedding(RotaryEmbedding):
    """Angles of rows and of columns, put together behind cosines and sines; in fp32."""

    def of_patches(self, rows: int) -> Tables:
        """Of so many patches."""
        self.hold_frequencies(self.width // 2)
        position_ids = made_by(self.run, OperationKind.TO, (rows, 2, 1), DType.FP32)
        freqs = position_ids.apart(OperationKind.MUL, shape=(rows, 2, self.width // 4))
        del position_ids
        cos = freqs.apart(OperationKind.COS).apart(OperationKind.MUL_SCALAR)
        sin = freqs.apart(OperationKind.SIN).apart(OperationKind.MUL_SCALAR)
        cos = self.recomposed(cos)
        sin = self.recomposed(sin)
        return cos, sin

    def recomposed(self, freq: Handle) -> Handle:
        """``recomposition_frequencies``."""
        freq_hw = made_from(OperationKind.CAT, (freq.shape[0], self.width // 2), DType.FP32, freq)
        return made_from(OperationKind.CAT, (freq.shape[0], self.width), DType.FP32, freq_hw)


def apply_rotary_pos_emb_vision(q: Handle, k: Handle, cos: Handle, sin: Handle) -> Tables:
    """In fp32, cast back."""
    dtype = q.dtype
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    q_embed = q_embed.to(dtype)
    k_embed = k_embed.to(dtype)
    return q_embed, k_embed


class VisionAttention(Module):
    """Queries, keys and values of one matrix, turned by where their patches are."""

    block = LayerBlock.ATTENTION
    output = "proj"
    """What it calls the layer that leads back to the hidden size."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        self.num_heads = config.integer("num_heads", "num_attention_heads")
        self.head_dim = config.divide("hidden_size", size, "num_heads", self.num_heads)
        self.add_projections(config, size)

    def add_projections(self, config: ConfigReader, size: int) -> None:
        """Declare its layers."""
        bias, output_bias = self.biases(config)
        self.qkv = Linear(size, 3 * size, bias=bias)
        self.proj = Linear(size, size, bias=output_bias, role=WeightRole.ATTENTION_OUTPUT)

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        """Of what it reads with, and of what leads back."""
        del config
        return True, True

    def projected(self, hidden_states: Handle) -> tuple[Handle, Handle, Handle]:
        """All three, of (patches, heads, width)."""
        rows = hidden_states.shape[0]
        qkv = self.qkv(hidden_states).reshape(rows, 3, self.num_heads, -1).permute(1, 0, 2, 3)
        query_states, key_states, value_states = qkv.unbind(0)
        return query_states, key_states, value_states

    def forward(self, hidden_states: Handle, stretches: Stretches, tables: Tables | None) -> Handle:
        query_states, key_states, value_states = self.projected(hidden_states)
        if tables is not None:
            query_states, key_states = apply_rotary_pos_emb_vision(
                query_states, key_states, *tables
            )
        query_states = query_states.transpose(0, 1).unsqueeze(0)
        key_states = key_states.transpose(0, 1).unsqueeze(0)
        value_states = value_states.transpose(0, 1).unsqueeze(0)
        splits = [
            in_stretches(each, stretches) for each in (query_states, key_states, value_states)
        ]
        attend = attention_function(self.run, causal=False)
        attn_outputs = [attend(q, k, v, None, 0.0)[0] for q, k, v in zip(*splits, strict=True)]
        attn_output = joined(attn_outputs)
        attn_output = attn_output.reshape(hidden_states.shape[0], -1).contiguous()
        attn_output = self.children[self.output](attn_output)
        return attn_output


def in_heads(x: Handle, head_dim: int) -> Handle:
    """``x.view(patches, -1, head_dim)``."""
    shape = x.shape[0], x.shape[1] // head_dim, head_dim
    strides = view_strides(x.shape, x.strides, shape)
    assert strides is not None
    return x.viewed(shape, strides)


def in_stretches(x: Handle, stretches: Stretches) -> list[Handle]:
    """``torch.split`` along the rows: the gradients of all parts are joined.

    A package is told where each begins: one call, which is written down as a batch of as many as can be equal.
    """
    if x.run.kernels.attention.is_package:
        return [batch_of(x, most_equal(x.shape[2], len(stretches)))]
    alike = list(alike_stretches(stretches))
    parts = x.split(*(count * rows for count, rows in alike), dim=2)
    return [batch_of(part, count) for part, (count, _) in zip(parts, alike, strict=True)]


def most_equal(rows: int, count: int) -> int:
    """Into how many equal stretches rows can be cut, of so many at most."""
    return next(each for each in range(count, 0, -1) if rows % each == 0)


def alike_stretches(stretches: Stretches) -> Iterator[tuple[int, int]]:
    """What is written down as one call of attention each: how many stretches, of how many rows each; of very many, several
    that are alike.

    >>> list(alike_stretches((64, 32, 64)))
    [(1, 64), (1, 32), (1, 64)]
    """
    if len(stretches) <= MOST_PARTS:
        yield from ((1, rows) for rows in stretches)
        return
    for rows, number in Counter(stretches).items():
        parts = max(1, MOST_PARTS * number // len(stretches))
        yield from ((number // parts + (each < number % parts), rows) for each in range(parts))


MOST_PARTS = 128
"""Calls of attention in a layer that are written down each by itself."""


def batch_of(x: Handle, count: int) -> Handle:
    """So many stretches of rows as sequences of their own."""
    _, heads, rows, width = x.shape
    if count == 1:
        return x
    each, strides = rows // count, (rows // count * x.strides[2], *x.strides[1:])
    made = Handle(x.run, x.record, (count, heads, each, width), strides)
    return x.leads_to(made, in_rows(x.shape))


def joined(attn_outputs: list[Handle]) -> Handle:
    """``torch.cat(attn_outputs, dim=1)``, which a package's single result is already."""
    run = attn_outputs[0].run
    rows = [each.reshape(1, -1, *each.shape[2:]) for each in attn_outputs]
    if run.kernels.attention.is_package:
        return rows[0]
    made = concatenate(*rows, dim=1)
    if run.kernels.attention is AttentionKernel.SDPA:
        kept = sum(kept_bytes(*each.shape[:3]) for each in attn_outputs)
        if kept:
            beside = made_by(run, OperationKind.ZEROS, (kept,), DType.BOOL)
            joining = run.segment.operations[-2]
            joining.saved = [*joining.saved, beside.record.storage]
    return made


def kept_bytes(count: int, rows: int, heads: int) -> int:
    """What as many kernels keep more than one: sums of exponentials, the state of random numbers."""
    states = RANDOM_STATES * allocated_bytes(1, DType.INT64)
    each = allocated_bytes(heads * rows, DType.FP32) + states
    return count * each - allocated_bytes(count * heads * rows, DType.FP32) - states


RANDOM_STATES = 2
"""Tensors that a fused kernel returns for dropout, be there none."""


class SeparateAttention(VisionAttention):
    """Each with a matrix of its own."""

    names: tuple[str, ...] = ("k_proj", "v_proj", "q_proj", "out_proj")
    reads = "q_proj", "k_proj", "v_proj"
    output = "out_proj"

    def add_projections(self, config: ConfigReader, size: int) -> None:
        del config
        for name in self.names:
            role = WeightRole.ATTENTION_OUTPUT if name == self.output else WeightRole.MATRIX
            setattr(self, name, Linear(size, size, bias=True, role=role))

    def projected(self, hidden_states: Handle) -> tuple[Handle, Handle, Handle]:
        query, key, value = (self.children[name] for name in self.reads)
        query_states = in_heads(query(hidden_states), self.head_dim)
        key_states = in_heads(key(hidden_states), self.head_dim)
        value_states = in_heads(value(hidden_states), self.head_dim)
        return query_states, key_states, value_states


class EncoderLayer(Module):
    """SigLIP's, of patches in a row."""

    def __init__(self, config: ConfigReader, attention: Module) -> None:
        size, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        active = tower_activation(config, "hidden_act", default="gelu_pytorch_tanh")
        self.layer_norm1 = LayerNorm(size)
        self.self_attn = attention
        self.layer_norm2 = LayerNorm(size)
        self.mlp = two_linear(size, inner, active)

    def forward(self, hidden_states: Handle, stretches: Stretches, tables: Tables | None) -> Handle:
        residual = hidden_states
        hidden_states = self.layer_norm1(hidden_states)
        hidden_states = self.self_attn(hidden_states, stretches, tables)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.layer_norm2(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


def weighed(rows: Handle, shares: Handle) -> Handle:
    """``(rows * shares[:, :, None]).sum(1)``."""
    product = rows * shares
    del rows, shares
    return summed_over(product, 1)


def interpolated(table: Embedding, patches: int) -> Handle:
    """Positions of patches, each mixed from four rows of a table (``get_vision_interpolation_indices_and_weights``)."""
    run = table.run
    interp_indices = made_by(run, OperationKind.ARANGE, (patches, 4), DType.INT64)
    interp_weights = made_by(run, OperationKind.ARANGE, (patches, 4, 1), DType.FP32)
    return weighed(table((patches, 4), interp_indices), interp_weights)


def joined_patches(x: Handle, side: int, wide: int) -> Handle:
    """Neighbours side by side, of rows of so many patches: a copy."""
    rows, size = x.shape
    x = x.view(rows // (side * wide), side, wide // side, side, size)
    return x.permute(0, 2, 1, 3, 4).reshape(-1, side * side * size)


def collected(image_features: Handle, pictures: int) -> Handle:
    """``torch.cat(torch.split(image_features, ...))``, a part for each picture."""
    each = image_features.shape[0] // pictures
    return concatenate(*image_features.split(*(each,) * pictures, dim=0), dim=0)
