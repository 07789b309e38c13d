"""Falcon: torch's attention called by the class itself, products with transposed weights, sums in place.

(transformers 5.23: models/falcon)
"""

from memplan.classes.llama import MLP, Decoder, DecoderLayer, LayerKind
from memplan.classes.older.alibi import Returned, dropout_add
from memplan.classes.older.gpt2 import OlderAttention, older_activation
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import Attended, matmul, scaled_dot_product_attention
from memplan.graph.modules.basic import (
    ActivationModule,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    Norm,
)
from memplan.graph.modules.functional import add_in_place, scaled_in_place, softmax, spread_copy
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import causal_pattern, position_ids
from memplan.graph.modules.rotary import RotaryEmbedding, Tables, apply_rotary
from memplan.graph.operations.transposed import transposed_linear
from memplan.model.attention import AttentionForm, Projection
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.parameters import ModelPart, WeightRole
from memplan.training.choices_of_kernels.kernels import AttentionKernel


class FalconLinear(Linear):
    """``input @ self.weight.T``, and the bias in a second operation."""

    def _own(self, x: Handle) -> Tensor:
        run = self.run
        before = len(run.segment.parameters)
        made = transposed_linear(
            run, x.laid(), self.within, self.in_features, self.out_features,
            bias="bias" in self.weights, role=self.weight.role,
        )  # fmt: skip
        self.declared(self.weight, run.segment.parameters[before])
        return made


class FalconAttention(OlderAttention):
    output = "dense"
    projection = Projection.FUSED_SELECTED
    form = AttentionForm.OWN
    dropout_key = "attention_dropout"

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.new_decoder_architecture = config.flag("new_decoder_architecture")
        self.multi_query = config.flag("multi_query")
        if self.new_decoder_architecture:
            self.projection = Projection.FUSED_INTERLEAVED
        super().__init__(config, kind)

    def key_heads(self, config: ConfigReader) -> int:
        if self.new_decoder_architecture:
            return config.integer("num_kv_heads", default=self.num_heads)
        return 1 if self.multi_query else self.num_heads

    def add_projections(self, config: ConfigReader) -> None:
        hidden, bias = self.embed_dim, config.flag("bias")
        width = hidden + 2 * self.num_kv_heads * self.head_dim
        role = WeightRole.ATTENTION_OUTPUT
        self.query_key_value = FalconLinear(hidden, width, bias=bias)
        self.dense = FalconLinear(hidden, hidden, bias=bias, role=role)
        self.probs_dropout = Dropout(config.number("attention_dropout"))

    def picked(self, fused_qkv: Handle) -> tuple[Handle, Handle, Handle]:
        """``_split_heads``: views, but what is picked by a list is copied."""
        batch, length, _ = fused_qkv.shape
        heads, width = self.num_heads, self.head_dim
        if self.new_decoder_architecture:
            groups = heads // self.num_kv_heads
            qkv = fused_qkv.view(batch, length, -1, groups + 2, width)
            query = qkv.narrow(groups, dim=3)
            key = qkv.narrow(1, dim=3).contiguous()
            value = qkv.narrow(1, dim=3).contiguous()
            shape = batch, length, heads, width
            query = query.reshape(*shape)
            return query, spread_copy(key, shape), spread_copy(value, shape)
        if not self.multi_query:
            fused_qkv = fused_qkv.view(batch, length, heads, 3, width)
            return fused_qkv.select(-2), fused_qkv.select(-2), fused_qkv.select(-2)
        fused_qkv = fused_qkv.view(batch, length, heads + 2, width)
        query = fused_qkv.narrow(heads, dim=2)
        key = fused_qkv.narrow(1, dim=2).contiguous()
        value = fused_qkv.narrow(1, dim=2).contiguous()
        return query, key, value

    def forward(self, x: Handle, alibi: Handle | None, mask: Handle, tables: Tables) -> Attended:
        batch, length, _ = x.shape
        fused_qkv = self.query_key_value(x)
        query_layer, key_layer, value_layer = self.picked(fused_qkv)
        query_layer = query_layer.transpose(1, 2)
        key_layer = key_layer.transpose(1, 2)
        value_layer = value_layer.transpose(1, 2)
        if alibi is None:
            query_layer, key_layer = apply_rotary(query_layer, key_layer, *tables)
        weights = None
        if self.run.kernels.attention is not AttentionKernel.EAGER:
            probability = 0.0 if alibi is None else self.attention_dropout
            out = self.kernel(query_layer, key_layer, value_layer, mask, probability)
        elif alibi is None:
            weights = matmul(query_layer, self.spread(key_layer).transpose(2, 3))
            weights = scaled_in_place(weights)
            weights = softmax(weights + mask, dtype=x.dtype)
            out = matmul(weights, self.spread(value_layer))
        else:
            matmul_result = matmul(query_layer, self.spread(key_layer).transpose(2, 3))
            attention_scores = matmul_result.float()
            attention_logits = attention_scores + alibi
            attention_logits = scaled_in_place(attention_logits)
            weights = softmax(attention_logits + mask, dtype=x.dtype)
            weights = self.probs_dropout(weights)
            out = matmul(weights, self.spread(value_layer))
        out = out.permute(0, 2, 1, 3)
        out = out.reshape(batch, length, -1)
        out = self.dense(out)
        return out, weights

    def kernel(
        self, query: Handle, key: Handle, value: Handle, mask: Handle, probability: float
    ) -> Handle:
        """torch's dispatcher; a single key head is handed over as it is.

        Fake tensors are not asked whether a kernel could: there a fused one reads that head for all.
        """
        if self.run.decomposed:
            key, value = self.spread(key), self.spread(value)
        single = key.shape[1] < query.shape[1]
        return scaled_dot_product_attention(query, key, value, mask, probability, spread=single)

    def spread(self, x: Handle) -> Handle:
        """A single head as a factor of all heads' product, which autocast casts first."""
        if x.shape[1] == self.num_heads:
            return x
        if self.run.autocast is not None:
            x = x.to(self.run.autocast)
        return x.repeat_heads(self.num_heads)


class FalconMLP(MLP):
    def __init__(self, config: ConfigReader) -> None:
        hidden, bias = config.integer("hidden_size"), config.flag("bias")
        inner = config.integer("ffn_hidden_size", default=4 * hidden)
        self.dense_h_to_4h = FalconLinear(hidden, inner, bias=bias)
        self.act = ActivationModule(older_activation(config, "activation"))
        self.dense_4h_to_h = FalconLinear(inner, hidden, bias=bias)

    @property
    def last(self) -> Linear:
        return self.dense_4h_to_h

    def forward(self, x: Handle) -> Handle:
        x = self.act(self.dense_h_to_4h(x))
        x = self.dense_4h_to_h(x)
        return x


class FalconDecoderLayer(DecoderLayer):
    ln_attn: Norm
    ln_mlp: Norm

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        hidden = config.integer("hidden_size")
        self.residual_dropout = config.number("hidden_dropout")
        self.attention_dropout = config.number("attention_dropout")
        self.self_attention = FalconAttention(config, kind)
        self.mlp = FalconMLP(config)
        self.parallel_attn = config.flag("parallel_attn")
        newer = config.flag("new_decoder_architecture")
        norms = config.optional_integer("num_ln_in_parallel_attn") or (2 if newer else 1)
        self.has_both = self.parallel_attn and newer and norms == 2
        if not self.parallel_attn:
            self.post_attention_layernorm = LayerNorm(hidden)
            self.input_layernorm = LayerNorm(hidden)
            return
        if self.has_both:
            self.placement = NormPlacement.PARALLEL
            self.ln_attn = LayerNorm(hidden)
            self.ln_mlp = LayerNorm(hidden)
        else:
            self.placement = NormPlacement.PARALLEL_SHARED
            self.input_layernorm = LayerNorm(hidden)

    def forward(self, x: Handle, alibi: Handle | None, mask: Handle, tables: Tables) -> Returned:
        # A checkpointed layer's arguments are kept, whether it reads them or not.
        passed = (*tables, mask) if alibi is None else (*tables, alibi, mask)
        self.run.record(OperationKind.ARGUMENTS, [each.record for each in passed], ())
        del passed
        residual = x
        if self.has_both:
            attention_layernorm_out = self.ln_attn(x)
            mlp_layernorm_out = self.ln_mlp(x)
        else:
            attention_layernorm_out = mlp_layernorm_out = self.input_layernorm(x)
        attention_output, attn_weights = self.self_attention(
            attention_layernorm_out, alibi, mask, tables
        )
        if not self.parallel_attn:
            residual = dropout_add(attention_output, residual, self.attention_dropout)
            mlp_layernorm_out = self.post_attention_layernorm(residual)
        mlp_output = self.mlp(mlp_layernorm_out)
        if self.parallel_attn:
            mlp_output = add_in_place(mlp_output, attention_output)
        output = dropout_add(mlp_output, residual, self.residual_dropout)
        return output, attn_weights


class FalconModel(Decoder):
    prefix = "transformer"
    table = "word_embeddings"
    listed = "h"
    last = "ln_f"
    classifies_tokens = False

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.num_heads = config.integer("num_attention_heads")
        self.use_alibi = config.flag("alibi")
        self.word_embeddings = Embedding(
            config.integer("vocab_size"), hidden, role=WeightRole.TOKEN_TABLE
        )
        kinds = [LayerKind()] * config.layers("num_hidden_layers")
        self.h = LayerList("decoder.layers", kinds, lambda kind: FalconDecoderLayer(config, kind))
        self.ln_f = LayerNorm(hidden)
        self.ln_f.segment = "decoder.norm", ModelPart.NORM
        width = config.divide("hidden_size", hidden, "num_attention_heads", self.num_heads)
        self.rotary_emb = RotaryEmbedding(width)

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        ones = alibi = None
        if self.use_alibi:
            ones = made_by(self.run, OperationKind.ONES, (batch, length), DType.INT64)
            alibi = self.alibi(ones)
        positions = position_ids(self.run, batch, length)
        mask = self.masks(batch, length)[None]
        if mask is None:
            mask = causal_pattern(self.run, length)
        if alibi is not None:
            if mask.dtype is DType.BOOL:
                shape = batch, 1, length, length
                mask = mask.apart(OperationKind.WHERE, dtype=self.run.compute, shape=shape)
            mask = self.biased(mask, alibi)
        x = embeds
        tables = self.rotary_emb(x, positions)
        for block in self.h:
            outputs = block(x, alibi, mask, tables, unread=positions)
            x = outputs[0]
        x = self.ln_f(x)
        del ones
        return x

    def alibi(self, ones: Handle) -> Handle:
        """``build_alibi_tensor``: a row for each head of each sequence, behind the numbers that it is made of."""
        run, kinds, heads = self.run, OperationKind, (self.num_heads,)
        base = made_by(run, kinds.ONES, (1,), DType.FP32)
        powers = made_by(run, kinds.ARANGE, heads, DType.INT32)
        slopes = made_by(run, kinds.POW, heads, DType.FP32)
        counted = ones.apart(kinds.CUMSUM).apart(kinds.ADD_SCALAR)
        arange_tensor = counted.apart(kinds.MUL)
        del counted
        in_16_bits = slopes.apart(kinds.TO, dtype=DType.BF16)
        batch, length = ones.shape
        made = made_by(run, kinds.MUL, (batch, *heads, 1, length), DType.BF16)
        del in_16_bits
        alibi = made if run.compute is DType.BF16 else made.apart(kinds.TO, dtype=run.compute)
        del made, base, powers, slopes, arange_tensor
        return alibi

    def biased(self, mask: Handle, alibi: Handle) -> Handle:
        """The bias of every head where tokens see one another, the lowest number elsewhere."""
        divided = alibi.apart(OperationKind.MUL_SCALAR)
        lower = mask.apart(OperationKind.LT, dtype=DType.BOOL)
        batch, heads, _, length = alibi.shape
        made = lower.apart(
            OperationKind.MASKED_FILL, dtype=alibi.dtype, shape=(batch, heads, length, length)
        )
        del divided, lower
        return made
