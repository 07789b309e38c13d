"""Encoders that differ from BERT or RoBERTa in a part: DPR, RoCBert, LayoutLM, RemBERT.

(transformers 5.23: models/dpr, roc_bert, layoutlm, rembert)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.bert import (
    BertAttention,
    BertAttentionParts,
    BertEncoder,
    BertHeads,
    BertLayer,
    BertLayerParts,
    BertModel,
    BertPooler,
    BertSelfAttention,
    BertTables,
    gathered_types,
    token_rows,
)
from memplan.classes.encoders import (
    Encoded,
    EncodedStates,
    Encoder,
    EncoderLayer,
    EncoderTask,
    MaskedLM,
    OutputMatrix,
    Tasks,
    read_no_decoder,
)
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.modules.attention import Attended, attention_function, matmul
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import softmax
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.operation_kinds import OperationKind
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.parameters import WeightRole

# --- DPR ------------------------------------------------------------------------------------------------


class DPREncoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        self.bert_model = BertModel(config, pooled=False)

    def forward(self, batch: int, length: int) -> Encoded:
        outputs = self.bert_model(batch, length)
        return Encoded(outputs.last_hidden_state)


class DPRModel(Encoder):
    tasks: ClassVar[Tasks] = {Task.BASE: EncodedStates}

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:  # noqa: ARG002
        if config.integer("projection_dim", minimum=0):
            error = config.fail(
                "projection_dim", "only 0 is supported: no projection of the first token"
            )
            raise error
        self.ctx_encoder = DPREncoder(config)

    def forward(self, batch: int, length: int) -> Encoded:
        outputs: Encoded = self.ctx_encoder(batch, length)
        return outputs


# --- RoCBert --------------------------------------------------------------------------------------------


class RoCBertEmbeddings(Module):
    """Tables of a character's sound and shape, joined to the tokens' and projected."""

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        for key in ("concat_input", "enable_shape", "enable_pronunciation"):
            if not config.flag(key, default=True):
                error = config.fail(key, "only true is supported: else some tables are left unused")
                raise error
        sound, shape = (
            (config.integer(f"{name}_vocab_size"), config.integer(f"{name}_embed_dim"))
            for name in ("pronunciation", "shape")
        )
        rows, role = config.integer("vocab_size"), WeightRole.TOKEN_TABLE
        self.word_embeddings = Embedding(rows, hidden, role=role)
        self.pronunciation_embed = Embedding(*sound)
        self.shape_embed = Embedding(*shape)
        self.position_embeddings = Embedding(config.integer("max_position_embeddings"), hidden)
        self.token_type_embeddings = Embedding(config.integer("type_vocab_size"), hidden)
        self.map_inputs_layer = Linear(hidden + sound[1] + shape[1], hidden, bias=True)
        self.LayerNorm = LayerNorm(hidden)
        self.dropout = Dropout(config.number("hidden_dropout_prob"))

    def forward(self, batch: int, length: int) -> Handle:
        run = self.run
        token_type_ids = gathered_types(self, 1, length)
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        embedding_in = inputs_embeds.clone()
        input_shape_ids = made_by(run, OperationKind.ZEROS, (batch, length), DType.INT64)
        embedding_shape = self.shape_embed((batch, length), input_shape_ids)
        embedding_in = concatenate(embedding_in, embedding_shape)
        input_pronunciation_ids = made_by(run, OperationKind.ZEROS, (batch, length), DType.INT64)
        embedding_pronunciation = self.pronunciation_embed((batch, length), input_pronunciation_ids)
        embedding_in = concatenate(embedding_in, embedding_pronunciation)
        embedding_in = self.map_inputs_layer(embedding_in)
        token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
        embedding_in += token_type_embeddings
        position_embeddings = self.position_embeddings((1, length))
        embedding_in += position_embeddings
        embedding_in = self.LayerNorm(embedding_in)
        embedding_in = self.dropout(embedding_in)
        return embedding_in


class RoCBertModel(BertModel):
    prefix = "roc_bert"
    embeddings_class: Callable[[ConfigReader], Module] = RoCBertEmbeddings


# --- LayoutLM -------------------------------------------------------------------------------------------


class LayoutLMEmbeddings(Module):
    """Tables of the edges, heights and widths of each token's box beside those of BERT."""

    def __init__(self, config: ConfigReader) -> None:
        hidden, boxes = config.integer("hidden_size"), config.integer("max_2d_position_embeddings")
        rows, role = config.integer("vocab_size"), WeightRole.TOKEN_TABLE
        self.word_embeddings = Embedding(rows, hidden, role=role)
        self.position_embeddings = Embedding(config.integer("max_position_embeddings"), hidden)
        self.x_position_embeddings = Embedding(boxes, hidden)
        self.y_position_embeddings = Embedding(boxes, hidden)
        self.h_position_embeddings = Embedding(boxes, hidden)
        self.w_position_embeddings = Embedding(boxes, hidden)
        self.token_type_embeddings = Embedding(config.integer("type_vocab_size"), hidden)
        self.LayerNorm = LayerNorm(hidden)
        self.dropout = Dropout(config.number("hidden_dropout_prob"))

    def forward(
        self, batch: int, length: int, token_type_ids: Handle, bbox: tuple[Handle, ...]
    ) -> Handle:
        shape = batch, length
        words_embeddings = token_rows(self.word_embeddings, batch, length)
        position_embeddings = self.position_embeddings((1, length))
        left, upper, right, lower = bbox
        left_position_embeddings = self.x_position_embeddings(shape, left)
        upper_position_embeddings = self.y_position_embeddings(shape, upper)
        right_position_embeddings = self.x_position_embeddings(shape, right)
        lower_position_embeddings = self.y_position_embeddings(shape, lower)
        h_position_embeddings = self.h_position_embeddings(shape, difference(lower, upper))
        w_position_embeddings = self.w_position_embeddings(shape, difference(right, left))
        token_type_embeddings = self.token_type_embeddings(shape, token_type_ids)
        embeddings = (
            words_embeddings
            + position_embeddings
            + left_position_embeddings
            + upper_position_embeddings
            + right_position_embeddings
            + lower_position_embeddings
            + h_position_embeddings
            + w_position_embeddings
            + token_type_embeddings
        )
        embeddings = self.LayerNorm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


def difference(one: Handle, other: Handle) -> Handle:
    """Of ids, which no gradient passes."""
    return one.apart(OperationKind.SUB, other)


def boxes(module: Module, batch: int, length: int) -> tuple[Handle, ...]:
    """A box of zeros for each token: its four columns are views of one storage."""
    run = module.run
    made = made_by(run, OperationKind.ZEROS, (batch, length, 4), DType.INT64)
    strides = made.strides[:2]
    columns = (run.view(made.record, batch * length) for _ in range(4))
    return tuple(Handle(run, each, (batch, length), strides) for each in columns)


class LayoutLMSelfAttention(BertSelfAttention):
    """Attention whose softmax is in fp32."""

    def attend(self, query: Handle, key: Handle, value: Handle, mask: Handle | None) -> Attended:
        probability = self.dropout.probability
        return attention_function(self.run, causal=False)(query, key, value, mask, probability)


class LayoutLMAttention(BertAttentionParts):
    self_class: Callable[[ConfigReader], BertHeads] = LayoutLMSelfAttention

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        residual = x
        x, _ = self.self(x, mask)
        x = self.output(x, residual)
        return x


class LayoutLMLayer(BertLayer):
    attention_class: Callable[[ConfigReader], BertAttentionParts] = LayoutLMAttention

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        x = self.attention(x, mask)
        x = self.feed_forward_chunk(x)
        return x


class LayoutLMEncoder(BertEncoder):
    layer_class: Callable[[ConfigReader], EncoderLayer] = LayoutLMLayer


class LayoutLMModel(BertModel):
    prefix = "layoutlm"
    classifier_dropout_key = "hidden_dropout_prob"
    embeddings_class: Callable[[ConfigReader], Module] = LayoutLMEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = LayoutLMEncoder

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        super().__init__(config)
        assert self.pooler is not None
        self.pooler.is_read = pooled

    def forward(self, batch: int, length: int) -> Encoded:
        run = self.run
        attention_mask = made_by(run, OperationKind.ONES, (batch, length), DType.FP32)
        token_type_ids = made_by(run, OperationKind.ZEROS, (batch, length), DType.INT64)
        bbox = boxes(self, batch, length)
        mask = attention_mask.unsqueeze(1).unsqueeze(2)
        mask = mask.to(run.compute)
        mask = mask.apart(OperationKind.SUB).apart(OperationKind.MUL_SCALAR)
        embedding_output = self.embeddings(batch, length, token_type_ids, bbox)
        sequence_output = self.encoder(embedding_output, mask)
        assert self.pooler is not None
        pooled_output = self.pooler(sequence_output)
        return Encoded(sequence_output, pooled_output)


# --- RemBERT --------------------------------------------------------------------------------------------


class RemBertEmbeddings(BertTables):
    def width(self, config: ConfigReader) -> int:
        return config.integer("input_embedding_size")

    def forward(self, batch: int, length: int, token_type_ids: Handle) -> Handle:
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
        embeddings = inputs_embeds + token_type_embeddings
        position_embeddings = self.position_embeddings((1, length))
        embeddings += position_embeddings
        embeddings = self.LayerNorm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


class RemBertSelfAttention(BertSelfAttention):
    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query_layer = self.query(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        key_layer = self.key(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        value_layer = self.value(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        attention_scores = matmul(query_layer, key_layer.transpose(2, 3))
        attention_scores = attention_scores / self.head_dim**0.5
        if mask is not None:
            attention_scores = attention_scores + mask
        attention_probs = softmax(attention_scores)
        attention_probs = self.dropout(attention_probs)
        context_layer = matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(batch, length, -1)
        return context_layer, attention_probs


class RemBertAttention(BertAttention):
    self_class: Callable[[ConfigReader], BertHeads] = RemBertSelfAttention

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        self_outputs = self.self(x, mask)
        attention_output = self.output(self_outputs[0], x)
        return attention_output, self_outputs[1]


class RemBertLayer(BertLayerParts):
    attention_class: Callable[[ConfigReader], BertAttentionParts] = RemBertAttention

    def forward(self, x: Handle, mask: Handle | None) -> tuple[Handle, Handle | None]:
        self_attention_outputs = self.attention(x, mask)
        attention_output = self_attention_outputs[0]
        outputs = self_attention_outputs[1]
        layer_output = self.feed_forward_chunk(attention_output)
        return layer_output, outputs


class RemBertEncoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        inputs, hidden = config.integer("input_embedding_size"), config.integer("hidden_size")
        self.embedding_hidden_mapping_in = Linear(inputs, hidden, bias=True)
        kinds = [None] * config.layers("num_hidden_layers")
        self.layer = LayerList("encoder.layers", kinds, lambda _: RemBertLayer(config))

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        x = self.embedding_hidden_mapping_in(x)
        for layer_module in self.layer:
            layer_outputs = layer_module(x, mask)
            x = layer_outputs[0]
        return x


class RemBertLMPredictionHead(Module):
    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:
        width = config.integer("output_embedding_size")
        self.dense = Linear(config.integer("hidden_size"), width, bias=True)
        self.decoder = OutputMatrix(task.spec, width)
        self.decoder.tie(task)
        self.activation = ActivationModule(read_activation(config, "hidden_act"))
        self.LayerNorm = LayerNorm(width)

    def forward(self, x: Handle) -> Handle:
        x = self.dense(x)
        x = self.activation(x)
        x = self.LayerNorm(x)
        x = self.decoder(x)
        return x


class RemBertOnlyMLMHead(Module):
    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:
        self.predictions = RemBertLMPredictionHead(config, task)

    def forward(self, x: Handle) -> Handle:
        return self.predictions(x)


class RemBertForMaskedLM(MaskedLM):
    def add_head(self, config: ConfigReader) -> None:
        self.cls = RemBertOnlyMLMHead(config, self)

    def scores(self, x: Handle) -> Handle:
        return self.cls(x)


class RemBertModel(Encoder):
    prefix = "rembert"
    tasks: ClassVar[Tasks] = {**BertModel.tasks, Task.MASKED_LM: RemBertForMaskedLM}
    eager_only = True
    classifier_dropout_key = "classifier_dropout_prob"

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        read_no_decoder(config)
        inputs, outputs = (config.integer(f"{each}_embedding_size") for each in ("input", "output"))
        if config.flag("tie_word_embeddings", default=True) and inputs != outputs:
            problem = "cannot tie unequal input_embedding_size and output_embedding_size"
            error = config.fail("tie_word_embeddings", problem)
            raise error
        self.embeddings = RemBertEmbeddings(config)
        self.encoder = RemBertEncoder(config)
        self.pooler = BertPooler(config) if pooled else None

    def forward(self, batch: int, length: int) -> Encoded:
        token_type_ids = made_by(self.run, OperationKind.ZEROS, (batch, length), DType.INT64)
        embedding_output = self.embeddings(batch, length, token_type_ids)
        encoder_outputs = self.encoder(embedding_output, None)
        sequence_output = encoder_outputs
        pooled_output = self.pooler(sequence_output) if self.pooler is not None else None
        return Encoded(sequence_output, pooled_output)
