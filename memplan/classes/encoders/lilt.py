"""LiLT: a narrow stream of boxes beside the text's, with attention that adds both streams' scores.

(transformers 5.23: models/lilt)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.base import Encoded, EncoderLayer
from memplan.classes.encoders.bert import RobertaModel
from memplan.classes.encoders.bert_kin import boxes, difference
from memplan.classes.encoders.layers import (
    AttentionParts,
    Heads,
    Intermediate,
    LayerParts,
    Output,
    SelfOutput,
    StackParts,
)
from memplan.classes.encoders.tables import TableParts, token_rows, zero_ids
from memplan.classes.encoders.tasks import Tasks
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import in_heads, matmul
from memplan.graph.modules.basic import Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import softmax
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import positions_past_padding, written_mask
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.modules.unread import unread_graph
from memplan.model.config import ConfigReader
from memplan.model.heads import Task

SIDES = 6
"""Left, upper, right and lower edges, height and width."""
Streams = tuple[Handle, Handle]
"""The text's and the boxes'."""


def narrowed(config: ConfigReader) -> ConfigReader:
    """The config of the boxes' stream."""
    key = "channel_shrink_ratio"
    ratio, own = config.integer(key), dict(config.config)
    for name in ("hidden_size", "intermediate_size"):
        own[name] = config.divide(name, config.integer(name), key, ratio)
    return config.nested(
        own, config.path, model_type=config.model_type, defaults=config.defaults,
        renamed=config.renamed,
    )  # fmt: skip


class LiltTextEmbeddings(TableParts):
    num_buffers = 1

    def forward(self, batch: int, length: int, token_type_ids: Handle) -> tuple[Handle, Handle]:
        position_ids = positions_past_padding(self.run, (batch, length), cached=False)
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
        embeddings = inputs_embeds + token_type_embeddings
        position_embeddings = self.position_embeddings((batch, length), position_ids)
        embeddings += position_embeddings
        embeddings = self.LayerNorm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings, position_ids


class LiltLayoutEmbeddings(Module):
    def __init__(self, config: ConfigReader) -> None:
        rows, hidden = config.integer("max_2d_position_embeddings"), config.integer("hidden_size")
        width = narrowed(config).integer("hidden_size")
        what = "the coordinates of a box and its sides"
        share = config.divide("hidden_size", hidden, what, SIDES)
        self.x_position_embeddings = Embedding(rows, share)
        self.y_position_embeddings = Embedding(rows, share)
        self.h_position_embeddings = Embedding(rows, share)
        self.w_position_embeddings = Embedding(rows, share)
        positions = config.integer("max_position_embeddings")
        self.box_position_embeddings = Embedding(positions, width)
        self.box_linear_embeddings = Linear(hidden, width, bias=True)
        self.LayerNorm = LayerNorm(width)
        self.dropout = Dropout(config.number("hidden_dropout_prob"))

    def forward(self, bbox: tuple[Handle, ...], position_ids: Handle) -> Handle:
        shape = position_ids.shape
        left, upper, right, lower = bbox
        left_position_embeddings = self.x_position_embeddings(shape, left)
        upper_position_embeddings = self.y_position_embeddings(shape, upper)
        right_position_embeddings = self.x_position_embeddings(shape, right)
        lower_position_embeddings = self.y_position_embeddings(shape, lower)
        h_position_embeddings = self.h_position_embeddings(shape, difference(lower, upper))
        w_position_embeddings = self.w_position_embeddings(shape, difference(right, left))
        spatial_position_embeddings = concatenate(
            left_position_embeddings,
            upper_position_embeddings,
            right_position_embeddings,
            lower_position_embeddings,
            h_position_embeddings,
            w_position_embeddings,
        )
        spatial_position_embeddings = self.box_linear_embeddings(spatial_position_embeddings)
        box_position_embeddings = self.box_position_embeddings(shape, position_ids)
        spatial_position_embeddings = spatial_position_embeddings + box_position_embeddings
        spatial_position_embeddings = self.LayerNorm(spatial_position_embeddings)
        spatial_position_embeddings = self.dropout(spatial_position_embeddings)
        return spatial_position_embeddings


class LiltSelfAttention(Heads):
    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        narrow = narrowed(config)
        width, key = narrow.integer("hidden_size"), "num_attention_heads"
        self.layout_head_dim = config.divide("hidden_size", width, key, self.num_heads)
        self.layout_query = Linear(width, width, bias=True)
        self.layout_key = Linear(width, width, bias=True)
        self.layout_value = Linear(width, width, bias=True)
        self.children["dropout"] = self.children.pop("dropout")

    def forward(self, x: Handle, layout_inputs: Handle, mask: Handle) -> Streams:
        layout_value_layer = in_heads(self.layout_value(layout_inputs), self.layout_head_dim)
        layout_key_layer = in_heads(self.layout_key(layout_inputs), self.layout_head_dim)
        layout_query_layer = in_heads(self.layout_query(layout_inputs), self.layout_head_dim)
        mixed_query_layer = self.query(x)
        key_layer = in_heads(self.key(x), self.head_dim)
        value_layer = in_heads(self.value(x), self.head_dim)
        query_layer = in_heads(mixed_query_layer, self.head_dim)
        attention_scores = matmul(query_layer, key_layer.transpose(2, 3))
        layout_attention_scores = matmul(layout_query_layer, layout_key_layer.transpose(2, 3))
        tmp_attention_scores = attention_scores / self.head_dim**0.5
        tmp_layout_attention_scores = layout_attention_scores / self.layout_head_dim**0.5
        attention_scores = tmp_attention_scores + tmp_layout_attention_scores
        layout_attention_scores = tmp_layout_attention_scores + tmp_attention_scores
        layout_attention_scores = layout_attention_scores + mask
        layout_attention_probs = self.dropout(softmax(layout_attention_scores))
        layout_context_layer = matmul(layout_attention_probs, layout_value_layer)
        layout_context_layer = layout_context_layer.permute(0, 2, 1, 3).contiguous()
        layout_context_layer = layout_context_layer.view(*x.shape[:2], -1)
        attention_scores = attention_scores + mask
        attention_probs = self.dropout(softmax(attention_scores))
        context_layer = matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(*x.shape[:2], -1)
        return context_layer, layout_context_layer


class LiltAttention(AttentionParts):
    self_class: Callable[[ConfigReader], Heads] = LiltSelfAttention

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.layout_output = SelfOutput(narrowed(config))

    def forward(self, x: Handle, layout_inputs: Handle, mask: Handle) -> Streams:
        self_outputs = self.self(x, layout_inputs, mask)
        attention_output = self.output(self_outputs[0], x)
        layout_attention_output = self.layout_output(self_outputs[1], layout_inputs)
        return attention_output, layout_attention_output


class LiltLayer(LayerParts):
    hands_on = 1

    def __init__(self, config: ConfigReader) -> None:
        self.attention = LiltAttention(config)
        self.intermediate = Intermediate(config)
        self.output = Output(config)
        self.layout_intermediate = Intermediate(narrowed(config))
        self.layout_output = Output(narrowed(config))

    def forward(self, x: Handle, layout_inputs: Handle, mask: Handle) -> Streams:
        self_attention_outputs = self.attention(x, layout_inputs, mask)
        attention_output, layout_attention_output = self_attention_outputs
        layer_output = self.feed_forward_chunk(attention_output)
        layout_layer_output = self.layout_feed_forward_chunk(layout_attention_output)
        return layer_output, layout_layer_output

    def layout_feed_forward_chunk(self, attention_output: Handle) -> Handle:
        intermediate_output = self.layout_intermediate(attention_output)
        layer_output = self.layout_output(intermediate_output, attention_output)
        return layer_output


class LiltEncoder(StackParts):
    layer_class: Callable[[ConfigReader], EncoderLayer] = LiltLayer
    streams = True

    def forward(self, x: Handle, layout_inputs: Handle, mask: Handle) -> Handle:
        for layer_module in self.stacked:
            layer_outputs = layer_module(x, layout_inputs, mask)
            x = layer_outputs[0]
            layout_inputs = layer_outputs[1]
        _unread = unread_graph(self.run)
        return x


class LiltModel(RobertaModel):
    prefix = "lilt"
    tasks: ClassVar[Tasks] = {
        task: made for task, made in RobertaModel.tasks.items() if task is not Task.MASKED_LM
    }
    eager_only = True
    embeddings_class: Callable[[ConfigReader], Module] = LiltTextEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = LiltEncoder

    def add_beside(self, config: ConfigReader) -> None:
        self.layout_embeddings = LiltLayoutEmbeddings(config)

    def forward(self, batch: int, length: int) -> Encoded:
        run = self.run
        bbox = boxes(self, batch, length)
        mask = made_by(run, OperationKind.ONES, (batch, length), DType.FP32)
        token_type_ids = zero_ids(self, batch, length)
        embedding_output, position_ids = self.embeddings(batch, length, token_type_ids)
        mask = written_mask(mask, embedding_output)
        layout_embedding_output = self.layout_embeddings(bbox, position_ids)
        sequence_output = self.encoder(embedding_output, layout_embedding_output, mask)
        return Encoded(sequence_output, self.pooled(sequence_output))
