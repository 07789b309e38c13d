"""CPM-Ant: a decoder with trained prompts before its tokens, segments, and a bias for every pair of them.

(transformers 5.23, models/cpmant/modeling_cpmant.py)
"""

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

from memplan.classes.heads import BaseModel, ForCausalLM
from memplan.classes.llama import MLP, Decoder, DecoderLayer, HeadAttention, LayerKind
from memplan.classes.older.gptj import divided
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import Attended, in_heads, matmul
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, Linear, RMSNorm
from memplan.graph.modules.functional import in_rows_again, made_from, masked_fill, softmax
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import from_batch
from memplan.graph.modules.module import Module, Weight
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.losses import cross_entropy
from memplan.model.attention import AttentionForm
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind
from memplan.model.parameters import ModelPart, WeightRole
from memplan.training.objectives import Objective

KINDS = OperationKind


class CpmAntLayerNorm(RMSNorm):
    kind = NormKind.RMS_T5

    def forward(self, hidden_states: Handle) -> Handle:
        old_dtype = hidden_states.dtype
        hidden_states = self.behind_hook(hidden_states)
        variance = hidden_states.float().pow(2).mean()
        scale = (variance + 1e-6).rsqrt()
        return (hidden_states * scale).to(old_dtype) * self.operand(self.weight)


class CpmAntAttention(HeadAttention):
    output = "attention_out"
    form = AttentionForm.OWN
    turned = False

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:  # noqa: ARG002
        hidden, role = config.integer("hidden_size"), WeightRole.QUERY_KEY
        self.num_heads = self.num_kv_heads = config.integer("num_attention_heads")
        self.head_dim = config.integer("dim_head")
        self.attention_dropout = config.number("dropout_p")
        inner = self.num_heads * self.head_dim
        self.project_q = Linear(hidden, inner, role=role)
        self.project_k = Linear(hidden, inner, role=role)
        self.project_v = Linear(hidden, inner)
        self.attention_out = Linear(inner, hidden, role=WeightRole.ATTENTION_OUTPUT)
        self.dropout = Dropout(self.attention_dropout)

    def forward(self, x: Handle, mask: Handle, position_bias: Handle) -> Attended:
        batch, length, _ = x.shape
        query = self.project_q(x)
        x = self.behind_hook(x)
        key = in_rows_again(self.project_k(x))
        value = self.project_v(x)
        query = in_heads(query, self.head_dim)
        key = in_heads(key, self.head_dim)
        value = in_heads(value, self.head_dim)
        score = divided(matmul(query, key.transpose(-1, -2)))
        score = score + position_bias
        score = masked_fill(score, mask.apart(KINDS.EQ, dtype=DType.BOOL))
        score = softmax(score)
        score = masked_fill(score, mask.apart(KINDS.EQ, dtype=DType.BOOL))
        score = self.dropout(score)
        score = matmul(score, value)
        score = score.permute(0, 2, 1, 3)
        score = score.contiguous().view(batch, length, -1)
        score = self.attention_out(score)
        return score, None


class CpmAntSelfAttentionBlock(Module):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.layernorm_before_attention = CpmAntLayerNorm(config.integer("hidden_size"))
        self.self_attention = CpmAntAttention(config, kind)
        self.dropout = Dropout(config.number("dropout_p"))

    def forward(self, hidden_states: Handle, mask: Handle, position_bias: Handle) -> Attended:
        outputs = self.layernorm_before_attention(hidden_states)
        outputs, attn_weights = self.self_attention(outputs, mask, position_bias)
        outputs = self.dropout(outputs)
        hidden_states = hidden_states + outputs
        return hidden_states, attn_weights


class CpmAntDenseGatedACT(Module):
    def __init__(self, hidden: int, inner: int) -> None:
        self.w_0 = Linear(hidden, inner)
        self.w_1 = Linear(hidden, inner)
        self.act = ActivationModule(Activation.GELU)

    def forward(self, hidden_states: Handle) -> Handle:
        gate_score = self.act(self.w_0(hidden_states))
        hidden_states = self.w_1(hidden_states)
        hidden_states = gate_score * hidden_states
        return hidden_states


class CpmAntFeedForward(MLP):
    is_gated = True

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("dim_ff")
        self.w_in = CpmAntDenseGatedACT(hidden, inner)
        self.dropout = Dropout(config.number("dropout_p"))
        self.w_out = Linear(inner, hidden)

    @property
    def last(self) -> Linear:
        return self.w_out

    @property
    def activation_kind(self) -> Activation:
        return self.w_in.act.kind

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.w_in(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.w_out(hidden_states)
        return hidden_states


class CpmAntFFNBlock(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.layernorm_before_ffn = CpmAntLayerNorm(config.integer("hidden_size"))
        self.ffn = CpmAntFeedForward(config)
        self.dropout = Dropout(config.number("dropout_p"))

    def forward(self, hidden_states: Handle) -> Handle:
        ln_outputs = self.layernorm_before_ffn(hidden_states)
        outputs = self.ffn(ln_outputs)
        outputs = self.dropout(outputs)
        hidden_states = hidden_states + outputs
        return hidden_states


class CpmAntTransformerBlock(DecoderLayer):
    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.residual_dropout = config.number("dropout_p")
        self.self_att = CpmAntSelfAttentionBlock(config, kind)
        self.ffn = CpmAntFFNBlock(config)

    def network_facts(self) -> FeedForwardSpec:
        return self.ffn.ffn.facts()

    def forward(self, hidden_states: Handle, mask: Handle, position_bias: Handle) -> Attended:
        position_bias = self.behind_hook(position_bias)
        hidden_states, attn_weights = self.self_att(hidden_states, mask, position_bias)
        hidden_states = self.ffn(hidden_states)
        return hidden_states, attn_weights


class CpmAntEncoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        kinds = [LayerKind(turned=False)] * config.layers("num_hidden_layers")
        self.layers = LayerList(
            "decoder.layers", kinds, lambda kind: CpmAntTransformerBlock(config, kind)
        )
        self.output_layernorm = CpmAntLayerNorm(config.integer("hidden_size"))
        self.output_layernorm.segment = "decoder.norm", ModelPart.NORM

    def forward(self, hidden_states: Handle, mask: Handle, position_bias: Handle) -> Handle:
        self.run.enter(self.within)
        for layer in self.layers:
            hidden_states, _attn_weights = layer(hidden_states, mask, position_bias)
        hidden_states = self.output_layernorm(hidden_states)
        self.run.leave(self.within)
        return hidden_states


class CpmAntSegmentPositionEmbedding(Module):
    """A number for each head and each bucket of distances, or pair of segments."""

    def __init__(self, config: ConfigReader) -> None:
        segments, buckets = (
            config.integer("segment_types"),
            config.integer("position_bias_num_buckets"),
        )
        self.num_heads = config.integer("num_attention_heads")
        self.relative_attention_bias = Weight(
            segments**2 + buckets, self.num_heads, role=WeightRole.TABLE
        )

    def forward(self, segment: Handle) -> Handle:
        length = segment.shape[-1]
        relative_position_bucket = self._segment_relative_position_bucket(segment)
        relative_position_bucket = relative_position_bucket.apart(KINDS.ADD_SCALAR)
        absolute_position_bucket = self._position_bucket(
            made_by(self.run, KINDS.SUB, (length, length), DType.INT32)
        )
        pairs = relative_position_bucket.shape
        relative_position_bucket = made_from(
            KINDS.WHERE, pairs, DType.INT32,
            made_from(KINDS.EQ, pairs, DType.BOOL, segment),
            absolute_position_bucket, relative_position_bucket,
        )  # fmt: skip
        embeds = self.embedding(relative_position_bucket)
        embeds = embeds.permute(0, 3, 1, 2).contiguous()
        return embeds

    def embedding(self, ids: Handle) -> Handle:
        """Looked up with heads last, so that its gradient comes the other way round and is copied."""
        table = self.parameter(self.relative_attention_bias)
        made = embedding_lookup(self.run, table, prod(ids.shape), ids.record, turned=True)
        return Handle(self.run, made, (*ids.shape, self.num_heads))

    def _segment_relative_position_bucket(self, segment: Handle) -> Handle:
        batch, length = segment.shape
        scaled_segment = segment.apart(KINDS.MUL_SCALAR)
        return made_from(KINDS.ADD, (batch, length, length), DType.INT32, scaled_segment, segment)

    def _position_bucket(self, relative_position: Handle) -> Handle:
        relative_buckets = relative_position.apart(KINDS.GT, dtype=DType.BOOL).apart(
            KINDS.TO, dtype=DType.INT32
        )
        relative_buckets = relative_buckets.apart(KINDS.MUL_SCALAR)
        relative_position = relative_position.apart(KINDS.ABS)
        is_small = relative_position.apart(KINDS.LT, dtype=DType.BOOL)
        large = relative_position.apart(KINDS.TO, dtype=DType.FP32)
        for kind in (KINDS.DIV, KINDS.LOG, KINDS.DIV, KINDS.MUL_SCALAR):
            large = large.apart(kind)
        large = large.apart(KINDS.TO, dtype=DType.INT32)
        relative_position_if_large = large.apart(KINDS.ADD_SCALAR)
        del large
        relative_position_if_large = relative_position_if_large.apart(
            KINDS.MINIMUM, relative_position_if_large.apart(KINDS.ONES)
        )
        relative_buckets += relative_position.apart(
            KINDS.WHERE, is_small, relative_position_if_large
        )
        return relative_buckets


class CpmAntForCausalLM(ForCausalLM):
    def loss(self, x: Handle) -> Tensor:
        """Of the logits in their own format."""
        if self.run.options.objective is not Objective.TASK:
            return super().loss(x)
        return cross_entropy(self.run, self.logits(x).record)


class CpmAntModel(Decoder):
    prefix = "cpmant"
    table = "input_embedding"
    classifies_tokens = classifies = False
    checkpoints = False
    eager_only = True
    ties = False
    embeds_more = True
    tasks: ClassVar[Mapping[Task, type[Any]]] = {
        Task.CAUSAL_LM: CpmAntForCausalLM,
        Task.BASE: BaseModel,
    }

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.prompt_length = config.integer("prompt_length")
        self.encoder = CpmAntEncoder(config)
        self.segment_embedding = Embedding(config.integer("segment_types"), hidden)
        rows = config.integer("vocab_size") + config.integer("prompt_types") * self.prompt_length
        self.input_embedding = Embedding(rows, hidden, role=WeightRole.TOKEN_TABLE)
        self.position_bias = CpmAntSegmentPositionEmbedding(config)

    @property
    def layer_list(self) -> LayerList:
        return self.encoder.layers

    @property
    def last_norm(self) -> Module:
        return self.encoder.output_layernorm

    def _prepare_attention_mask(self, span: Handle, context: Handle, length: Handle) -> Handle:
        run, (batch, seqlen) = self.run, span.shape
        pairs = batch, seqlen, seqlen
        directional_mask_2d = made_by(run, KINDS.LE, (seqlen, seqlen), DType.BOOL)
        attention_mask = made_from(
            KINDS.BITWISE_AND, pairs, DType.INT32, context,
            made_from(
                KINDS.BITWISE_AND, pairs, DType.BOOL,
                context.apart(KINDS.EQ, dtype=DType.BOOL), directional_mask_2d,
            ),
        )  # fmt: skip
        attention_mask = attention_mask & made_from(KINDS.EQ, pairs, DType.BOOL, span)
        mask_1d = made_from(KINDS.LT, (batch, seqlen - self.prompt_length), DType.BOOL, length)
        mask_1d = made_from(KINDS.CAT, (batch, seqlen), DType.BOOL, mask_1d)
        attention_mask = attention_mask & made_from(KINDS.BITWISE_AND, pairs, DType.BOOL, mask_1d)
        return attention_mask

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:  # noqa: ARG002
        run = self.run
        input_ids = from_batch(run, (batch, length)).apart(KINDS.TO, dtype=DType.INT32)
        segment = input_ids.apart(KINDS.WHERE, dtype=DType.INT64).apart(KINDS.TO, dtype=DType.INT32)
        lengths = made_from(KINDS.SUM, (batch,), DType.INT32, segment)
        shape = batch, self.prompt_length + length
        input_ids = made_from(KINDS.CAT, shape, DType.INT32, input_ids)
        segment = made_from(KINDS.CAT, shape, DType.INT32, segment)
        context = made_by(run, KINDS.ONES, shape, DType.INT32)
        _position = made_by(run, KINDS.REPEAT, shape, DType.INT32)
        span = made_by(run, KINDS.ZEROS, shape, DType.INT32)
        hidden_states = self.input_embedding(shape, input_ids)
        segment_states = self.segment_embedding(shape, segment)
        hidden_states = hidden_states + segment_states
        attention_mask = self._prepare_attention_mask(span, context, lengths)
        position_bias = self.position_bias(segment)
        hidden_states = self.encoder(hidden_states, attention_mask, position_bias)
        hidden_states = hidden_states.narrow(length, dim=1)
        return hidden_states
