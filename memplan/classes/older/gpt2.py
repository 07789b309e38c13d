"""GPT, GPT-2 and GPT-BigCode: positions that are learnt, one matrix for queries, keys and values.

(transformers 5.23: models/openai, models/gpt2, models/gpt_bigcode)
"""

from collections.abc import Callable

from memplan.classes.llama import MLP, Decoder, DecoderLayer, HeadAttention, LayerKind
from memplan.dtypes import DType
from memplan.families.llama import ACTIVATION_NAMES
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended, attention_function, matmul
from memplan.graph.modules.basic import (
    ActivationModule,
    Conv1D,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    dropout,
)
from memplan.graph.modules.functional import softmax, upcast_product
from memplan.graph.modules.handles import Handle, made_by, seen_in
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import counted_positions
from memplan.graph.modules.module import Module
from memplan.model.attention import AttentionForm, Projection
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart, WeightRole

OLDER_NAMES = {
    **ACTIVATION_NAMES, "gelu_10": "gelu", "gelu_python": "gelu", "gelu_python_tanh": "gelu_new",
}  # fmt: skip
"""Other names of the same function (transformers' ``ACT2FN``)."""


def hidden_size(config: ConfigReader) -> int:
    """Width of the hidden states."""
    return config.integer("n_embed", "hidden_size")


def older_activation(config: ConfigReader, key: str = "activation_function") -> Activation:
    """An activation by transformers' name, which the config has to name."""
    name = config.text(key)
    known = {each.value: each for each in Activation}
    return known[config.choice(key, OLDER_NAMES.get(name, name), known)]


def inner_size(config: ConfigReader) -> int:
    """Width of the network: four times the hidden size where the config is silent."""
    return config.integer("n_inner", "intermediate_size", default=4 * hidden_size(config))


class OlderAttention(HeadAttention):
    """Heads of one number, as wide as their share of the hidden size."""

    dropout_key = "attn_pdrop"

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.turned = kind.turned
        hidden = self.embed_dim = hidden_size(config)
        self.num_heads = config.integer("num_attention_heads")
        self.num_kv_heads = self.key_heads(config)
        config.divide(
            "num_attention_heads", self.num_heads, "num_key_value_heads", self.num_kv_heads
        )
        self.head_dim = config.divide("hidden_size", hidden, "num_attention_heads", self.num_heads)
        self.attention_dropout = config.number(self.dropout_key) if self.dropout_key else 0.0
        self.add_projections(config)

    def add_projections(self, config: ConfigReader) -> None:
        """Declare its matrices, in the class's order."""
        raise NotImplementedError

    def key_heads(self, config: ConfigReader) -> int:  # noqa: ARG002
        """Heads of keys and values."""
        return self.num_heads

    def split_heads(self, x: Handle) -> Handle:
        batch, length, _ = x.shape
        return x.view(batch, length, -1, self.head_dim).transpose(1, 2)


class GPT2Attention(OlderAttention):
    projection = Projection.FUSED_SPLIT
    output = "c_proj"
    c_attn: Linear
    c_proj: Linear

    def add_projections(self, config: ConfigReader) -> None:
        hidden = self.embed_dim
        self.c_attn = Conv1D(3 * hidden, hidden)
        self.c_proj = Conv1D(hidden, hidden, role=WeightRole.ATTENTION_OUTPUT)
        self.attn_dropout = Dropout(config.number("attn_pdrop"))
        self.resid_dropout = Dropout(config.number("resid_pdrop"))
        self.reorder_and_upcast_attn = config.flag("reorder_and_upcast_attn")

    def attend(
        self, query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
    ) -> Attended:
        own = upcast_and_reordered if self.reorder_and_upcast_attn else gpt2_attention
        return attention_function(self.run, own)(query, key, value, mask, probability)

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        batch, length, width = x.shape
        query, key, value = self.c_attn(x).split(width, width, width)
        key = self.split_heads(key)
        value = self.split_heads(value)
        query = self.split_heads(query)
        out, weights = self.attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.c_proj(out)
        out = self.resid_dropout(out)
        return out, weights


def gpt2_attention(
    query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
) -> Attended:
    """``eager_attention_forward``: the softmax in the format of the scores, its result in that of the values."""
    weights = matmul(query, key.transpose(2, 3)) * 1.0
    if mask is not None:
        weights = weights + mask
    weights = softmax(weights)
    weights = weights.to(value.dtype)
    weights = dropout(weights, probability)
    out = matmul(weights, value)
    out = out.transpose(1, 2)
    return out, weights


def upcast_and_reordered(
    query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
) -> Attended:
    """``_upcast_and_reordered_attn``: the product in fp32, whatever autocast says."""
    batch, heads, length, width = query.shape
    weights = made_by(
        query.run, OperationKind.EMPTY, (batch * heads, length, key.shape[2]), DType.FP32
    )
    q = query.reshape(-1, length, width)
    k = key.transpose(2, 3).reshape(-1, width, key.shape[2])
    weights = upcast_product(q, k)
    weights = weights.reshape(batch, heads, length, -1)
    if mask is not None:
        weights = weights + mask
    weights = softmax(weights)
    weights = weights.to(value.dtype)
    weights = dropout(weights, probability)
    out = matmul(weights, value)
    out = out.transpose(1, 2)
    return out, weights


class GPT2MLP(MLP):
    dropout_key = "resid_pdrop"

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = hidden_size(config), inner_size(config)
        self.c_fc = self.made(hidden, inner)
        self.c_proj = self.made(inner, hidden)
        self.act = ActivationModule(older_activation(config))
        self.dropout = Dropout(config.number(self.dropout_key))

    def made(self, width: int, out: int) -> Linear:
        """A linear layer, as the class has them."""
        return Conv1D(out, width)

    @property
    def last(self) -> Linear:
        return self.c_proj

    def forward(self, x: Handle) -> Handle:
        x = self.c_fc(x)
        x = self.act(x)
        x = self.c_proj(x)
        x = self.dropout(x)
        return x


class GPTBlock(DecoderLayer):
    """Attention and a network in turn, each behind its norm."""

    dropout_key = "resid_pdrop"
    attention_class: Callable[[ConfigReader, LayerKind], Module]
    mlp_class: Callable[[ConfigReader], MLP] = GPT2MLP

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = hidden_size(config)
        self.residual_dropout = config.number(self.dropout_key)
        self.ln_1 = LayerNorm(hidden)
        self.attn = self.attention_class(config, kind)
        self.ln_2 = LayerNorm(hidden)
        self.mlp = self.mlp_class(config)


class GPT2Block(GPTBlock):
    attention_class = GPT2Attention

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        residual = x
        x = self.ln_1(x)
        attn_output, _ = self.attn(x, mask)
        x = attn_output + residual
        residual = x
        x = self.ln_2(x)
        feed_forward_hidden_states = self.mlp(x)
        x = residual + feed_forward_hidden_states
        return x


class GPT2Model(Decoder):
    prefix = "transformer"
    table = "wte"
    positions = "wpe"
    listed = "h"
    last = "ln_f"
    classifies_tokens = False
    unnamed_loss = True
    layer_class: type[DecoderLayer] = GPT2Block
    dropout_key = "embd_pdrop"

    def __init__(self, config: ConfigReader) -> None:
        hidden = hidden_size(config)
        self.wte = Embedding(config.integer("vocab_size"), hidden, role=WeightRole.TOKEN_TABLE)
        self.wpe = Embedding(config.integer("max_position_embeddings"), hidden)
        self.drop = Dropout(config.number(self.dropout_key))
        self.h = LayerList(
            "decoder.layers", self.kinds(config), lambda kind: self.layer_class(config, kind)
        )
        self.ln_f = LayerNorm(hidden)
        self.ln_f.segment = "decoder.norm", ModelPart.NORM

    def kinds(self, config: ConfigReader) -> list[LayerKind]:
        return [LayerKind()] * config.layers("num_hidden_layers")

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        ids = counted_positions(self.run, length) + 0
        x = embeds
        if received is None:
            position_embeds = self.wpe((1, length), ids)
            x = embeds + position_embeds
        mask = self.masks(batch, length)[None]
        if received is None:
            x = self.drop(x)
        for layer in self.h:
            x = layer(x, mask, unread=ids)
        x = self.ln_f(x)
        return x


class GPTBigCodeAttention(GPT2Attention):
    projection = Projection.FUSED_SPLIT

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.multi_query = config.flag("multi_query")
        if not self.multi_query:
            self.projection = Projection.FUSED_INTERLEAVED
        super().__init__(config, kind)

    def key_heads(self, config: ConfigReader) -> int:  # noqa: ARG002
        return 1 if self.multi_query else self.num_heads

    def add_projections(self, config: ConfigReader) -> None:
        hidden, width = self.embed_dim, self.num_kv_heads * self.head_dim
        self.c_attn = Linear(hidden, hidden + 2 * width, bias=True)
        self.c_proj = Linear(hidden, hidden, bias=True, role=WeightRole.ATTENTION_OUTPUT)
        self.resid_dropout = Dropout(config.number("resid_pdrop"))

    def projected(self, x: Handle) -> tuple[Handle, Handle, Handle]:
        batch, length, width = x.shape
        if self.multi_query:
            single = self.head_dim
            query, key, value = self.c_attn(x).unsqueeze(1).split(width, single, single)
            query = query.view(batch, length, -1, self.head_dim).transpose(1, 2)
            return query, key, value
        fused = self.c_attn(x).view(batch, length, -1, 3 * self.head_dim)
        query, key, value = fused.transpose(1, 2).split(*[self.head_dim] * 3)
        return query, key, value

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query, key, value = self.projected(x)
        if self.run.kernels.keeps_cache and self.run.options.checkpointed_layers:
            self.run.cache(key.record)
        attend = attention_function(self.run)
        out, weights = attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.c_proj(out)
        out = self.resid_dropout(out)
        return out, weights


class GPTBigCodeMLP(GPT2MLP):
    def made(self, width: int, out: int) -> Linear:
        return Linear(width, out, bias=True)


class GPTBigCodeBlock(GPT2Block):
    attention_class = GPTBigCodeAttention
    mlp_class: Callable[[ConfigReader], MLP] = GPTBigCodeMLP


class GPTBigCodeModel(GPT2Model):
    unnamed_loss = False
    layer_class: type[DecoderLayer] = GPTBigCodeBlock

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        run, table = self.run, self.children["wpe"]
        if isinstance(table, Embedding):  # not in a later stage of a pipeline
            run.buffer(table.weight.shape[0] ** 2, DType.BOOL, behind=True)
        embeds = self.embedded(batch, length) if received is None else received
        ids = counted_positions(run, length) + 0
        mask = self.masks(batch, length)[None]
        x = embeds
        if received is None:
            position_embeds = self.wpe((1, length), ids)
            x = embeds + position_embeds
            x = self.drop(x)
        for layer in self.h:
            x = layer(x, mask)
        x = self.ln_f(x)
        return x


class OpenAIGPTAttention(GPT2Attention):
    form = AttentionForm.OWN

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.n_positions = config.integer("max_position_embeddings")
        super().__init__(config, kind)

    def _attn(self, q: Handle, k: Handle, v: Handle) -> list[Handle]:
        w = matmul(q, k)
        w = w.like(w.run.scale(w.record, OperationKind.DIV))
        b = self.bias(w.shape[-2], w.shape[-1])
        w = w * b + -1e4 * (1.0 + b)
        w = softmax(w)
        w = self.attn_dropout(w)
        return [matmul(w, v)]

    def bias(self, *shape: int) -> Handle:
        """A corner of the buffer of ones and zeros."""
        run = self.run
        whole = run.buffer(self.n_positions**2, run.compute, before="attn")
        return seen_in(run, whole, (1, 1, *shape))

    def forward(self, x: Handle, mask: Handle | None) -> Attended:  # noqa: ARG002
        batch, length, width = x.shape
        x = self.c_attn(x)
        query, key, value = x.split(width, width, width)
        query = self.split_heads(query)
        key = key.view(batch, length, -1, self.head_dim).permute(0, 2, 3, 1)
        value = self.split_heads(value)
        attn_outputs = self._attn(query, key, value)
        a = attn_outputs[0]
        a = a.permute(0, 2, 1, 3).contiguous().view(batch, length, -1)
        a = self.c_proj(a)
        a = self.resid_dropout(a)
        return a, None


class OpenAIGPTMLP(GPT2MLP):
    def __init__(self, config: ConfigReader) -> None:
        hidden = hidden_size(config)
        self.c_fc = self.made(hidden, 4 * hidden)
        self.c_proj = self.made(4 * hidden, hidden)
        kind = older_activation(config, "afn")
        # GPT's own table calls the tanh form so.
        self.act = ActivationModule(Activation.GELU_NEW if kind is Activation.GELU else kind)
        self.dropout = Dropout(config.number("resid_pdrop"))

    def forward(self, x: Handle) -> Handle:
        h = self.act(self.c_fc(x))
        h2 = self.c_proj(h)
        return self.dropout(h2)


class OpenAIGPTBlock(DecoderLayer):
    placement = NormPlacement.POST

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = hidden_size(config)
        self.residual_dropout = config.number("resid_pdrop")
        self.attn = OpenAIGPTAttention(config, kind)
        self.ln_1 = LayerNorm(hidden)
        self.mlp = OpenAIGPTMLP(config)
        self.ln_2 = LayerNorm(hidden)

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        a, _ = self.attn(x, mask)
        n = self.ln_1(x + a)
        m = self.mlp(n)
        h = self.ln_2(n + m)
        return h


class OpenAIGPTModel(Decoder):
    prefix = "transformer"
    table = "tokens_embed"
    positions = "positions_embed"
    listed = "h"
    last = ""
    classifies_tokens = False
    unnamed_loss = True
    eager_only = True
    checkpoints = False

    def __init__(self, config: ConfigReader) -> None:
        hidden = hidden_size(config)
        self.tokens_embed = Embedding(
            config.integer("vocab_size"), hidden, role=WeightRole.TOKEN_TABLE
        )
        self.n_positions = config.integer("max_position_embeddings")
        self.positions_embed = Embedding(self.n_positions, hidden)
        self.drop = Dropout(config.number("embd_pdrop"))
        kinds = [LayerKind()] * config.layers("num_hidden_layers")
        self.h = LayerList("decoder.layers", kinds, lambda kind: OpenAIGPTBlock(config, kind))

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        run = self.run
        if received is None:
            rows = run.buffer(self.n_positions, DType.INT64)
            ids = Handle(run, rows, (1, self.n_positions))
            embeds = self.embedded(batch, length)
            position_embeds = self.positions_embed((1, length), ids)
            x = embeds + position_embeds + 0.0
            x = self.drop(x)
        else:
            x = received
        for layer in self.h:
            x = layer(x, None)
        return x
