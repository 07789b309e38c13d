"""DeBERTa and DeBERTa-v2: scores of contents, and of contents against how far apart they stand.

(transformers 5.23: models/deberta, models/deberta_v2)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.base import Encoded, Encoder, EncoderLayer, first_token, require_flag
from memplan.classes.encoders.bert import BertForMaskedLM
from memplan.classes.encoders.layers import AttentionParts, Heads, Layer, Output, SelfOutput
from memplan.classes.encoders.tables import TableParts, token_rows, zero_ids
from memplan.classes.encoders.tasks import (
    EncodedStates,
    QuestionAnswering,
    SequenceClassification,
    Tasks,
    TokenClassification,
    nonlinear,
)
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended, in_heads, matmul
from memplan.graph.modules.basic import Dropout, Embedding, LayerNorm, Linear, Norm, scaled
from memplan.graph.modules.convolutions import Conv1d
from memplan.graph.modules.functional import batched_product as bmm
from memplan.graph.modules.functional import (
    divide,
    gather,
    made_from,
    masked_fill,
    masked_fill_in_place,
    repeated,
    scaled_in_place,
    softmax,
    zeros,
)
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart

KINDS = OperationKind


class DebertaLayerNorm(LayerNorm):
    """Written out: centred twice in fp32, over the root of the variance, cast back."""

    def forward(self, x: Handle) -> Handle:
        dtype = x.dtype
        x = x.float()
        mean = x.mean()
        variance = (x - mean).pow(2).mean()
        x = divide(x - mean, (variance + 1e-7).unary(KINDS.SQRT))
        x = x.to(dtype)
        y = scaled(self, self.weight, x) + self.operand(self.bias)
        return y


class Distances:
    """How far apart tokens can stand, and which scores are made of it."""

    def __init__(self, config: ConfigReader) -> None:
        given, key = config.raw("pos_att_type"), "pos_att_type"
        kinds = given.lower().split("|") if isinstance(given, str) else config.texts(key)
        self.relative_attention = config.flag("relative_attention")
        self.c2p, self.p2c = "c2p" in kinds, "p2c" in kinds
        largest = config.optional_integer("max_relative_positions", minimum=-1) or -1
        self.largest = largest if largest > 0 else config.integer("max_position_embeddings")


class DisentangledSelfAttention(Heads):
    """Queries, keys and values in one product."""

    def __init__(self, config: ConfigReader) -> None:
        hidden = self.read_sizes(config)
        require_flag(config, "talking_head", value=False, problem="is not supported")
        self.distances = distances = Distances(config)
        self.in_proj = Linear(hidden, 3 * hidden)
        self.q_bias = Weight(hidden)
        self.v_bias = Weight(hidden)
        if distances.relative_attention:
            self.pos_dropout = Dropout(config.number("hidden_dropout_prob"))
            if distances.c2p:
                self.pos_proj = Linear(hidden, hidden)
            if distances.p2c:
                self.pos_q_proj = Linear(hidden, hidden, bias=True)
        self.add_dropout(config.number(self.dropout_key))

    def transpose_for_scores(self, x: Handle) -> Handle:
        batch, length, width = x.shape
        x = x.view(batch, length, self.num_heads, width // self.num_heads)
        return x.permute(0, 2, 1, 3)

    def head_bias(self, weight: Weight) -> Handle:
        """A number for each dimension of each head, for all tokens."""
        return self.operand(weight).view(1, 1, -1, self.head_dim).permute(0, 2, 1, 3)

    def forward(
        self, x: Handle, mask: Handle, relative_pos: Handle | None, rel_embeddings: Handle | None
    ) -> Attended:
        batch, length, _ = x.shape
        qp = self.in_proj(x)
        query_layer, key_layer, value_layer = self.transpose_for_scores(qp).split(
            *(self.head_dim,) * 3
        )
        query_layer = query_layer + self.head_bias(self.q_bias)
        value_layer = value_layer + self.head_bias(self.v_bias)
        rel_att: Handle | float = 0
        query_layer = query_layer / self.head_dim
        # Keys are turned in a node of their own, so that queries have their gradients first.
        turned = key_layer.seen_as(*key_layer.shape).transpose(-1, -2)
        attention_scores = matmul(query_layer, turned)
        del turned
        if relative_pos is not None and rel_embeddings is not None:
            rel_embeddings = self.pos_dropout(rel_embeddings)
            rel_att = self.disentangled_att_bias(
                query_layer, key_layer, relative_pos, rel_embeddings
            )
        attention_scores = attention_scores + rel_att
        mask = mask.apart(KINDS.TO, dtype=DType.BOOL)
        attention_scores = masked_fill(attention_scores, mask.apart(KINDS.BITWISE_NOT))
        attention_probs = softmax(attention_scores)
        attention_probs = self.dropout(attention_probs)
        context_layer = matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(batch, length, -1)
        return context_layer, None

    def disentangled_att_bias(
        self, query_layer: Handle, key_layer: Handle, relative_pos: Handle, rel_embeddings: Handle
    ) -> Handle | float:
        att_span = min(query_layer.shape[-2], self.distances.largest)
        rel_embeddings = rel_embeddings.narrow(2 * att_span, dim=0).unsqueeze(0)
        score: Handle | float = 0
        if self.distances.c2p:
            pos_key_layer = self.pos_proj(rel_embeddings)
            pos_key_layer = self.transpose_for_scores(pos_key_layer)
            c2p_att = matmul(query_layer, pos_key_layer.transpose(-1, -2))
            c2p_pos = clamped(relative_pos.apart(KINDS.ADD))
            c2p_att = gather(c2p_att, c2p_pos)
            score += c2p_att
        if self.distances.p2c:
            pos_query_layer = self.pos_q_proj(rel_embeddings)
            pos_query_layer = self.transpose_for_scores(pos_query_layer)
            pos_query_layer = scaled_in_place(pos_query_layer, of_view=True)
            p2c_pos = clamped(relative_pos.apart(KINDS.NEG).apart(KINDS.ADD))
            p2c_att = matmul(key_layer, pos_query_layer.transpose(-1, -2))
            p2c_att = gather(p2c_att, p2c_pos).transpose(-1, -2)
            score += p2c_att
        return score


def clamped(shifted: Handle) -> Handle:
    """Distances as numbers of rows, those that there are none of brought to the last one."""
    return shifted.apart(KINDS.CLAMP)


class DebertaSelfOutput(SelfOutput):
    norm_class: Callable[[int], Norm] = DebertaLayerNorm


class DebertaAttention(AttentionParts):
    self_class: Callable[[ConfigReader], Heads] = DisentangledSelfAttention
    output_class: Callable[[ConfigReader], SelfOutput] = DebertaSelfOutput

    def forward(self, x: Handle, *beside: Handle | None) -> Attended:
        self_output, _ = self.self(x, *beside)
        attention_output = self.output(self_output, x)
        return attention_output, None


class DebertaOutput(Output):
    norm_class: Callable[[int], Norm] = DebertaLayerNorm


class DebertaLayer(Layer):
    attention_class: Callable[[ConfigReader], AttentionParts] = DebertaAttention
    output_class: Callable[[ConfigReader], Module] = DebertaOutput


class DebertaEmbeddings(TableParts):
    num_buffers = 1
    norm_class: Callable[[int], Norm] = DebertaLayerNorm

    def add_positions(self, config: ConfigReader, width: int) -> None:
        if config.flag("position_biased_input"):
            super().add_positions(config, width)

    def add_types(self, config: ConfigReader, width: int) -> None:
        if config.integer("type_vocab_size", minimum=0):
            super().add_types(config, width)

    def forward(self, batch: int, length: int, token_type_ids: Handle, mask: Handle) -> Handle:
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        embeddings = inputs_embeds
        if "position_embeddings" in self.children:
            position_embeddings = self.position_embeddings((1, length))
            embeddings = embeddings + position_embeddings
        else:
            position_embeddings = zeros(inputs_embeds)
        if "token_type_embeddings" in self.children:
            token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
            embeddings = embeddings + token_type_embeddings
        embeddings = self.LayerNorm(embeddings)
        mask = mask.unsqueeze(2)
        mask = (
            mask if mask.dtype is embeddings.dtype else mask.apart(KINDS.TO, dtype=embeddings.dtype)
        )
        embeddings = embeddings * mask
        embeddings = self.dropout(embeddings)
        return embeddings


class DebertaEncoder(Module):
    layer_class: Callable[[ConfigReader], EncoderLayer] = DebertaLayer
    norm_rel_ebd = False
    conv: "ConvLayer | None" = None

    def __init__(self, config: ConfigReader) -> None:
        apart = self.has_convolution(config)
        kinds = [apart and not number for number in range(config.layers("num_hidden_layers"))]
        self.layer = LayerList("encoder.layers", kinds, lambda _: self.layer_class(config))
        self.distances = Distances(config)
        if self.distances.relative_attention:
            rows = 2 * self.num_distances(config)
            self.rel_embeddings = Embedding(rows, config.integer("hidden_size"))

    def has_convolution(self, config: ConfigReader) -> bool:  # noqa: ARG002
        """Whether one follows the first layer."""
        return False

    def num_distances(self, config: ConfigReader) -> int:  # noqa: ARG002
        """Those either way that have a row of their own."""
        return self.distances.largest

    def build_relative_position(self, length: int) -> Handle:
        q_ids, k_ids = (
            made_by(self.run, KINDS.ARANGE, each, DType.INT64)
            for each in ((length, 1), (1, length))
        )
        return q_ids.apart(KINDS.SUB, k_ids.apart(KINDS.REPEAT, shape=(length, 1)))

    def get_rel_embedding(self) -> Handle | None:
        if not self.distances.relative_attention:
            return None
        rel_embeddings = self.rel_embeddings.operand(self.rel_embeddings.weight)
        if self.norm_rel_ebd:
            rel_embeddings = self.children["LayerNorm"](rel_embeddings)
        return rel_embeddings

    def forward(self, x: Handle, mask: Handle) -> list[Handle]:
        batch, length, _ = x.shape
        input_mask = mask
        mask = made_from(KINDS.MUL, (batch, 1, length, length), DType.FP32, mask)
        relative_pos = None
        if self.distances.relative_attention:
            relative_pos = self.build_relative_position(length)
        all_hidden_states = [x]
        next_kv = x
        rel_embeddings = self.get_rel_embedding()
        for number, layer in enumerate(self.layer):
            output_states = layer(next_kv, mask, relative_pos, rel_embeddings)
            if self.conv is not None and not number:
                output_states = self.conv(output_states, x, input_mask)
            all_hidden_states.append(output_states)
            next_kv = output_states
        return all_hidden_states


class ContextPooler(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.dense = Linear(hidden, hidden, bias=True)
        self.dropout = Dropout(config.number("pooler_dropout"))
        self.activation = read_activation(config, "pooler_hidden_act")

    def forward(self, x: Handle) -> Handle:
        context_token = first_token(x)
        context_token = self.dropout(context_token)
        pooled_output = self.dense(context_token)
        pooled_output = nonlinear(pooled_output, self.activation)
        return pooled_output


class DebertaForSequenceClassification(SequenceClassification):
    def add_head(self, config: ConfigReader) -> None:
        self.pooler = ContextPooler(config)
        self.classifier = Linear(self.spec.hidden_size, self.spec.num_labels, bias=True)
        hidden_dropout = config.number("hidden_dropout_prob")
        self.dropout = Dropout(config.number("cls_dropout", default=hidden_dropout))

    def logits(self, outputs: Encoded) -> Handle:
        encoder_layer = outputs.last_hidden_state
        pooled_output = self.pooler(encoder_layer)
        pooled_output = self.dropout(pooled_output)
        return self.classifier(pooled_output)


class DebertaModel(Encoder):
    prefix = "deberta"
    eager_only = True
    classifier_dropout_key = "hidden_dropout_prob"
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: BertForMaskedLM,
        Task.BASE: EncodedStates,
        Task.SEQUENCE_CLASSIFICATION: DebertaForSequenceClassification,
        Task.TOKEN_CLASSIFICATION: TokenClassification,
        Task.QUESTION_ANSWERING: QuestionAnswering,
    }
    embeddings_class: Callable[[ConfigReader], DebertaEmbeddings] = DebertaEmbeddings
    encoder_class: Callable[[ConfigReader], DebertaEncoder] = DebertaEncoder

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:  # noqa: ARG002
        require_flag(config, "legacy", value=True, problem="the other head is not supported")
        self.embeddings = self.embeddings_class(config)
        self.encoder = self.encoder_class(config)

    def forward(self, batch: int, length: int) -> Encoded:
        attention_mask = made_by(self.run, KINDS.ONES, (batch, length), DType.FP32)
        token_type_ids = zero_ids(self, batch, length)
        embedding_output = self.embeddings(batch, length, token_type_ids, attention_mask)
        encoded_layers = self.encoder(embedding_output, attention_mask)
        sequence_output = encoded_layers[-1]
        return Encoded(sequence_output)


# --- DeBERTa-v2 -----------------------------------------------------------------------------------------


class DebertaV2SelfAttention(Heads):
    """Batch and heads are one dimension, in copies."""

    names = "query_proj", "key_proj", "value_proj"
    query_proj: Linear
    key_proj: Linear
    value_proj: Linear

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.distances = distances = Distances(config)
        hidden = config.integer("hidden_size")
        self.share_att_key = config.flag("share_att_key")
        if distances.relative_attention:
            self.pos_dropout = Dropout(config.number("hidden_dropout_prob"))
            if distances.c2p and not self.share_att_key:
                self.pos_key_proj = Linear(hidden, hidden, bias=True)
            if distances.p2c and not self.share_att_key:
                self.pos_query_proj = Linear(hidden, hidden, bias=True)
        self.children["dropout"] = self.children.pop("dropout")

    def transpose_for_scores(self, x: Handle) -> Handle:
        x = in_heads(x, self.head_dim)
        return x.contiguous().view(-1, x.shape[2], self.head_dim)

    def forward(
        self, x: Handle, mask: Handle, relative_pos: Handle | None, rel_embeddings: Handle | None
    ) -> Attended:
        batch, length, _ = x.shape
        square = batch, self.num_heads, length, length
        query_layer = self.transpose_for_scores(self.query_proj(x))
        key_layer = self.transpose_for_scores(self.key_proj(x))
        value_layer = self.transpose_for_scores(self.value_proj(x))
        rel_att = None
        attention_scores = bmm(query_layer, key_layer.transpose(-1, -2) / self.head_dim)
        if relative_pos is not None and rel_embeddings is not None:
            rel_embeddings = self.pos_dropout(rel_embeddings)
            rel_att = self.disentangled_attention_bias(
                query_layer, key_layer, relative_pos, rel_embeddings
            )
            attention_scores = attention_scores + rel_att
        attention_scores = attention_scores.view(*square)
        mask = mask.apart(KINDS.TO, dtype=DType.BOOL)
        attention_scores = masked_fill(attention_scores, mask.apart(KINDS.BITWISE_NOT))
        attention_probs = softmax(attention_scores)
        attention_probs = self.dropout(attention_probs)
        context_layer = bmm(attention_probs.view(-1, length, length), value_layer)
        context_layer = context_layer.view(batch, self.num_heads, length, -1)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(batch, length, -1)
        return context_layer, None

    def projected(self, rel_embeddings: Handle, name: str, times: int) -> Handle:
        """Distances through the projection of queries or keys, or one of their own, once for each sequence."""
        module = self.children[f"{name}_proj" if self.share_att_key else f"pos_{name}_proj"]
        return repeated(self.transpose_for_scores(module(rel_embeddings)), times)

    def disentangled_attention_bias(
        self, query_layer: Handle, key_layer: Handle, relative_pos: Handle, rel_embeddings: Handle
    ) -> Handle | float:
        rel_embeddings = rel_embeddings.unsqueeze(0)
        times = query_layer.shape[0] // self.num_heads
        shared, distances = self.share_att_key, self.distances
        score: Handle | float = 0
        pos_query_layer = pos_key_layer = None
        if shared:
            pos_query_layer = self.projected(rel_embeddings, "query", times)
        if shared or distances.c2p:
            pos_key_layer = self.projected(rel_embeddings, "key", times)
        if distances.p2c and not shared:
            pos_query_layer = self.projected(rel_embeddings, "query", times)
        if distances.c2p and pos_key_layer is not None:
            c2p_att = bmm(query_layer, pos_key_layer.transpose(-1, -2))
            c2p_pos = clamped(relative_pos.apart(KINDS.ADD))
            c2p_att = gather(c2p_att, c2p_pos)
            score += c2p_att / self.head_dim
        if distances.p2c and pos_query_layer is not None:
            p2c_pos = clamped(relative_pos.apart(KINDS.NEG).apart(KINDS.ADD))
            p2c_att = bmm(key_layer, pos_query_layer.transpose(-1, -2))
            p2c_att = gather(p2c_att, p2c_pos).transpose(-1, -2)
            score += p2c_att / self.head_dim
        return score


class DebertaV2Attention(DebertaAttention):
    self_class: Callable[[ConfigReader], Heads] = DebertaV2SelfAttention
    output_class: Callable[[ConfigReader], SelfOutput] = SelfOutput


class DebertaV2Layer(Layer):
    attention_class: Callable[[ConfigReader], AttentionParts] = DebertaV2Attention


class ConvLayer(Module):
    """Tokens beside one another, added to the first layer's."""

    segment = "encoder.convolution", ModelPart.OTHER

    def __init__(self, config: ConfigReader) -> None:
        hidden, kernel = config.integer("hidden_size"), config.integer("conv_kernel_size")
        groups = config.integer("conv_groups", default=1)
        config.divide("hidden_size", hidden, "conv_groups", groups)
        given = config.has("conv_act")
        self.conv_act = read_activation(config, "conv_act") if given else Activation.TANH
        self.conv = Conv1d(hidden, hidden, kernel, padding=(kernel - 1) // 2, groups=groups)
        self.conv.gives_rows = True
        self.LayerNorm = LayerNorm(hidden)
        self.dropout = Dropout(config.number("hidden_dropout_prob"))

    def forward(self, residual_states: Handle, x: Handle, input_mask: Handle) -> Handle:
        out = self.conv(x.permute(0, 2, 1).contiguous()).permute(0, 2, 1).contiguous()
        rmask = input_mask.apart(KINDS.SUB).apart(KINDS.TO, dtype=DType.BOOL)
        out = masked_fill_in_place(out, rmask)
        out = nonlinear(self.dropout(out), self.conv_act)
        layer_norm_input = residual_states + out
        output = self.LayerNorm(layer_norm_input)
        input_mask = input_mask.unsqueeze(2)
        if input_mask.dtype is not output.dtype:
            input_mask = input_mask.apart(KINDS.TO, dtype=output.dtype)
        output_states = output * input_mask
        return output_states


class DebertaV2Embeddings(DebertaEmbeddings):
    norm_class: Callable[[int], Norm] = LayerNorm


class DebertaV2Encoder(DebertaEncoder):
    layer_class: Callable[[ConfigReader], EncoderLayer] = DebertaV2Layer

    def __init__(self, config: ConfigReader) -> None:
        self.position_buckets = config.optional_integer("position_buckets", minimum=-1) or -1
        super().__init__(config)
        self.norm_rel_ebd = "layer_norm" in config.text("norm_rel_ebd", default="none").lower()
        if self.norm_rel_ebd:
            self.LayerNorm = LayerNorm(config.integer("hidden_size"))
        if self.has_convolution(config):
            self.conv = ConvLayer(config)

    def has_convolution(self, config: ConfigReader) -> bool:
        return config.integer("conv_kernel_size", default=0, minimum=0) > 0

    def num_distances(self, config: ConfigReader) -> int:
        buckets = self.position_buckets
        return buckets if buckets > 0 else super().num_distances(config)

    def build_relative_position(self, length: int) -> Handle:
        q_ids, k_ids = (
            made_by(self.run, KINDS.ARANGE, each, DType.INT64)
            for each in ((length, 1), (1, length))
        )
        rel_pos_ids = q_ids.apart(KINDS.SUB, k_ids)
        if self.position_buckets > 0:
            rel_pos_ids = make_log_bucket_position(rel_pos_ids)
            rel_pos_ids = rel_pos_ids.apart(KINDS.TO, dtype=DType.INT64)
        return rel_pos_ids


def make_log_bucket_position(relative_pos: Handle) -> Handle:
    """In floating point: far distances share a row."""
    full, logical = DType.FP32, DType.BOOL
    sign = relative_pos.apart(KINDS.SIGN)
    near = relative_pos.apart(KINDS.LT, dtype=logical) & relative_pos.apart(KINDS.GT, dtype=logical)
    abs_pos = near.apart(KINDS.WHERE, relative_pos.apart(KINDS.ABS), dtype=DType.INT64)
    del near
    log_pos = (
        abs_pos.apart(KINDS.DIV, dtype=full).apart(KINDS.LOG).apart(KINDS.DIV)
        .apart(KINDS.MUL_SCALAR).apart(KINDS.CEIL).apart(KINDS.ADD)
    )  # fmt: skip
    is_near = abs_pos.apart(KINDS.LE, dtype=logical)
    own = relative_pos.apart(KINDS.TO, dtype=full)
    return is_near.apart(KINDS.WHERE, own, log_pos.apart(KINDS.MUL, sign, dtype=full), dtype=full)


class DebertaV2Model(DebertaModel):
    embeddings_class: Callable[[ConfigReader], DebertaEmbeddings] = DebertaV2Embeddings
    encoder_class: Callable[[ConfigReader], DebertaEncoder] = DebertaV2Encoder
