"""BLOOM and MPT: slopes times positions are added to the scores, in the place of embeddings of positions.

(transformers 5.23: models/bloom, models/mpt)
"""

from memplan.classes.llama import MLP, Decoder, DecoderLayer, LayerKind
from memplan.classes.older.gpt2 import OlderAttention, hidden_size
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended, matmul
from memplan.graph.modules.basic import (
    ActivationModule,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    dropout,
)
from memplan.graph.modules.functional import (
    added_product,
    batched_product,
    made_from,
    masked_fill,
    softmax,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.model.attention import AttentionForm, Projection
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart, WeightRole

Returned = tuple[Handle, Handle | None]
"""What a layer gives its caller: hidden states and the weights of its attention."""


def dropout_add(x: Handle, residual: Handle, probability: float) -> Handle:
    """``dropout_add``: the sum has the name of what was dropped."""
    out = dropout(x, probability)
    out = residual + out
    return out


class BloomAttention(OlderAttention):
    output = "dense"
    projection = Projection.FUSED_SELECTED
    form = AttentionForm.OWN
    dropout_key = "attention_dropout"

    def add_projections(self, config: ConfigReader) -> None:
        hidden, role = self.embed_dim, WeightRole.ATTENTION_OUTPUT
        self.hidden_dropout = config.number("hidden_dropout")
        self.query_key_value = Linear(hidden, 3 * hidden, bias=True)
        self.dense = Linear(hidden, hidden, bias=True, role=role)
        self.weights_dropout = Dropout(config.number("attention_dropout"))

    def selected(self, fused_qkv: Handle) -> tuple[Handle, Handle, Handle]:
        """``_reshape``: views of the same storage."""
        batch, length, _ = fused_qkv.shape
        fused_qkv = fused_qkv.view(batch, length, self.num_heads, 3, self.head_dim)
        query = fused_qkv.select(-2).transpose(1, 2)
        key = fused_qkv.select(-2).transpose(1, 2)
        value = fused_qkv.select(-2).transpose(1, 2)
        return query, key, value

    def merged(self, x: Handle, batch: int) -> Handle:
        """``_merge_heads``."""
        _, length, width = x.shape
        x = x.view(batch, self.num_heads, length, width)
        x = x.permute(0, 2, 1, 3)
        return x.reshape(batch, length, -1)

    def forward(self, x: Handle, residual: Handle, alibi: Handle, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        fused_qkv = self.query_key_value(x)
        query_layer, key_layer, value_layer = self.selected(fused_qkv)
        folded = batch * self.num_heads, -1, self.head_dim
        query_layer = query_layer.reshape(*folded)
        key_layer = key_layer.reshape(*folded).transpose(1, 2)
        value_layer = value_layer.reshape(*folded)
        attention_scores = added_product(alibi, query_layer, key_layer)
        attn_weights = attention_scores.view(batch, self.num_heads, length, -1)
        if mask is not None:
            attn_weights = attn_weights + mask
        attention_probs = softmax(attn_weights, dtype=DType.FP32).to(query_layer.dtype)
        attention_probs = self.weights_dropout(attention_probs)
        attention_probs_reshaped = attention_probs.view(batch * self.num_heads, length, -1)
        context_layer = batched_product(attention_probs_reshaped, value_layer)
        context_layer = self.merged(context_layer, batch)
        output_tensor = self.dense(context_layer)
        output_tensor = dropout_add(output_tensor, residual, self.hidden_dropout)
        return output_tensor, attention_probs


class BloomMLP(MLP):
    def __init__(self, config: ConfigReader) -> None:
        hidden = hidden_size(config)
        self.dense_h_to_4h = Linear(hidden, 4 * hidden, bias=True)
        self.gelu_impl = ActivationModule(Activation.BLOOM_GELU)
        self.dense_4h_to_h = Linear(4 * hidden, hidden, bias=True)
        self.hidden_dropout = config.number("hidden_dropout")

    @property
    def last(self) -> Linear:
        return self.dense_4h_to_h

    def forward(self, x: Handle, residual: Handle) -> Handle:
        x = self.gelu_impl(self.dense_h_to_4h(x))
        intermediate_output = self.dense_4h_to_h(x)
        output = dropout_add(intermediate_output, residual, self.hidden_dropout)
        return output


class BloomBlock(DecoderLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = hidden_size(config)
        self.residual_dropout = config.number("hidden_dropout")
        self.input_layernorm = LayerNorm(hidden)
        self.self_attention = BloomAttention(config, kind)
        self.post_attention_layernorm = LayerNorm(hidden)
        self.mlp = BloomMLP(config)
        self.normed = config.flag("apply_residual_connection_post_layernorm")

    def forward(self, x: Handle, alibi: Handle, mask: Handle | None) -> Returned:
        layernorm_output = self.input_layernorm(x)
        residual = layernorm_output if self.normed else x
        attention_output, attn_weights = self.self_attention(
            layernorm_output, residual, alibi, mask
        )
        layernorm_output = self.post_attention_layernorm(attention_output)
        residual = layernorm_output if self.normed else attention_output
        output = self.mlp(layernorm_output, residual)
        return output, attn_weights


class BloomModel(Decoder):
    prefix = "transformer"
    table = "word_embeddings"
    listed = "h"
    last = "ln_f"
    context_keys = ("seq_length",)
    classifies_tokens = False
    eager_only = True

    def __init__(self, config: ConfigReader) -> None:
        hidden = hidden_size(config)
        self.num_heads = config.integer("num_attention_heads")
        self.word_embeddings = Embedding(
            config.integer("vocab_size"), hidden, role=WeightRole.TOKEN_TABLE
        )
        self.word_embeddings_layernorm = LayerNorm(hidden)
        kinds = [LayerKind()] * config.layers("num_hidden_layers")
        self.h = LayerList("decoder.layers", kinds, lambda kind: BloomBlock(config, kind))
        self.ln_f = LayerNorm(hidden)
        self.ln_f.segment = "decoder.norm", ModelPart.NORM

    def alibi(self, batch: int, length: int, dtype: DType) -> Handle:
        """A row for each head, repeated for the batch, then cast."""
        rows = self.num_heads, 1, length
        alibi = made_by(self.run, OperationKind.MUL, rows, DType.FP32)
        shape = batch * self.num_heads, 1, length
        return made_from(OperationKind.REPEAT, shape, DType.FP32, alibi).to(dtype)

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        x = embeds
        if received is None:
            x = self.word_embeddings_layernorm(embeds)
        alibi = self.alibi(batch, length, self.run.compute)
        mask = self.masks(batch, length)[None]
        for block in self.h:
            outputs = block(x, alibi, mask)
            x = outputs[0]
        x = self.ln_f(x)
        return x


def attention_probability(config: ConfigReader) -> float:
    """``attn_config.attn_pdrop``."""
    nested = config.mapping("attn_config") or {}
    return config.nested(nested, f"{config.path}attn_config.").number("attn_pdrop")


class MptAttention(OlderAttention):
    output = "out_proj"
    projection = Projection.FUSED_SPLIT
    form = AttentionForm.OWN
    dropout_key = ""

    def add_projections(self, config: ConfigReader) -> None:
        hidden, role = self.embed_dim, WeightRole.ATTENTION_OUTPUT
        self.attention_dropout = attention_probability(config)
        self.Wqkv = Linear(hidden, 3 * hidden)
        self.out_proj = Linear(hidden, hidden, role=role)

    def forward(self, x: Handle, position_bias: Handle, mask: Handle | None) -> Attended:
        batch, length, width = x.shape
        mixed_qkv = self.Wqkv(x)
        query_states, key_states, value_states = mixed_qkv.split(width, width, width)
        query_states = self.split_heads(query_states)
        key_states = self.split_heads(key_states)
        value_states = self.split_heads(value_states)
        attention_scores = matmul(query_states, key_states.transpose(2, 3)) * 1.0
        position_bias = position_bias.narrow(length)
        attention_scores = attention_scores + position_bias
        if mask is not None:
            attention_scores = masked_fill(attention_scores, mask)
        attn_weights = softmax(attention_scores.float()).to(value_states.dtype)
        attn_weights = dropout(attn_weights, self.attention_dropout)
        context_states = matmul(attn_weights, value_states)
        context_states = context_states.permute(0, 2, 1, 3).contiguous().view(batch, length, -1)
        attn_output = self.out_proj(context_states)
        return attn_output, attn_weights


class MptMLP(MLP):
    def __init__(self, config: ConfigReader) -> None:
        hidden = hidden_size(config)
        self.up_proj = Linear(hidden, 4 * hidden)
        self.act = ActivationModule(Activation.GELU)
        self.down_proj = Linear(4 * hidden, hidden)
        self.hidden_dropout = attention_probability(config)

    def forward(self, x: Handle, residual: Handle) -> Handle:
        x = self.act(self.up_proj(x))
        intermediate_output = self.down_proj(x)
        output = dropout(intermediate_output, self.hidden_dropout)
        output = output + residual
        return output


class MptBlock(DecoderLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = hidden_size(config)
        self.norm_1 = LayerNorm(hidden, bias=False)
        self.attn = MptAttention(config, kind)
        self.norm_2 = LayerNorm(hidden, bias=False)
        self.ffn = MptMLP(config)
        self.residual_dropout = attention_probability(config)
        self.resid_attn_dropout = Dropout(self.residual_dropout)

    def forward(self, x: Handle, position_bias: Handle, mask: Handle | None) -> Returned:
        layernorm_output = self.norm_1(x)
        residual = x
        attn_outputs, attn_weights = self.attn(layernorm_output, position_bias, mask)
        x = self.resid_attn_dropout(attn_outputs) + residual
        layernorm_output = self.norm_2(x)
        residual = x
        output = self.ffn(layernorm_output, residual)
        return output, attn_weights


class MptModel(Decoder):
    prefix = "transformer"
    table = "wte"
    listed = "blocks"
    last = "norm_f"
    context_keys = ("max_seq_len",)
    classifies_tokens = False
    eager_only = True

    def __init__(self, config: ConfigReader) -> None:
        hidden = hidden_size(config)
        self.num_heads = config.integer("num_attention_heads")
        self.max_seq_len = config.integer("max_seq_len")
        self.wte = Embedding(config.integer("vocab_size"), hidden, role=WeightRole.TOKEN_TABLE)
        kinds = [LayerKind()] * config.layers("num_hidden_layers")
        self.blocks = LayerList("decoder.layers", kinds, lambda kind: MptBlock(config, kind))
        self.norm_f = LayerNorm(hidden, bias=False)
        self.norm_f.segment = "decoder.norm", ModelPart.NORM

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        x = embeds
        shape = self.num_heads, 1, self.max_seq_len
        alibi = made_by(self.run, OperationKind.MUL, shape, DType.FP32)
        mask = self.masks(batch, length)[None]
        if mask is not None:
            mask = mask.apart(OperationKind.TO, dtype=DType.BOOL)
        for block in self.blocks:
            outputs = block(x, alibi, mask)
            x = outputs[0]
        x = self.norm_f(x)
        return x
