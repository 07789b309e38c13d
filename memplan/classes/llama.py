"""Llama and the decoders that follow it: RMS norms, rotary positions, a gated network.

(transformers 5.23: models/llama, models/mistral, models/qwen2, models/qwen3)
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from memplan.classes.base import Base
from memplan.families.llama import has_long_frequencies, read_activation, rotated_dim
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import ActivationModule, Embedding, Linear, Norm, RMSNorm, clamp_
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import causal_mask, position_ids
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import (
    RotaryEmbedding,
    Tables,
    Turn,
    apply_rotary,
    turn_function,
)
from memplan.model.attention import AttentionForm, OutputGate, Projection
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole

if TYPE_CHECKING:
    from memplan.model.mixers import AbsentSpec, TokenMixer
    from memplan.model.mixtures import MixtureSpec

Heads = tuple[Handle, Handle, Handle]
"""Queries, keys and values of (batch, heads, tokens, width)."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""What ``layer_types`` calls layers without and with a window."""
Window = int | None
"""How many tokens a layer sees; None: all before."""


class LayerKind(NamedTuple):
    """What sets a layer apart from its neighbours."""

    window: Window = None
    turned: bool = True
    """Its heads know positions."""
    sparse: bool = False
    """Its network is a mixture of experts."""
    heads: int = 0
    """Its own number of query heads; 0: the config's."""
    attends: bool = True
    """Attention mixes its tokens, and nothing in its place."""


class SelfAttention(Module):
    """What makes a layer's tokens see one another."""

    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        raise NotImplementedError

    def facts(self) -> "TokenMixer":
        """What others read of it."""
        raise NotImplementedError


class HeadAttention(SelfAttention):
    """Queries, keys and values of heads that are independent of one another."""

    projection = Projection.SEPARATE
    """Which of queries, keys and values have a matrix of their own."""
    output = "o_proj"
    """What it calls the layer that leads back to the hidden size."""
    softcap = False
    """Scores go through a tanh."""
    norms_by_head = False
    """Each head of queries and keys has a norm of its own."""
    clip_qkv = False
    """Queries, keys and values are clamped in place."""
    output_gate: OutputGate = OutputGate.NONE
    """What its output is multiplied by."""
    form = AttentionForm.INTERFACE
    """Whose steps it takes: transformers' shared functions', or its own."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    """Width of a head of values, where it is another."""
    attention_dropout: float
    turned = False
    """Its heads know positions."""

    @property
    def value_dim(self) -> int:
        """Width of a head of values."""
        return self.v_head_dim or self.head_dim


class LlamaAttention(HeadAttention):
    turn: Turn = staticmethod(apply_rotary)

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.turned = kind.turned
        self.num_heads, self.num_kv_heads = head_counts(config)
        self.head_dim = head_width(config)
        self.attention_dropout = config.number("attention_dropout")
        self.add_projections(config)

    def add_projections(self, config: ConfigReader) -> None:
        hidden, heads, kv_heads = config.integer("hidden_size"), self.num_heads, self.num_kv_heads
        bias, output_bias = self.biases(config)
        width, matched = self.head_dim, WeightRole.QUERY_KEY
        self.q_proj = Linear(hidden, heads * width, bias=bias, role=matched)
        self.k_proj = Linear(hidden, kv_heads * width, bias=bias, role=matched)
        self.v_proj = Linear(hidden, kv_heads * self.value_dim, bias=bias)
        role, width = WeightRole.ATTENTION_OUTPUT, self.value_dim
        setattr(self, self.output, Linear(heads * width, hidden, bias=output_bias, role=role))

    def project_out(self, x: Handle) -> Handle:
        made: Handle = self.children[self.output](x)
        return made

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        bias = config.flag("attention_bias")
        return bias, bias

    def projected(self, x: Handle) -> Heads:
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, -1, self.value_dim).transpose(1, 2)
        return query, key, value

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
        query, key, value = self.projected(x)
        if self.turned:
            cos, sin = tables
            query, key = turn_function(self.run.kernels.rotary, self.turn)(query, key, cos, sin)
            query = self.normed_query(query)
            key = self.normed_key(key)
        out, weights = self.attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.gated(out, x)
        out = self.project_out(out)
        out = self.dropped(out)
        return out, weights

    def gated(self, out: Handle, x: Handle) -> Handle:  # noqa: ARG002
        return out

    def dropped(self, out: Handle) -> Handle:
        return out


class Network(Module):
    """What stands behind a layer's attention."""

    def facts(self) -> "FeedForwardSpec | MixtureSpec":
        """What others read of it."""
        raise NotImplementedError


class MLP(Network):
    """A layer's network."""

    down_proj: Linear
    is_gated = False
    is_fused = False

    def facts(self) -> "FeedForwardSpec":
        down = self.last
        return FeedForwardSpec(
            intermediate_size=down.in_features, activation=self.activation_kind, gated=self.is_gated,
            fused_gate_up=self.is_fused, bias="bias" in down.weights,
        )  # fmt: skip

    @property
    def last(self) -> Linear:
        """The layer that leads back to the hidden size."""
        return self.down_proj

    @property
    def activation_kind(self) -> Activation:
        """Its nonlinearity."""
        found = (each for each in self.children.values() if isinstance(each, ActivationModule))
        return next(found).kind


class GatedMLP(MLP):
    is_gated = True

    def __init__(
        self, config: ConfigReader, intermediate_size: int | None = None, *, hidden: int = 0
    ) -> None:
        hidden = hidden or config.integer("hidden_size")
        inner = intermediate_size or config.integer("intermediate_size")
        bias = self.bias(config)
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.act_fn = ActivationModule(read_activation(config, "hidden_act", "hidden_activation"))

    def bias(self, config: ConfigReader) -> bool:  # noqa: ARG002
        return False

    def forward(self, x: Handle) -> Handle:
        return self.down_proj(self.gated(x))

    def gated(self, x: Handle) -> Handle:
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)


class LlamaMLP(GatedMLP):
    def bias(self, config: ConfigReader) -> bool:
        return config.flag("mlp_bias")


class PlainMLP(MLP):
    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        bias = self.bias(config)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.act_fn = self.activation(config)

    def bias(self, config: ConfigReader) -> bool:
        return config.flag("mlp_bias")

    def activation(self, config: ConfigReader) -> Module:
        return ActivationModule(read_activation(config, "hidden_act"))

    def forward(self, x: Handle) -> Handle:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class GateUpMLP(MLP):
    """Gate and up in one matrix (Phi-3, GLM)."""

    is_gated = is_fused = True

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.gate_up_proj = Linear(hidden, 2 * inner)
        self.down_proj = Linear(inner, hidden)
        self.activation_fn = ActivationModule(read_activation(config, "hidden_act"))

    def forward(self, x: Handle) -> Handle:
        up_states = self.gate_up_proj(x)
        gate, up_states = halves(up_states)
        up_states = self.multiplied(gate, up_states)
        return self.down_proj(up_states)

    def multiplied(self, gate: Handle, up_states: Handle) -> Handle:
        return up_states * self.activation_fn(gate)


def halves(x: Handle) -> tuple[Handle, Handle]:
    """``x.chunk(2, dim=-1)``."""
    width = x.shape[-1] // 2
    first, second = x.split(width, width)
    return first, second


class DecoderLayer(Module):
    placement = NormPlacement.PRE
    residual_dropout = 0.0
    """On what attention and network give."""

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        raise NotImplementedError

    def network_facts(self) -> "FeedForwardSpec | MixtureSpec | AbsentSpec":
        """What others read of its network."""
        from memplan.model.mixers import NOTHING

        found = next((each for each in self.children.values() if isinstance(each, Network)), None)
        return NOTHING if found is None else found.facts()


class LlamaDecoderLayer(DecoderLayer):
    attention_class: type[SelfAttention] = LlamaAttention
    mlp_class: Callable[[ConfigReader], MLP] = LlamaMLP
    norm_class: Callable[[int], Norm] = RMSNorm
    second = "post_attention_layernorm"
    """What it calls the norm before its network."""
    fed = "mlp"
    """What it calls its network."""

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.self_attn = self.attention_class(config, kind)
        self.mlp = self.network(config, kind)
        self.add_norms(config.integer("hidden_size"))

    def network(self, config: ConfigReader, kind: LayerKind) -> Module:  # noqa: ARG002
        return self.mlp_class(config)

    def add_norms(self, hidden: int) -> None:
        self.input_layernorm = self.norm_class(hidden)
        self.post_attention_layernorm = self.norm_class(hidden)

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = residual + self.branch(x)
        residual = x
        x = self.children[self.second](x)
        x = self.children[self.fed](x)
        x = residual + self.branch(x)
        return x

    def branch(self, x: Handle) -> Handle:
        """What is added to the residual of what attention or network give."""
        return x


class Decoder(Base):
    """What others read of a base model, and the masks and embeddings that most have in common."""

    last = "norm"
    """What it calls the norm behind its layers."""
    listed = "layers"
    """What it calls its layers."""
    embeds_more = False
    """Its embedding is more than a table of tokens."""
    steps = False
    """There are no tokens, but steps of a trajectory."""
    num_streams = 1
    """Residual streams side by side."""
    patch_features = 0
    """Inputs of a linear layer for image patches, which a batch of text leaves unused."""
    extra_rows = 0
    """Rows of its token table beside the vocabulary's."""
    positions = ""
    """What it calls its table of positions, if it has one."""
    embedding_dropout = 0.0
    """On its embeddings, where that is no module."""
    hidden_size = 0
    """Width of its hidden states, where its table's is another."""
    eager_only = False
    """The class has no other attention than the one written out in Python."""
    checkpoints = True
    """The class can run its layers again in backward."""
    head_bias = False
    """The matrix that gives the logits has a bias."""
    unnamed_loss = False
    """The class of its language model is named ``...LMHeadModel``, for which transformers knows no loss."""
    output_router_logits = False
    """A loss on all layers' routers is added."""
    two_sided = False
    """Tokens see those behind them too."""
    block_masks = False
    """Tokens of a picture see one another, so that every pair's mask is made (Gemma 3)."""
    masked: Sequence[Window] = (None,)
    """Windows of which it makes a mask."""

    def masks(self, batch: int, length: int) -> dict[Window, Handle | None]:
        run, blocks = self.run, self.block_masks
        return {
            each: causal_mask(run, batch, length, window=each, blocks=blocks)
            for each in self.masked
        }

    @property
    def layer_list(self) -> LayerList:
        """Its layers, under the name that its type gives them."""
        found = self.children[self.listed]
        assert isinstance(found, LayerList)
        return found

    @property
    def last_norm(self) -> Module | None:
        """The norm behind its layers, if it has one."""
        return self.children.get(self.last)

    def embedded(self, batch: int, length: int) -> Handle:
        table = self.children[self.table]
        assert isinstance(table, Embedding)
        return token_embeddings(table, batch, length)


class LlamaModel(Decoder):
    norm: Norm
    layers: LayerList
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = LlamaDecoderLayer
    norm_class: Callable[[int], Norm] = RMSNorm
    embedding_class: type[Embedding] = Embedding
    rotary_class: type[RotaryEmbedding] = RotaryEmbedding

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        rows, role = config.integer("vocab_size"), WeightRole.TOKEN_TABLE
        setattr(self, self.table, self.embedding_class(rows, hidden, role=role))
        kinds = self.kinds(config)
        self.windows: list[Window] = sorted({kind.window for kind in kinds}, key=bool)
        self.masked = self.windows
        layers = LayerList("decoder.layers", kinds, lambda kind: self.layer_class(config, kind))
        setattr(self, self.listed, layers)
        final = self.norm_class(hidden)
        final.segment = "decoder.norm", ModelPart.NORM
        setattr(self, self.last, final)
        self.add_rotary(config)

    def add_rotary(self, config: ConfigReader) -> None:
        self.rotary_emb = self.rotary_class(self.rotary_width(config))
        self.rotary_emb.switches = has_long_frequencies(config)

    def rotary_width(self, config: ConfigReader) -> int:
        return head_width(config)

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        return [LayerKind()] * config.layers("num_hidden_layers")

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        embeds, *_ = self.joined(embeds)
        positions = self.counted(batch, length)
        masks = self.masks(batch, length)
        x = self.entered(embeds) if received is None else embeds
        tables = self.tables(x, positions)
        for layer in self.layer_list:
            window = layer.kind.window
            x = layer(x, tables[window], masks[window], unread=positions)
        x = self.children[self.last](x)
        return x

    def counted(self, batch: int, length: int) -> Any:
        """Positions, which its layers are given too; None: these are given none."""
        return position_ids(self.run, batch, length)

    def entered(self, embeds: Handle) -> Handle:
        """What its layers are given of the embeddings, which keep their name."""
        return embeds

    def tables(self, x: Handle, positions: Handle) -> dict[Window, Tables]:
        return dict.fromkeys(self.windows, self.rotary_emb(x, positions))


class LocalTablesModel(LlamaModel):
    """Layers with a window have rotary tables of their own (Gemma 3, OLMo 3)."""

    def tables(self, x: Handle, positions: Handle) -> dict[Window, Tables]:
        return {each: self.rotary_emb(x, positions, each) for each in self.windows}


class RowsAttention(LlamaAttention):
    """Queries, keys and values are all there, each in rows, before the first is split into heads."""

    q_norm: Norm
    k_norm: Norm

    def rows(self, x: Handle) -> Heads:
        """Each, normed or clamped where the class does so."""
        return self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)

    def projected(self, x: Handle) -> Heads:
        batch, length, _ = x.shape
        query, key, value = self.rows(x)
        query = query.view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = key.view(batch, length, -1, self.head_dim).transpose(1, 2)
        value = value.view(batch, length, -1, self.head_dim).transpose(1, 2)
        return query, key, value


class HeadsFirstAttention(LlamaAttention):
    """All are split into heads before the first is normed, and turned around behind that."""

    q_norm: Norm
    k_norm: Norm

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.use_qk_norm = config.flag("use_qk_norm")
        if self.use_qk_norm:
            self.add_norms()

    def add_norms(self) -> None:
        self.q_norm = RMSNorm(self.head_dim)
        self.k_norm = RMSNorm(self.head_dim)

    def projected(self, x: Handle) -> Heads:
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, -1, self.head_dim)
        key = self.k_proj(x).view(batch, length, -1, self.head_dim)
        value = self.v_proj(x).view(batch, length, -1, self.head_dim)
        if self.use_qk_norm:
            query = self.q_norm(query)
            key = self.k_norm(key)
        query = query.transpose(1, 2)
        key = key.transpose(1, 2)
        value = value.transpose(1, 2)
        return query, key, value


def clamped_rows(query: Handle, key: Handle, value: Handle) -> Heads:
    """All three clamped in place (``clip_qkv``)."""
    return clamp_(query), clamp_(key), clamp_(value)


class MistralAttention(LlamaAttention):
    def biases(self, config: ConfigReader) -> tuple[bool, bool]:  # noqa: ARG002
        return False, False


class MistralDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = MistralAttention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP


class MistralModel(LlamaModel):
    layer_class: type[LlamaDecoderLayer] = MistralDecoderLayer

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        return list(
            map(LayerKind, layer_windows(config, config.optional_integer("sliding_window")))
        )


class Qwen2Attention(LlamaAttention):
    def biases(self, config: ConfigReader) -> tuple[bool, bool]:  # noqa: ARG002
        return True, False


class Qwen2DecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = Qwen2Attention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP


class WholeMaskModel(LlamaModel):
    """A mask of all that came before is made even where no layer reads it (Qwen 2)."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.masked = sorted({None, *self.windows}, key=bool)


class BothMasksModel(LlamaModel):
    """So is a mask of the window's (Gemma 2)."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.masked = sorted({None, config.optional_integer("sliding_window")}, key=bool)


class Qwen2Model(WholeMaskModel):
    layer_class: type[LlamaDecoderLayer] = Qwen2DecoderLayer

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        uses = config.flag("use_sliding_window")
        window = config.optional_integer("sliding_window") if uses else None
        return list(map(LayerKind, layer_windows(config, window)))


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.q_norm = RMSNorm(self.head_dim)
        self.k_norm = RMSNorm(self.head_dim)

    def projected(self, x: Handle) -> Heads:
        batch, length, _ = x.shape
        query = self.q_norm(self.q_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        return query, key, value


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = Qwen3Attention
    mlp_class: Callable[[ConfigReader], MLP] = GatedMLP


class Qwen3Model(Qwen2Model):
    layer_class: type[LlamaDecoderLayer] = Qwen3DecoderLayer


def head_counts(config: ConfigReader) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    config.divide("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    return heads, kv_heads


def head_width(config: ConfigReader) -> int:
    """What a head has: ``head_dim``, or its share of the hidden size."""
    found = config.optional_integer("head_dim")
    if found is not None:
        return found
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return config.divide("hidden_size", hidden, "num_attention_heads", heads)


def rotated_width(config: ConfigReader, share: float) -> int:
    """How many columns of a head are turned: ``partial_rotary_factor``, or a share of them."""
    return rotated_dim(config, head_width(config), share)


def layer_windows(config: ConfigReader, window: Window, pattern: int = 0) -> list[Window]:
    """Each layer's window: as ``layer_types`` says, or but for every ``pattern``-th layer, which has none."""
    count = config.layers("num_hidden_layers")
    if window is None:
        return [None] * count
    types = config.texts("layer_types")
    if types:
        check_types(config, types, count)
        return [window if types[at] == SLIDING else None for at in range(count)]
    keys = "sliding_window_pattern", "_sliding_window_pattern"
    period = config.integer(*keys, default=pattern) if pattern else 0
    return [window if period == 0 or (at + 1) % period else None for at in range(count)]


def check_types(config: ConfigReader, types: Sequence[str], count: int) -> None:
    """Refuse a list that says too little, or what no layer is."""
    if len(types) < count:
        error = config.fail("layer_types", f"names {len(types)} layers of {count}")
        raise error
    for kind in types:
        config.choice("layer_types", kind, (FULL, SLIDING))


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
