"""MPNet: RoBERTa whose layers share one table of relative positions.

(transformers 5.23: models/mpnet)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.base import EncoderLayer
from memplan.classes.encoders.bert import RobertaModel
from memplan.classes.encoders.layers import Attention, AttentionParts, Layer, PlainScores, Stack
from memplan.classes.encoders.tables import TableParts, token_rows
from memplan.classes.encoders.tasks import PooledMultipleChoice, Tasks
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import relative_position_bucket, spread_copy
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import positions_past_padding
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.parameters import WeightRole


class MPNetEmbeddings(TableParts):
    """Without types of tokens."""

    num_buffers = 1

    def add_types(self, config: ConfigReader, width: int) -> None:
        """There are none."""

    def forward(self, batch: int, length: int, _: Handle | None = None) -> Handle:
        position_ids = positions_past_padding(self.run, (batch, length), cached=False)
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        position_embeddings = self.position_embeddings((batch, length), position_ids)
        embeddings = inputs_embeds + position_embeddings
        embeddings = self.LayerNorm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


class MPNetSelfAttention(PlainScores):
    names = "q", "k", "v"
    output = "o"
    hands_on_weights = False

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        hidden, role = config.integer("hidden_size"), WeightRole.ATTENTION_OUTPUT
        self.o = Linear(hidden, hidden, bias=True, role=role)


class MPNetAttention(Attention):
    def __init__(self, config: ConfigReader) -> None:
        self.attn = MPNetSelfAttention(config)
        self.LayerNorm = LayerNorm(config.integer("hidden_size"))
        self.dropout = Dropout(config.number("hidden_dropout_prob"))

    def facts(self) -> AttentionSpec:
        return self.attn.facts()

    @property
    def probability(self) -> float:
        return self.dropout.probability

    def forward(self, x: Handle, *beside: Handle | Tables | None) -> Attended:
        self_outputs = self.attn(x, *beside)
        attention_output = self.LayerNorm(self.dropout(self_outputs[0]) + x)
        return attention_output, None


class MPNetLayer(Layer):
    attention_class: Callable[[ConfigReader], AttentionParts] = MPNetAttention


class MPNetEncoder(Stack):
    layer_class: Callable[[ConfigReader], EncoderLayer] = MPNetLayer

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        buckets, heads = (
            config.integer("relative_attention_num_buckets"),
            config.integer("num_attention_heads"),
        )
        self.relative_attention_bias = Embedding(buckets, heads)
        self.relative_attention_bias.turned = True

    def forward(self, x: Handle, *beside: Handle | Tables | None) -> Handle:
        position_bias = self.compute_position_bias(x)
        return super().forward(x, *beside, position_bias)

    def compute_position_bias(self, x: Handle) -> Handle:
        batch, length, _ = x.shape
        run, shape = self.run, (length, length)
        relative_position = made_by(run, OperationKind.SUB, shape, DType.INT64)
        rp_bucket = relative_position_bucket(relative_position)
        values = self.relative_attention_bias(shape, rp_bucket)
        values = values.permute(2, 0, 1)
        values = spread_copy(values, (batch, *values.shape))
        return values


class MPNetModel(RobertaModel):
    prefix = "mpnet"
    tasks: ClassVar[Tasks] = {**RobertaModel.tasks, Task.MULTIPLE_CHOICE: PooledMultipleChoice}
    recomputes = False
    eager_only = True
    classifier_dropout_key = "hidden_dropout_prob"
    embeddings_class: Callable[[ConfigReader], Module] = MPNetEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = MPNetEncoder
