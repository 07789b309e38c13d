"""Pegasus-X: Pegasus for long documents, without biases in attention or tables of positions.

Its encoder's tokens attend in blocks to themselves and to a few global tokens, which are a stream of their own
that every layer reads and makes anew with the same weights. Every other layer pads tokens by half a block on
either side, so that blocks overlap. (transformers 5.23, models/pegasus_x/modeling_pegasus_x.py)
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from memplan.classes.translating.bart import BartStack, Translator
from memplan.classes.translating.layers import (
    BartAttention,
    EncoderLayerParts,
    LayerParts,
    MBartDecoderLayer,
    Projections,
)
from memplan.classes.translating.stacks import ConditionalGeneration, DecodedStates, Tasks, shifted
from memplan.classes.translating.tables import ScaledWordEmbedding
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import Embedding, LayerNorm, dropout
from memplan.graph.modules.contractions import einsum
from memplan.graph.modules.functional import padded, softmax
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import padded_mask, padding
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.unread import unread_graph
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import NormPlacement
from memplan.model.parameters import ModelPart
from memplan.units import ceil_div

Probabilities = tuple[Handle, Handle]
"""Of the global tokens and of the others."""


class PegasusXSinusoidalPositionalEmbedding(Module):
    """Sinusoids, computed for every batch: there is no table."""

    def __init__(self, config: ConfigReader) -> None:
        self.width = config.integer("d_model")

    def forward(self, length: int) -> Handle:
        run, half = self.run, (length, self.width // 2)
        position_ids = made_by(run, OperationKind.ARANGE, (length, 1), DType.INT64)
        pe = made_by(run, OperationKind.ZEROS, (1, length, self.width), run.compute)
        for kind in (OperationKind.SIN, OperationKind.COS):
            position_ids.apart(OperationKind.MUL, dtype=run.compute, shape=half).apart(kind)
        return pe


class PegasusXAttention(BartAttention):
    has_biases = False


class PegasusXGlobalLocalAttention(Projections):
    """Of tokens to their block and to the global ones, and of these to all."""

    has_biases = False

    def shape(self, tensor: Handle) -> Handle:
        """Copied head by head."""
        batch, length, _ = tensor.shape
        return (
            tensor.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2).contiguous()
        )

    def forward(
        self, x: Handle, global_x: Handle, mask: Handle, block_size: int
    ) -> tuple[Handle, Handle, Probabilities]:
        batch, length, width = x.shape
        local_q = self.shape(self.q_proj(x) * 1.0)
        local_k = self.shape(self.k_proj(x))
        local_v = self.shape(self.v_proj(x))
        global_q = self.shape(self.q_proj(global_x) * 1.0)
        global_k = self.shape(self.k_proj(global_x))
        global_v = self.shape(self.v_proj(global_x))
        global_attn_output, global_attn_probs = self.global_representations(
            global_q, (global_k, local_k), (global_v, local_v), mask
        )
        local_attn_output, local_attn_probs = self.local_representations(
            local_q, (global_k, local_k), (global_v, local_v), mask, block_size
        )
        global_attn_output = global_attn_output.transpose(1, 2).contiguous()
        global_attn_output = global_attn_output.view(batch, -1, width)
        global_attn_output = self.out_proj(global_attn_output)
        local_attn_output = local_attn_output.permute(0, 2, 3, 1, 4).contiguous()
        local_attn_output = local_attn_output.view(batch, length, width)
        local_attn_output = self.out_proj(local_attn_output)
        return local_attn_output, global_attn_output, (global_attn_probs, local_attn_probs)

    def global_representations(
        self,
        global_q: Handle,
        keys: tuple[Handle, Handle],
        values: tuple[Handle, Handle],
        mask: Handle,
    ) -> Probabilities:
        """``compute_global_attention_representations``."""
        global_and_local_k = concatenate(*keys, dim=2)
        global_and_local_v = concatenate(*values, dim=2)
        batch, _, length, _ = global_and_local_k.shape
        extended_mask = padded(mask, (batch, length))
        attn_weights = einsum("bhgf,bhxf->bhgx", global_q, global_and_local_k)
        attn_weights = attn_weights + extended_mask.unsqueeze(1).unsqueeze(1)
        attn_probs = softmax(attn_weights)
        attn_probs = dropout(attn_probs, self.dropout)
        attn_output = einsum("bhgx,bhxf->bhgf", attn_probs, global_and_local_v)
        return attn_output, attn_probs

    def local_representations(
        self,
        local_q: Handle,
        keys: tuple[Handle, Handle],
        values: tuple[Handle, Handle],
        mask: Handle,
        block_size: int,
    ) -> Probabilities:
        """``compute_local_attention_representations``."""
        (global_k, local_k), (global_v, local_v) = keys, values
        batch, heads, length, width = local_q.shape
        num_blocks, num_globals = length // block_size, global_k.shape[2]
        blocks = batch, heads, num_blocks, block_size, width
        blocked_local_q = local_q.view(*blocks)
        blocked_local_k = local_k.view(*blocks)
        blocked_local_v = local_v.seen_as(*blocks)
        extended_mask = padded(
            mask.view(batch, num_blocks, block_size), (batch, num_blocks, num_globals + block_size)
        )
        blocked_local2global = einsum("bhnkf,bhgf->bhnkg", blocked_local_q, global_k)
        blocked_local2local = einsum("bhnkf,bhnxf->bhnkx", blocked_local_q, blocked_local_k)
        attn_weights = concatenate(blocked_local2global, blocked_local2local)
        attn_weights = attn_weights + extended_mask.unsqueeze(1).unsqueeze(3)
        attn_probs = softmax(attn_weights)
        attn_probs = dropout(attn_probs, self.dropout)
        local2global_attn_probs = attn_probs.narrow(num_globals)
        local2local_attn_probs = attn_probs.narrow(block_size)
        local2global_attn_output = einsum("bhnkg,bhgf->bhnkf", local2global_attn_probs, global_v)
        local2local_attn_output = einsum(
            "bhnkx,bhnxf->bhnkf", local2local_attn_probs, blocked_local_v
        )
        attn_output = local2global_attn_output + local2local_attn_output
        return attn_output, attn_probs


class PegasusXEncoderLayer(EncoderLayerParts):
    placement = NormPlacement.PRE
    attention_class = PegasusXGlobalLocalAttention
    hands_on = 1

    def __init__(self, config: ConfigReader, *, staggered: bool) -> None:
        hidden = config.integer("d_model")
        self.self_attn = self.attention_class(config, "encoder")
        self.self_attn_layer_norm = LayerNorm(hidden)
        self.global_self_attn_layer_norm = LayerNorm(hidden)
        self.read_rates(config)
        self.add_network(config, "encoder")
        self.staggered, self.block_size = staggered, config.integer("block_size")

    def forward(self, x: Handle, global_x: Handle, mask: Handle) -> tuple[Handle, Handle]:
        residual = x
        global_residual = global_x
        x = self.self_attn_layer_norm(x)
        global_x = self.global_self_attn_layer_norm(global_x)
        batch, length, width = x.shape
        if self.staggered:
            x = padded(x, (batch, length + self.block_size, width))
            mask = padded(mask, (batch, length + self.block_size))
        x, global_x, _ = self.self_attn(x, global_x, mask, self.block_size)
        if self.staggered:
            x = x.narrow(length, dim=1)
        x = dropout(x, self.dropout)
        x = residual + x
        global_x = dropout(global_x, self.dropout)
        global_x = global_residual + global_x
        residual = x
        x = self.final_layer_norm(x)
        x = self.activation_fn(self.fc1(x))
        x = dropout(x, self.activation_dropout)
        x = self.fc2(x)
        x = dropout(x, self.dropout)
        x = residual + x
        global_residual = global_x
        global_x = self.final_layer_norm(global_x)
        global_x = self.activation_fn(self.fc1(global_x))
        global_x = dropout(global_x, self.activation_dropout)
        global_x = self.fc2(global_x)
        global_x = dropout(global_x, self.dropout)
        global_x = global_residual + global_x
        return x, global_x


class PegasusXDecoderLayer(MBartDecoderLayer):
    attention_class = PegasusXAttention


class CutLayerNorm(LayerNorm):
    """Of the tokens that were given, without those that filled the last block."""

    given: int
    """So many of each sequence."""

    def forward(self, x: Handle) -> Handle:
        x = x.narrow(self.given, dim=1)
        return super().forward(x)


class PegasusXStack(BartStack):
    table_class: type[Embedding] = ScaledWordEmbedding
    positions_class: Callable[[ConfigReader], Module] = PegasusXSinusoidalPositionalEmbedding
    norms_embedding = False
    norms_last = True


class PegasusXEncoder(PegasusXStack):
    def __init__(self, config: ConfigReader) -> None:
        key = "block_size"
        self.block_size = config.integer(key)
        if self.block_size % 2:
            error = config.fail(key, f"{self.block_size} is odd, but blocks are halved")
            raise error
        hidden = config.integer("d_model")
        self.dropout = config.number("dropout", default=0.1)
        self.embed_tokens = self.table_class(config.integer("vocab_size"), hidden)
        self.embed_global = Embedding(config.integer("num_global_tokens"), hidden)
        self.embed_positions = self.positions_class(config)
        kinds = self.kinds(config, config.layers("encoder_layers"))
        self.layers = LayerList(
            "encoder.layers", kinds, lambda kind: self.layer(config, kind), streams=True
        )
        self.layer_norm: CutLayerNorm = CutLayerNorm(hidden)
        self.layer_norm.segment = "encoder.norm", ModelPart.NORM

    def kinds(self, config: ConfigReader, count: int) -> Sequence[Hashable]:
        """Every other layer's blocks begin half a block earlier."""
        staggers = config.flag("stagger_local_blocks")
        return [staggers and number % 2 == 1 for number in range(count)]

    def layer(self, config: ConfigReader, kind: Any) -> LayerParts:
        """One of a kind."""
        return PegasusXEncoderLayer(config, staggered=kind)

    def forward(self, batch: int, length: int) -> Handle:
        run = self.run
        run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length))
        embed_pos = self.embed_positions(length)
        x = inputs_embeds + embed_pos
        x = dropout(x, self.dropout)
        attention_mask = made_by(run, OperationKind.ONES, (batch, length), x.dtype)
        inverted_mask = attention_mask.apart(OperationKind.SUB)
        attention_mask = inverted_mask.apart(
            OperationKind.MASKED_FILL, inverted_mask.apart(OperationKind.TO, dtype=DType.BOOL)
        )
        whole = ceil_div(length, self.block_size) * self.block_size
        if whole != length:
            x = padded(x, (batch, whole, x.shape[-1]))
            attention_mask = padded(attention_mask, (batch, whole))
        numbers = made_by(
            run, OperationKind.ARANGE, (self.embed_global.weight.shape[0],), DType.INT64
        )
        global_x = self.embed_global((batch, numbers.numel), numbers)
        for encoder_layer in self.layers:
            x, global_x = encoder_layer(x, global_x, attention_mask)
        _unread = unread_graph(run)
        self.layer_norm.given = length
        x = self.layer_norm(x)
        self.returned()
        return x


class PegasusXDecoder(PegasusXStack):
    name = "decoder"
    layer_class: Callable[[ConfigReader], LayerParts] = PegasusXDecoderLayer

    def forward(
        self,
        batch: int,
        length: int,
        ids: Handle,
        memory: Handle,
        attention_mask: Handle | None = None,
    ) -> Handle:
        self.run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length), ids)
        attention_mask = padding(self.run, batch, length)
        mask = padded_mask(self.run, batch, length)
        position_ids = self.embed_positions(length)
        x = inputs_embeds + position_ids
        x = dropout(x, self.dropout)
        for decoder_layer in self.layers:
            x = decoder_layer(x, mask, memory)
        return self.closed(x)


class PegasusXForConditionalGeneration(ConditionalGeneration):
    def decoder_ids(self, batch: int) -> Handle:
        """The labels, shifted before the base model is called."""
        return shifted(self, batch)


class PegasusXModel(Translator):
    eager_only = True
    encoder_class: Callable[[ConfigReader], BartStack] = PegasusXEncoder
    decoder_class: Callable[[ConfigReader], BartStack] = PegasusXDecoder
    tasks: ClassVar[Tasks] = {
        Task.SEQ2SEQ_LM: PegasusXForConditionalGeneration,
        Task.BASE: DecodedStates,
    }
