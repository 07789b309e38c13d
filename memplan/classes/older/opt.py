"""OPT and XGLM: queries are scaled as they are projected, the network's layers are the decoder layer's own.

(transformers 5.23: models/opt, models/xglm)
"""

from memplan.classes.llama import Decoder, DecoderLayer, LayerKind
from memplan.classes.older.gpt2 import OlderAttention, older_activation
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import (
    ActivationModule,
    Embedding,
    LayerNorm,
    Linear,
    Norm,
    dropout,
    layer_norm,
)
from memplan.graph.modules.functional import batched_product, made_from, not_below, softmax
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import counted_positions
from memplan.graph.modules.module import Module
from memplan.graph.modules.run import Run
from memplan.graph.modules.strides import Shape
from memplan.model.attention import AttentionForm
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind
from memplan.model.parameters import ModelPart, WeightRole

OFFSET = 2
"""Rows of the table of positions before the first one's (``padding_idx`` of fairseq)."""


class OPTAttention(OlderAttention):
    output = "out_proj"
    dropout_key = "attention_dropout"
    bias_key = "enable_bias"

    def add_projections(self, config: ConfigReader) -> None:
        hidden, bias = self.embed_dim, not self.bias_key or config.flag(self.bias_key)
        role = WeightRole.ATTENTION_OUTPUT
        self.k_proj = Linear(hidden, hidden, bias=bias, role=WeightRole.QUERY_KEY)
        self.v_proj = Linear(hidden, hidden, bias=bias)
        self.q_proj = Linear(hidden, hidden, bias=bias, role=WeightRole.QUERY_KEY)
        self.out_proj = Linear(hidden, hidden, bias=bias, role=role)

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query = self.q_proj(x) * 0.125
        query = self.split_heads(query)
        key = self.k_proj(x)
        value = self.v_proj(x)
        key = self.split_heads(key)
        value = self.split_heads(value)
        attend = attention_function(self.run)
        out, weights = attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.out_proj(out)
        return out, weights


class InnerNetworkLayer(DecoderLayer):
    """``fc1`` and ``fc2`` are the layer's own."""

    fc1: Linear
    fc2: Linear
    activation_fn: ActivationModule

    def add_network(self, config: ConfigReader, hidden: int, *, bias: bool) -> None:
        inner = config.integer("ffn_dim", default=4 * hidden)
        self.fc1 = Linear(hidden, inner, bias=bias)
        self.fc2 = Linear(inner, hidden, bias=bias)

    def network_facts(self) -> FeedForwardSpec:
        return FeedForwardSpec(
            intermediate_size=self.fc2.in_features, activation=self.activation_fn.kind,
            gated=False, bias="bias" in self.fc2.weights,
        )  # fmt: skip


class PlainLayerNorm(Norm):
    """``torch.nn.LayerNorm(..., elementwise_affine=False)``."""

    kind = NormKind.LAYER

    def __init__(self, width: int) -> None:
        self.width = width

    def forward(self, x: Handle) -> Handle:
        """Without weights."""
        return layer_norm(x, self.width)


def opt_norm(config: ConfigReader, hidden: int) -> Norm:
    """With weights, unless the config says otherwise."""
    weighted = config.flag("layer_norm_elementwise_affine")
    return LayerNorm(hidden) if weighted else PlainLayerNorm(hidden)


class OPTDecoderLayer(InnerNetworkLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.self_attn = OPTAttention(config, kind)
        self.do_layer_norm_before = config.flag("do_layer_norm_before")
        self.placement = NormPlacement.PRE if self.do_layer_norm_before else NormPlacement.POST
        self.residual_dropout = config.number("dropout")
        self.activation_fn = ActivationModule(older_activation(config))
        self.self_attn_layer_norm = opt_norm(config, hidden)
        self.add_network(config, hidden, bias=config.flag("enable_bias"))
        self.final_layer_norm = opt_norm(config, hidden)

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        residual = x
        if self.do_layer_norm_before:
            x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(x, mask)
        x = dropout(x, self.residual_dropout)
        x = residual + x
        if not self.do_layer_norm_before:
            x = self.self_attn_layer_norm(x)
        shape = x.shape
        x = x.reshape(-1, x.shape[-1])
        residual = x
        if self.do_layer_norm_before:
            x = self.final_layer_norm(x)
        x = self.fc1(x)
        x = self.activation_fn(x)
        x = self.fc2(x)
        x = dropout(x, self.residual_dropout)
        x = (residual + x).view(*shape)
        if not self.do_layer_norm_before:
            x = self.final_layer_norm(x)
        return x


def summed_positions(run: Run, batch: int, length: int) -> tuple[Handle, Handle]:
    """The running sum of a mask of ones, of every sequence: both have a name in the caller."""
    position_attention_mask = made_by(run, OperationKind.ONES, (batch, length), DType.FP32)
    position_ids = position_attention_mask.apart(OperationKind.CUMSUM)
    # ``(position_ids * position_attention_mask - 1).long()``: the name is the sum's until then.
    position_ids = (
        position_ids.apart(OperationKind.MUL, position_attention_mask)
        .apart(OperationKind.ADD_SCALAR)
        .apart(OperationKind.TO, dtype=DType.INT64)
    )
    return position_attention_mask, position_ids


class OPTModel(Decoder):
    """``OPTDecoder``, which ``OPTModel`` has nothing beside."""

    prefix = "model.decoder"
    inner = "decoder"
    positions = "embed_positions"
    last = "final_layer_norm"
    classifies_tokens = False
    final_layer_norm: Module
    project_in: Module

    def __init__(self, config: ConfigReader) -> None:
        self.hidden_size = hidden = config.integer("hidden_size")
        width = config.integer("word_embed_proj_dim", default=hidden)
        self.embed_tokens = Embedding(
            config.integer("vocab_size"), width, role=WeightRole.TOKEN_TABLE
        )
        rows = config.integer("max_position_embeddings") + OFFSET
        self.embed_positions = Embedding(rows, hidden)
        self.is_projected = width != hidden
        if self.is_projected:
            self.project_out = Linear(hidden, width)
            self.project_in = Linear(width, hidden)
        normed = config.flag("do_layer_norm_before")
        self.is_normed = normed and not config.flag("_remove_final_layer_norm")
        if self.is_normed:
            self.final_layer_norm = opt_norm(config, hidden)
            self.final_layer_norm.segment = "decoder.norm", ModelPart.NORM
        elif self.is_projected:
            self.project_out.segment = "decoder.norm", ModelPart.NORM
        kinds = [LayerKind()] * config.layers("num_hidden_layers")
        self.layers = LayerList("decoder.layers", kinds, lambda kind: OPTDecoderLayer(config, kind))

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        embeds, *_ = self.joined(embeds)
        counted = () if received is not None else summed_positions(self.run, batch, length)
        mask = self.masks(batch, length)[None]
        x = embeds
        if counted:
            shifted = counted[1].apart(OperationKind.ADD_SCALAR)
            pos_embeds = self.embed_positions((batch, length), shifted)
            del shifted
            if self.is_projected:
                embeds = self.project_in(embeds)
            x = embeds + pos_embeds
        for layer in self.layers:
            x = layer(x, mask, unread=counted[1] if counted else None)
        if self.is_normed:
            x = self.final_layer_norm(x)
        if self.is_projected:
            x = self.project_out(x)
        return x


class XGLMAttention(OPTAttention):
    form = AttentionForm.OWN
    bias_key = ""

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        batch, length, width = x.shape
        query = self.q_proj(x) * 0.125
        # The class does so behind the values' projection; its gradient comes transposed, and is
        # copied when the projection's turn has come.
        key = self.split_heads(self.k_proj(x))
        value = self.v_proj(x)
        value = self.split_heads(value)
        query = self.split_heads(query)
        folded = batch * self.num_heads, -1, self.head_dim
        query = query.reshape(*folded)
        key = key.reshape(*folded)
        value = value.reshape(*folded)
        weights = batched_product(query, key.transpose(1, 2))
        if mask is not None:
            weights = weights.view(batch, self.num_heads, length, -1) + mask
            weights = not_below(weights)
            weights = weights.view(batch * self.num_heads, length, -1)
        if weights.dtype is DType.FP16:
            weights = softmax(weights, dtype=DType.FP32).to(DType.FP16)
        else:
            weights = softmax(weights)
        attn_weights_reshaped = weights.view(batch, self.num_heads, length, -1)
        weights = attn_weights_reshaped.view(batch * self.num_heads, length, -1)
        attn_probs = dropout(weights, self.attention_dropout)
        out = batched_product(attn_probs, value)
        out = out.view(batch, self.num_heads, length, self.head_dim)
        out = out.transpose(1, 2)
        out = out.reshape(batch, length, width)
        out = self.out_proj(out)
        return out, attn_weights_reshaped


class XGLMDecoderLayer(InnerNetworkLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.self_attn = XGLMAttention(config, kind)
        self.residual_dropout = config.number("dropout")
        self.activation_fn = ActivationModule(older_activation(config))
        self.activation_dropout = config.number("activation_dropout")
        self.self_attn_layer_norm = LayerNorm(hidden)
        self.add_network(config, hidden, bias=True)
        self.final_layer_norm = LayerNorm(hidden)

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        residual = x
        x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(x, mask)
        x = dropout(x, self.residual_dropout)
        x = residual + x
        residual = x
        x = self.final_layer_norm(x)
        x = self.activation_fn(self.fc1(x))
        x = dropout(x, self.activation_dropout)
        x = self.fc2(x)
        x = dropout(x, self.residual_dropout)
        x = residual + x
        return x


class XGLMScaledWordEmbedding(Embedding):
    def forward(self, shape: Shape, ids: Handle | None = None) -> Handle:
        return super().forward(shape, ids) * 32.0


class XGLMSinusoidalPositionalEmbedding(Module):
    """Rows of a buffer, which nothing holds on to."""

    def __init__(self, rows: int, hidden: int) -> None:
        self.rows, self.hidden = rows, hidden

    def forward(self, ids: Handle) -> Handle:
        """Those of the ids, in the format of the weights."""
        run = self.run
        run.buffer(self.rows * self.hidden, run.buffer_dtype)
        ids = ids.apart(OperationKind.ADD_SCALAR)
        shape = 1, ids.shape[-1], self.hidden
        return made_from(OperationKind.INDEX_SELECT, shape, run.buffer_dtype, ids)


class XGLMModel(Decoder):
    last = "layer_norm"
    classifies = classifies_tokens = False
    eager_only = True

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.embedding_dropout = config.number("dropout")
        self.embed_tokens = XGLMScaledWordEmbedding(
            config.integer("vocab_size"), hidden, role=WeightRole.TOKEN_TABLE
        )
        rows = config.integer("max_position_embeddings") + OFFSET
        self.embed_positions = XGLMSinusoidalPositionalEmbedding(rows, hidden)
        kinds = [LayerKind()] * config.layers("num_hidden_layers")
        self.layers = LayerList(
            "decoder.layers", kinds, lambda kind: XGLMDecoderLayer(config, kind)
        )
        self.layer_norm = LayerNorm(hidden)
        self.layer_norm.segment = "decoder.norm", ModelPart.NORM

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        mask = self.masks(batch, length)[None]
        x = embeds
        if received is None:
            ids = counted_positions(self.run, length)
            x = embeds + self.embed_positions(ids)
            x = dropout(x, self.embedding_dropout)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.layer_norm(x)
        return x
