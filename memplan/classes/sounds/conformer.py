"""A Conformer's layers: half a network, attention, convolutions along time, the other half.

(transformers 5.23: models/wav2vec2_conformer, wav2vec2_bert, seamless_m4t, seamless_m4t_v2)
"""

from collections.abc import Callable
from typing import Any

from memplan.classes.sounds.parts import GLU, FeedForward
from memplan.classes.translating.stacks import projected_heads
from memplan.dtypes import DType
from memplan.errors import UnsupportedOperationError
from memplan.families.towers.layers import tower_activation
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import (
    Attended,
    attention_function,
    biased_attention,
    matmul,
    two_sided_attention,
    unwidened_attention,
)
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.contractions import einsum
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.functional import padded
from memplan.graph.modules.grids import BatchNorm
from memplan.graph.modules.handles import Handle, made_by, seen_in
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.training.choices_of_kernels.kernels import AttentionKernel

SINES, ROTARY, TABLE = "relative", "rotary", "relative_key"
"""How attention knows where its frames are; the classes take any other name for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conformer:
    """Sizes and rates of a layer."""

    size: int
    inner: int
    heads: int
    activation: Activation
    kernel: int
    causal: bool
    """Convolutions see what was before alone, and have a layer norm."""
    distances: str
    positions: int
    """For how many positions sines are there at first."""
    around: int
    """Distances that the table has a row for."""
    dropout: float
    activation_dropout: float
    attention_dropout: float
    convolution_dropout: float


def read_conformer(
    config: ConfigReader, known: tuple[str, ...], *, causal: bool = False
) -> Conformer:
    """A layer of wav2vec 2.0's kin, of the ``known`` ways to tell positions apart."""
    size, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    config.divide("hidden_size", size, "num_attention_heads", heads)
    return Conformer(
        size=size, inner=config.integer("intermediate_size"), heads=heads,
        activation=tower_activation(config, "hidden_act"),
        kernel=config.integer("conv_depthwise_kernel_size"), causal=causal,
        **positions_of(config, known),
        dropout=config.number("hidden_dropout", default=0.0),
        activation_dropout=config.number("activation_dropout", default=0.0),
        attention_dropout=config.number("attention_dropout", default=0.0),
        convolution_dropout=config.number("conformer_conv_dropout", default=0.0),
    )  # fmt: skip


def positions_of(config: ConfigReader, known: tuple[str, ...]) -> dict[str, Any]:
    """How positions are told apart, and what that asks of the config."""
    name = config.text("position_embeddings_type", default="")
    around = 0
    if name == TABLE:
        sides = "left_max_position_embeddings", "right_max_position_embeddings"
        around = 1 + sum(config.integer(each, minimum=0) for each in sides)
    return {
        "distances": name if name in known else "", "around": around,
        "positions": config.integer("max_source_positions", default=1),
    }  # fmt: skip


class ConvolutionModule(Module):
    """Each frame alone, a gate, each channel along time, each frame again."""

    def __init__(self, kind: Conformer) -> None:
        size, padding = kind.size, 0 if kind.causal else (kind.kernel - 1) // 2
        self.before = kind.kernel - 1 if kind.causal else 0
        self.layer_norm = LayerNorm(size)
        self.pointwise_conv1 = Conv1d(size, 2 * size, 1, bias=False)
        self.glu = GLU()
        self.depthwise_conv = Conv1d(
            size, size, kind.kernel, padding=padding, groups=size, bias=False
        )
        if kind.causal:
            self.depthwise_layer_norm = LayerNorm(size)
        else:
            self.batch_norm = BatchNorm(size)
        self.activation = ActivationModule(kind.activation)
        self.pointwise_conv2 = Conv1d(size, size, 1, bias=False)
        self.dropout = Dropout(kind.convolution_dropout)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.layer_norm(hidden_states)
        hidden_states = hidden_states.transpose(1, 2)
        hidden_states = self.pointwise_conv1(hidden_states)
        hidden_states = self.glu(hidden_states)
        if "batch_norm" in self.children:
            hidden_states = self.depthwise_conv(hidden_states)
            hidden_states = self.batch_norm(hidden_states)
        else:
            batch, size, length = hidden_states.shape
            hidden_states = padded(hidden_states, (batch, size, length + self.before))
            hidden_states = self.depthwise_conv(hidden_states)
            hidden_states = self.depthwise_layer_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        hidden_states = self.activation(hidden_states)
        hidden_states = self.pointwise_conv2(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = hidden_states.transpose(1, 2)
        return hidden_states


class ConformerSelfAttention(Module):
    """Scores may get numbers of every head and pair."""

    block = LayerBlock.ATTENTION
    linear_q: Linear
    linear_k: Linear
    linear_v: Linear
    linear_out: Linear

    def __init__(self, kind: Conformer) -> None:
        size = kind.size
        self.head_size, self.distances = size // kind.heads, kind.distances
        for part in ("q", "k", "v", "out"):
            setattr(self, f"linear_{part}", Linear(size, size, bias=True, role=_ROLES[part]))
        self.dropout = Dropout(kind.attention_dropout)
        if kind.distances == SINES:
            self.linear_pos = Linear(size, size)
            self.pos_bias_u = Weight(kind.heads, self.head_size)
            self.pos_bias_v = Weight(kind.heads, self.head_size)
        if kind.distances == TABLE:
            self.distance_embedding = Embedding(kind.around, self.head_size)

    def forward(
        self, hidden_states: Handle, relative: tuple[Handle, ...] = (), mask: Handle | None = None
    ) -> Attended:
        batch, length, _ = hidden_states.shape
        query_key_states = hidden_states
        value_states = hidden_states
        if self.distances == ROTARY:
            query_key_states = self.rotated(query_key_states, *relative)
        query_states = self.in_heads(self.linear_q(query_key_states))
        key_states = projected_heads(self.linear_k(query_key_states), self.head_size)
        value_states = self.in_heads(self.linear_v(value_states))
        named: tuple[Handle, ...] = ()
        if self.distances == SINES:
            query_states, *named = self.shifted(query_states, *relative)  # type: ignore[assignment]
        elif self.distances == TABLE:
            named = self.looked_up(query_states)
        attn_output, attn_weights = self.attended(
            query_states, key_states, value_states, mask, *named[:1]
        )
        attn_output = attn_output.reshape(batch, length, -1)
        attn_output = self.linear_out(attn_output)
        return attn_output, attn_weights

    def in_heads(self, x: Handle) -> Handle:
        """``x.view(batch, tokens, -1, head_size).transpose(1, 2)``."""
        batch, length, _ = x.shape
        return x.view(batch, length, -1, self.head_size).transpose(1, 2)

    def rotated(self, hidden_states: Handle, cos: Handle, sin: Handle) -> Handle:
        """``_apply_rotary_embedding``."""
        batch, length, size = hidden_states.shape
        half = self.head_size // 2
        hidden_states = hidden_states.view(batch, length, -1, self.head_size)
        hidden_states = hidden_states.transpose(0, 1)
        rotated_states_begin = hidden_states.narrow(half)
        rotated_states_end = hidden_states.narrow(self.head_size - half)
        rotated_states = concatenate(-rotated_states_end, rotated_states_begin)
        hidden_states = (hidden_states * cos) + (rotated_states * sin)
        hidden_states = hidden_states.transpose(0, 1)
        hidden_states = hidden_states.view(batch, length, size)
        return hidden_states

    def shifted(self, query: Handle, sines: Handle) -> tuple[Handle, Handle]:
        """``_apply_relative_position_encoding``: scores of all distances, shifted row by row."""
        batch, heads, length, _ = query.shape
        proj = self.linear_pos(sines)
        proj = proj.view(1, sines.shape[1], heads, self.head_size)
        proj = proj.permute(0, 2, 3, 1)
        q_with_bias_v = query + self.of_heads(self.pos_bias_v)
        scores = matmul(q_with_bias_v, proj)
        distances = scores.shape[3]
        scores = padded(scores, (batch, heads, length, distances + 1))
        scores = scores.view(batch, heads, distances + 1, length)
        scores = scores.narrow(distances, dim=2).view(batch, heads, length, distances)
        scores = scores.narrow(length)
        scores = scores * 1.0
        query = query + self.of_heads(self.pos_bias_u)
        return query, scores

    def of_heads(self, weight: Weight) -> Handle:
        """``weight[None, :, None, :]``."""
        return self.operand(weight).unsqueeze(1).unsqueeze(0)

    def looked_up(self, query: Handle) -> tuple[Handle, ...]:
        """``_apply_relative_key_position_encoding``: a row for each pair, in the queries' dtype."""
        return self.pairs(query)[:1]

    def pairs(self, query: Handle) -> tuple[Handle, ...]:
        """Scores, and what its variables hold: distances, their rows, products of these."""
        shape = query.shape[2], query.shape[2]
        distance = made_by(self.run, OperationKind.SUB, shape, DType.INT64)
        distance = distance.apart(OperationKind.CLAMP)
        embedding = self.distance_embedding(shape, distance.apart(OperationKind.ADD))
        embedding = embedding.to(query.dtype)
        weights = einsum("bhld,lrd->bhlr", query, embedding)
        bias = weights * 1.0
        return bias, distance, embedding, weights

    def attended(
        self,
        query: Handle,
        key: Handle,
        value: Handle,
        mask: Handle | None,
        bias: Handle | None = None,
    ) -> Attended:
        """What the attention function makes of it.

        Raises ``UnsupportedOperationError`` for the flash-attention package, which takes no mask.
        """
        run, probability = self.run, self.dropout.probability
        if bias is None:
            attend = attention_function(run, unwidened_attention, causal=False)
            return attend(query, key, value, mask, probability)
        if run.kernels.attention is AttentionKernel.EAGER:
            return biased_attention(query, key, value, added(mask, bias), bias, probability)
        if run.kernels.attention.is_package:
            msg = "flash attention cannot add numbers of distances; choose attention sdpa or eager"
            raise UnsupportedOperationError(msg)
        bias = bias if mask is None else where(mask, bias)
        return two_sided_attention(query, key, value, bias.contiguous(), probability)


_ROLES = {
    "q": WeightRole.QUERY_KEY, "k": WeightRole.QUERY_KEY, "v": WeightRole.MATRIX,
    "out": WeightRole.ATTENTION_OUTPUT,
}  # fmt: skip


def added(mask: Handle | None, scores: Handle) -> Handle | None:
    """A mask of four dimensions, which is added as it is."""
    if mask is None:
        return None
    record = Tensor(mask.numel, scores.dtype, mask.record.storage)
    return Handle(mask.run, record, mask.shape)


def where(mask: Handle, scores: Handle) -> Handle:
    """``torch.where(mask, scores, lowest)``: keeps the mask."""
    run, made = scores.run, scores.run.tensor(scores.numel, scores.dtype)
    run.record(
        OperationKind.WHERE, (mask.record, scores.record), (made,), saves=(mask.record,),
        gradients=(Gradient.NONE, Gradient.FRESH),
    )  # fmt: skip
    return scores.like(made)


class ConformerEncoderLayer(Module):
    """``Wav2Vec2ConformerEncoderLayer`` and its kin."""

    attention_class: Callable[[Conformer], Module] = ConformerSelfAttention

    def __init__(self, kind: Conformer) -> None:
        size = kind.size
        self.ffn1_layer_norm, self.ffn1 = LayerNorm(size), network(kind)
        self.self_attn_layer_norm = LayerNorm(size)
        self.self_attn_dropout = Dropout(kind.attention_dropout)
        self.self_attn = self.attention_class(kind)
        self.conv_module = ConvolutionModule(kind)
        self.ffn2_layer_norm, self.ffn2 = LayerNorm(size), network(kind)
        self.final_layer_norm = LayerNorm(size)

    def forward(
        self, hidden_states: Handle, relative: tuple[Handle, ...], mask: Handle | None = None
    ) -> Handle:
        residual = hidden_states
        hidden_states = self.ffn1_layer_norm(hidden_states)
        hidden_states = self.ffn1(hidden_states)
        hidden_states = hidden_states * 0.5 + residual
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, relative, mask)
        hidden_states = self.self_attn_dropout(hidden_states)
        hidden_states = hidden_states + residual
        residual = hidden_states
        hidden_states = self.conv_module(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.ffn2_layer_norm(hidden_states)
        hidden_states = self.ffn2(hidden_states)
        hidden_states = hidden_states * 0.5 + residual
        hidden_states = self.final_layer_norm(hidden_states)
        return hidden_states


def network(kind: Conformer) -> FeedForward:
    """A layer's, of which half is added."""
    return FeedForward(
        kind.size, kind.inner, kind.activation, kind.activation_dropout, kind.dropout
    )


class ConformerAdapterLayer(Module):
    """Frames are made fewer twice, once for what attends and once for what goes past it."""

    def __init__(self, kind: Conformer, kernel: int, stride: int, dropout: float) -> None:
        size, padding = kind.size, stride // 2
        self.residual_layer_norm = LayerNorm(size)
        self.residual_conv = Conv1d(size, 2 * size, kernel, stride=stride, padding=padding)
        self.activation = GLU()
        self.self_attn_layer_norm = LayerNorm(size)
        self.self_attn_conv = Conv1d(size, 2 * size, kernel, stride=stride, padding=padding)
        self.self_attn = ConformerSelfAttention(kind)
        self.self_attn_dropout = Dropout(dropout)
        self.ffn_layer_norm, self.ffn = LayerNorm(size), network(kind)

    def forward(self, hidden_states: Handle) -> Handle:
        residual = self.residual_layer_norm(hidden_states)
        residual = residual.transpose(1, 2)
        residual = self.residual_conv(residual)
        residual = self.activation(residual)
        residual = residual.transpose(1, 2)
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = hidden_states.transpose(1, 2)
        hidden_states = self.self_attn_conv(hidden_states)
        hidden_states = self.activation(hidden_states)
        hidden_states = hidden_states.transpose(1, 2)
        hidden_states, _ = self.self_attn(hidden_states)
        hidden_states = self.self_attn_dropout(hidden_states)
        hidden_states = hidden_states + residual
        residual = hidden_states
        hidden_states = self.ffn_layer_norm(hidden_states)
        hidden_states = self.ffn(hidden_states) + residual
        return hidden_states


class RelativePositions(Module):
    """Sines of every distance: a buffer that the class makes anew, and keeps, in the dtype that its input has."""

    def __init__(self, kind: Conformer) -> None:
        self.kind = kind

    def forward(self, hidden_states: Handle) -> tuple[Handle, ...]:
        run, length, size = self.run, hidden_states.shape[1], self.kind.size
        dtype, positions = hidden_states.dtype, self.kind.positions
        loaded, rows = (2 * each - 1 for each in (positions, max(positions, length)))
        table = run.buffer(rows * size, dtype, loaded=(loaded * size, run.options.weights))
        return (seen_in(run, table, (1, 2 * length - 1, size)),)


class RotaryPositions(Module):
    """Cosines and sines, which the first forward pass makes and the class keeps."""

    def __init__(self, kind: Conformer) -> None:
        self.kind = kind

    def forward(self, hidden_states: Handle) -> tuple[Handle, ...]:
        run, length = self.run, hidden_states.shape[1]
        dtype, width = hidden_states.dtype, self.kind.size // self.kind.heads
        run.hold_buffer(width // 2, run.options.weights)
        both = run.buffer(2 * length * width, dtype, loaded=(0, dtype))
        return tuple(seen_in(run, both, (length, 1, 1, width)) for _ in range(2))


_POSITIONS: dict[str, Callable[[Conformer], Module]] = {
    SINES: RelativePositions, ROTARY: RotaryPositions,
}  # fmt: skip


class PositionTables(Module):
    """A module that has such tables, or none."""

    embed_positions: Module

    def add_positions(self, kind: Conformer) -> None:
        """Declare them."""
        made = _POSITIONS.get(kind.distances)
        if made is not None:
            self.embed_positions = made(kind)

    def relative(self, hidden_states: Handle) -> tuple[Handle, ...]:
        """What the layers are given."""
        if "embed_positions" not in self.children:
            return ()
        found: tuple[Handle, ...] = self.embed_positions(hidden_states)
        return found
