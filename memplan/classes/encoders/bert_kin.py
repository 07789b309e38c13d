"""Encoders that differ from BERT or RoBERTa in a part: DPR, RoCBert, LayoutLM, RemBERT.

(transformers 5.23: models/dpr, roc_bert, layoutlm, rembert)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.base import Encoded, Encoder, EncoderLayer
from memplan.classes.encoders.bert import BertModel, BertOnlyMLMHead
from memplan.classes.encoders.layers import (
    Attention,
    AttentionParts,
    Heads,
    Layer,
    LayerParts,
    PlainScores,
    SelfAttention,
    Stack,
)
from memplan.classes.encoders.tables import (
    Embeddings,
    TableParts,
    counted_ids,
    token_rows,
    zero_ids,
)
from memplan.classes.encoders.tasks import EncodedStates, EncoderTask, LMHead, MaskedLM, Tasks
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import ActivationModule, Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import add_to_view, strided
from memplan.graph.modules.handles import Handle, made_by, seen_in
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables, concatenate
from memplan.model.config import ConfigReader
from memplan.model.heads import Task

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


class RoCBertEmbeddings(TableParts):
    """Tables of a character's sound and shape, joined to the tokens' and projected."""

    def add_tables(self, config: ConfigReader, width: int) -> None:
        for key in ("concat_input", "enable_shape", "enable_pronunciation"):
            if not config.flag(key):
                error = config.fail(key, "only true is supported: else some tables are left unused")
                raise error
        sound, shape = (
            (config.integer(f"{name}_vocab_size"), config.integer(f"{name}_embed_dim"))
            for name in ("pronunciation", "shape")
        )
        self.pronunciation_embed = Embedding(*sound)
        self.shape_embed = Embedding(*shape)
        super().add_tables(config, width)
        for each in (self.word_embeddings, self.shape_embed, self.pronunciation_embed):
            each.turned = True  # it is given a few columns of the joined rows' gradient
        self.map_inputs_layer = Linear(width + sound[1] + shape[1], width, bias=True)

    def forward(self, batch: int, length: int, token_type_ids: Handle | None) -> Handle:
        token_type_ids = counted_ids(self, 1, length)
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        embedding_in = inputs_embeds.like(self.run.contiguous(inputs_embeds.record))
        input_shape_ids = zero_ids(self, batch, length)
        embedding_shape = self.shape_embed((batch, length), input_shape_ids)
        embedding_in = concatenate(embedding_in, embedding_shape)
        input_pronunciation_ids = zero_ids(self, batch, length)
        embedding_pronunciation = self.pronunciation_embed((batch, length), input_pronunciation_ids)
        embedding_in = concatenate(embedding_in, embedding_pronunciation)
        embedding_in = self.map_inputs_layer(embedding_in)
        token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
        seen = embedding_in  # of the layer's rows, which are added to
        embedding_in = add_to_view(embedding_in, token_type_embeddings)
        position_embeddings = self.position_embeddings((1, length))
        embedding_in = strided(add_to_view(embedding_in, position_embeddings), seen)
        del seen
        embedding_in = self.LayerNorm(embedding_in)
        embedding_in = self.dropout(embedding_in)
        return embedding_in


class RoCBertModel(BertModel):
    prefix = "roc_bert"
    embeddings_class: Callable[[ConfigReader], Module] = RoCBertEmbeddings


# --- LayoutLM -------------------------------------------------------------------------------------------


class LayoutLMEmbeddings(TableParts):
    """Tables of the edges, heights and widths of each token's box beside those of BERT."""

    num_buffers = 1

    def add_positions(self, config: ConfigReader, width: int) -> None:
        super().add_positions(config, width)
        boxes = config.integer("max_2d_position_embeddings")
        self.x_position_embeddings = Embedding(boxes, width)
        self.y_position_embeddings = Embedding(boxes, width)
        self.h_position_embeddings = Embedding(boxes, width)
        self.w_position_embeddings = Embedding(boxes, width)

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
    return tuple(seen_in(run, made.record, (batch, length), strides) for _ in range(4))


class LayoutLMSelfAttention(SelfAttention):
    """Attention whose softmax is in fp32."""

    eager = None


class LayoutLMAttention(Attention):
    self_class: Callable[[ConfigReader], Heads] = LayoutLMSelfAttention
    hands_on_weights = False


class LayoutLMLayer(Layer):
    attention_class: Callable[[ConfigReader], AttentionParts] = LayoutLMAttention


class LayoutLMEncoder(Stack):
    layer_class: Callable[[ConfigReader], EncoderLayer] = LayoutLMLayer


class LayoutLMModel(BertModel):
    prefix = "layoutlm"
    classifier_dropout_key = "hidden_dropout_prob"
    embeddings_class: Callable[[ConfigReader], Module] = LayoutLMEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = LayoutLMEncoder

    always_pools = True

    def forward(self, batch: int, length: int) -> Encoded:
        run = self.run
        attention_mask = made_by(run, OperationKind.ONES, (batch, length), DType.FP32)
        token_type_ids = zero_ids(self, batch, length)
        bbox = boxes(self, batch, length)
        mask = attention_mask.unsqueeze(1).unsqueeze(2)
        mask = mask.to(run.compute)
        mask = mask.apart(OperationKind.SUB).apart(OperationKind.MUL_SCALAR)
        embedding_output = self.embeddings(batch, length, token_type_ids, bbox)
        sequence_output = self.encoder(embedding_output, mask)
        return Encoded(sequence_output, self.pooled(sequence_output))


# --- RemBERT --------------------------------------------------------------------------------------------


class RemBertEmbeddings(Embeddings):
    num_buffers = 1
    width_key = "input_embedding_size"
    adds_in_place = True


class RemBertAttention(Attention):
    self_class: Callable[[ConfigReader], Heads] = PlainScores

    def forward(self, x: Handle, *beside: Handle | Tables | None) -> Attended:
        self_outputs = self.self(x, *beside)
        attention_output = self.output(self_outputs[0], x)
        return attention_output, self_outputs[1]


class RemBertLayer(LayerParts):
    """What it returns holds the weights, until the next one returns."""

    attention_class: Callable[[ConfigReader], AttentionParts] = RemBertAttention

    def forward(self, x: Handle, *beside: Handle | Tables | None) -> Attended:
        self_attention_outputs = self.attention(x, *beside)
        layer_output = self.feed_forward_chunk(self_attention_outputs[0])
        return layer_output, self_attention_outputs[1]


class RemBertEncoder(Stack):
    layer_class: Callable[[ConfigReader], EncoderLayer] = RemBertLayer

    def __init__(self, config: ConfigReader) -> None:
        inputs, hidden = config.integer("input_embedding_size"), config.integer("hidden_size")
        self.embedding_hidden_mapping_in = Linear(inputs, hidden, bias=True)
        super().__init__(config)

    def forward(self, x: Handle, *beside: Handle | Tables | None) -> Handle:
        x = self.embedding_hidden_mapping_in(x)
        for layer_module in self.stacked:
            layer_outputs = layer_module(x, *beside)
            x = layer_outputs[0]
        return x


class RemBertLMPredictionHead(LMHead):
    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:
        width = config.integer("output_embedding_size")
        self.dense = Linear(config.integer("hidden_size"), width, bias=True)
        self.add_decoder(task, width, own_bias=False)
        self.activation = ActivationModule(read_activation(config, "hidden_act"))
        self.LayerNorm = LayerNorm(width)


class RemBertOnlyMLMHead(BertOnlyMLMHead):
    predictions_class: Callable[[ConfigReader, EncoderTask], Module] = RemBertLMPredictionHead


class RemBertForMaskedLM(MaskedLM):
    named_head = "cls", RemBertOnlyMLMHead


class RemBertModel(BertModel):
    prefix = "rembert"
    tasks: ClassVar[Tasks] = {**BertModel.tasks, Task.MASKED_LM: RemBertForMaskedLM}
    eager_only = True
    classifier_dropout_key = "classifier_dropout_prob"
    embeddings_class: Callable[[ConfigReader], Module] = RemBertEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = RemBertEncoder
    makes_types = True

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        inputs, outputs = (config.integer(f"{each}_embedding_size") for each in ("input", "output"))
        if config.flag("tie_word_embeddings") and inputs != outputs:
            problem = "cannot tie unequal input_embedding_size and output_embedding_size"
            error = config.fail("tie_word_embeddings", problem)
            raise error
        super().__init__(config, pooled=pooled)
