"""MiniMax: lightning attention, block by block, in some layers, attention in others; mixtures behind both.

A block attends within itself, and to all earlier blocks through the sum of their keys times values, which
every block decays and adds to. Every block's own scores are kept: the memory grows with the sequence times
the block.

(transformers 5.23: models/minimax)
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from memplan.classes.llama import (
    DecoderLayer,
    LayerKind,
    LlamaAttention,
    MistralAttention,
    SelfAttention,
    Window,
)
from memplan.classes.mixed.mixtures import MixtralSparseMoeBlock, MixtureBlock, MixtureModel
from memplan.classes.recurrent.hybrids import HybridLayer, layer_kinds
from memplan.classes.recurrent.mamba import Mixer
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import Linear, RMSNorm
from memplan.graph.modules.contractions import matmul
from memplan.graph.modules.functional import activated
from memplan.graph.modules.handles import Handle, made_by, seen_in
from memplan.graph.modules.rotary import Tables, concatenate
from memplan.graph.modules.unread import UnreadGraph
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock


class MiniMaxLightningAttention(Mixer):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader) -> None:
        attention = LlamaAttention(config, LayerKind())
        self.num_heads, self.head_dim = attention.num_heads, attention.head_dim
        self.block_size = config.integer("block_size")
        self.activation = read_activation(config, "hidden_act")
        hidden, width = config.integer("hidden_size"), self.num_heads * self.head_dim
        self.norm = RMSNorm(width)
        self.qkv_proj = Linear(hidden, 3 * width)
        self.out_proj = Linear(width, hidden)
        self.output_gate = Linear(hidden, width)

    def decays(self) -> tuple[Handle, Handle, Handle]:
        """Buffers: decays of queries, of keys and of the pairs of a block."""
        heads, block, run = self.num_heads, self.block_size, self.run
        dtype = run.options.weights
        run.buffer(heads, dtype)
        shapes = (heads, block, 1), (heads, block, 1), (1, heads, block, block)
        query, key, pairs = (
            Handle(run, run.buffer(heads * block * shape[-1], dtype), shape) for shape in shapes
        )
        return query, key, pairs

    def block_decay(self) -> Handle:
        """``torch.exp(-self.slope_rate * current_block_size)``."""
        shape, dtype = (self.num_heads, 1, 1), self.run.options.weights
        return made_by(self.run, OperationKind.EXP, shape, dtype)

    def forward(self, x: Handle) -> tuple[Handle, tuple[Handle, UnreadGraph]]:
        """The hidden states, and the sum of keys and values with its graph, which the layer holds."""
        batch_size, seq_len, _ = x.shape
        query_decay, key_decay, diagonal_decay = self.decays()
        qkv_states = activated(self.qkv_proj(x), self.activation)
        qkv_states = qkv_states.reshape(batch_size, seq_len, self.num_heads, 3 * self.head_dim)
        query_states, key_states, value_states = qkv_states.split(*(self.head_dim,) * 3)
        query_states = query_states.transpose(1, 2)
        key_states = key_states.transpose(1, 2)
        value_states = value_states.transpose(1, 2)
        shape = batch_size, self.num_heads, self.head_dim, self.head_dim
        attn_weights_inter = zeros(value_states, shape)
        outputs, graph = [], UnreadGraph(self.run)
        for start in range(0, seq_len, self.block_size):
            size = min(self.block_size, seq_len - start)
            current_query_states = query_states.narrow(size, 2)
            current_key_states = key_states.narrow(size, 2)
            current_value_states = value_states.narrow(size, 2)
            current_query_decay = shown(query_decay, size, 1)
            current_key_decay = shown(key_decay, size, 1)
            current_diagonal_decay = shown(shown(diagonal_decay, size, 2), size, 3)
            block_decay = self.block_decay()
            attn_weights_intra = matmul(current_query_states, current_key_states.transpose(-1, -2))
            attn_output_intra = matmul(
                attn_weights_intra * current_diagonal_decay, current_value_states
            )
            attn_output_inter = matmul(
                current_query_states * current_query_decay, attn_weights_inter
            )
            current_attn_output = attn_output_inter + attn_output_intra
            outputs.append(current_attn_output)
            with graph if start + size == seq_len else nullcontext():
                next_attn_weights_inter = matmul(
                    (current_key_states * current_key_decay).transpose(-1, -2),
                    current_value_states,
                )
                attn_weights_inter = attn_weights_inter * block_decay + next_attn_weights_inter
        attn_output = concatenate(*outputs, dim=-2)
        del outputs  # the same name in transformers
        attn_output = attn_output.transpose(1, 2)
        attn_output = attn_output.reshape(batch_size, seq_len, -1)
        attn_output = self.norm(attn_output)
        attn_output = self.output_gate(x).unary(OperationKind.SIGMOID) * attn_output
        attn_output = self.out_proj(attn_output)
        return attn_output, (attn_weights_inter, graph)


def zeros(like: Handle, shape: tuple[int, ...]) -> Handle:
    """``torch.zeros(shape, dtype=like.dtype)``."""
    return made_by(like.run, OperationKind.ZEROS, shape, like.dtype)


def shown(buffer: Handle, size: int, dim: int) -> Handle:
    """The first places of a dimension of what has no gradient."""
    shape = *buffer.shape[:dim], size, *buffer.shape[dim + 1 :]
    return seen_in(buffer.run, buffer.record, shape, buffer.strides)


class MiniMaxDecoderLayer(HybridLayer):
    attention_class: type[SelfAttention] = MistralAttention
    mixed = "self_attn"
    self_attn: SelfAttention

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        if kind.attends:
            self.self_attn = self.attention_class(config, kind)
        else:
            self.self_attn = MiniMaxLightningAttention(config)
        self.attends = kind.attends
        self.add_norms(config.integer("hidden_size"))
        self.mlp = self.network(config, kind)

    def network(self, config: ConfigReader, kind: LayerKind) -> MixtureBlock:  # noqa: ARG002
        return MiniMaxSparseMoeBlock(config)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        x = self.input_layernorm(x)
        residual = x
        x, _ = self.self_attn(x, tables, mask) if self.attends else self.self_attn(x)
        x = residual * 1.0 + x * 1.0
        x = self.post_attention_layernorm(x)
        residual = x
        x = self.mlp(x)
        x = residual * 1.0 + x * 1.0
        return x


class MiniMaxSparseMoeBlock(MixtralSparseMoeBlock):
    sealed = False


class MiniMaxModel(MixtureModel):
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = MiniMaxDecoderLayer

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        window = config.optional_integer("sliding_window")
        return [
            LayerKind(
                window if each == "full_attention" else None, attends=each == "full_attention"
            )
            for each in minimax_types(config)
        ]

    def masks(self, batch: int, length: int) -> dict[Window, Handle | None]:
        found = super().masks(batch, length)
        return {None: None, **found}


def minimax_types(config: ConfigReader) -> list[str]:
    """What mixes each layer's tokens."""
    count = config.layers("num_hidden_layers")
    return layer_kinds(config, "layer_types") or [
        "linear_attention" if number % 2 else "full_attention" for number in range(count)
    ]
