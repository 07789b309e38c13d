"""Llama and the decoders that follow it: RMS norms, rotary positions, a gated network.

(transformers 5.23: models/llama, models/mistral, models/qwen2, models/qwen3)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from memplan.classes.base import Base
from memplan.families.llama import read_activation
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import ActivationModule, Embedding, Linear, RMSNorm
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import causal_mask, position_ids
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import RotaryEmbedding, Tables, turn_function
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole

SLIDING = "sliding_attention"
Window = int | None
"""How many tokens a layer sees; None: all before."""
Masks = dict[Window, Handle | None]
"""What layers of each window are given."""


class LayerKind(NamedTuple):
    """What sets a layer apart from its neighbours."""

    window: Window = None
    turned: bool = True
    """Its heads know positions."""
    sparse: bool = False
    """Its network is a mixture of experts."""


class LlamaAttention(Module):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.turned = kind.turned
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", default=heads)
        self.head_dim = config.optional_integer("head_dim") or hidden // heads
        self.attention_dropout = config.number("attention_dropout")
        bias, output_bias = self.biases(config)
        width, matched = self.head_dim, WeightRole.QUERY_KEY
        self.q_proj = Linear(hidden, heads * width, bias=bias, role=matched)
        self.k_proj = Linear(hidden, kv_heads * width, bias=bias, role=matched)
        self.v_proj = Linear(hidden, kv_heads * width, bias=bias)
        self.o_proj = Linear(
            heads * width, hidden, bias=output_bias, role=WeightRole.ATTENTION_OUTPUT
        )

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        bias = config.flag("attention_bias")
        return bias, bias

    def heads(self, x: Handle) -> tuple[Handle, Handle]:
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        return query, key

    def split_query(self, query: Handle) -> Handle:
        return query

    def split_key(self, key: Handle) -> Handle:
        return key

    def attend(
        self, query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
    ) -> Attended:
        return attention_function(self.run)(query, key, value, mask, probability)

    def normed_query(self, query: Handle) -> Handle:
        return query

    def normed_key(self, key: Handle) -> Handle:
        return key

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query, key = self.heads(x)
        value = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        query = self.split_query(query)
        key = self.split_key(key)
        if self.turned:
            cos, sin = tables
            query, key = turn_function(self.run.kernels.rotary)(query, key, cos, sin)
            query = self.normed_query(query)
            key = self.normed_key(key)
        out, weights = self.attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.o_proj(out)
        out = self.dropped(out)
        return out, weights

    def dropped(self, out: Handle) -> Handle:
        return out


class MLP(Module):
    """A layer's network."""


class GatedMLP(MLP):
    def __init__(self, config: ConfigReader, intermediate_size: int | None = None) -> None:
        hidden = config.integer("hidden_size")
        inner = intermediate_size or config.integer("intermediate_size")
        bias = self.bias(config)
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.act_fn = ActivationModule(read_activation(config, "hidden_act", "hidden_activation"))

    def bias(self, config: ConfigReader) -> bool:  # noqa: ARG002
        return False

    def forward(self, x: Handle) -> Handle:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaMLP(GatedMLP):
    def bias(self, config: ConfigReader) -> bool:
        return config.flag("mlp_bias")


class LlamaDecoderLayer(Module):
    attention_class: type[LlamaAttention] = LlamaAttention
    mlp_class: Callable[[ConfigReader], MLP] = LlamaMLP
    norm_class: type[RMSNorm] = RMSNorm

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.self_attn = self.attention_class(config, kind)
        self.mlp = self.network(config, kind)
        self.input_layernorm = self.norm_class(hidden)
        self.post_attention_layernorm = self.norm_class(hidden)

    def network(self, config: ConfigReader, kind: LayerKind) -> Module:  # noqa: ARG002
        return self.mlp_class(config)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = residual + x
        return x


class LlamaModel(Base):
    layer_class: type[LlamaDecoderLayer] = LlamaDecoderLayer
    norm_class: type[RMSNorm] = RMSNorm
    embedding_class: type[Embedding] = Embedding

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        heads = config.integer("num_attention_heads")
        self.embed_tokens = self.embedding_class(
            config.integer("vocab_size"), hidden, role=WeightRole.TOKEN_TABLE
        )
        self.layers = LayerList(
            "decoder.layers", self.kinds(config), lambda kind: self.layer_class(config, kind)
        )
        self.norm = self.norm_class(hidden)
        self.norm.segment = "decoder.norm", ModelPart.NORM
        self.rotary_emb = RotaryEmbedding(config.optional_integer("head_dim") or hidden // heads)

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        return [LayerKind()] * config.layers("num_hidden_layers")

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        positions = position_ids(self.run, batch, length)
        masks = self.masks(batch, length)
        x = embeds
        tables = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, tables, masks[layer.kind.window])
        x = self.norm(x)
        return x

    def embedded(self, batch: int, length: int) -> Handle:
        return token_embeddings(self.embed_tokens, batch, length)

    def masks(self, batch: int, length: int) -> Masks:
        windows = sorted({kind.window for kind in self.layers.kinds}, key=bool)
        return {each: causal_mask(self.run, batch, length, window=each) for each in windows}


class MistralAttention(LlamaAttention):
    def biases(self, config: ConfigReader) -> tuple[bool, bool]:  # noqa: ARG002
        return False, False


class MistralDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = MistralAttention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP


class MistralModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = MistralDecoderLayer

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        return listed_windows(config, config.optional_integer("sliding_window"))


class Qwen2Attention(LlamaAttention):
    def biases(self, config: ConfigReader) -> tuple[bool, bool]:  # noqa: ARG002
        return True, False


class Qwen2DecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = Qwen2Attention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP


class Qwen2Model(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = Qwen2DecoderLayer

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        uses = config.flag("use_sliding_window")
        return listed_windows(config, config.optional_integer("sliding_window") if uses else None)


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.q_norm = RMSNorm(self.head_dim)
        self.k_norm = RMSNorm(self.head_dim)

    def heads(self, x: Handle) -> tuple[Handle, Handle]:
        batch, length, _ = x.shape
        query = self.q_norm(self.q_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        return query, key


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = Qwen3Attention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP


class Qwen3Model(Qwen2Model):
    layer_class: type[LlamaDecoderLayer] = Qwen3DecoderLayer


def listed_windows(config: ConfigReader, window: Window) -> Sequence[LayerKind]:
    """Each layer's window: as ``layer_types`` says, or all the same."""
    count, types = config.layers("num_hidden_layers"), config.texts("layer_types")
    if not types:
        return [LayerKind(window)] * count
    return [LayerKind(window if types[at] == SLIDING else None) for at in range(count)]


def token_embeddings(table: Embedding, batch: int, length: int) -> Handle:
    """Rows of the token table, behind the tokens that an adapter sets before every sequence."""
    run = table.run
    adaptation = run.adaptation
    prompts = 0 if adaptation is None else adaptation.num_prompts
    x = table((batch, length - prompts), None)
    if prompts and adaptation is not None:
        x = Handle(run, adaptation.prompted(run, x.record), (batch, length, table.width))
    run.embedded(x.record, run.parameters[table.weight])
    return x
