"""VisualBERT: BERT with a picture's regions behind its tokens.

(transformers 5.23: models/visual_bert)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.base import Encoded, EncoderLayer
from memplan.classes.encoders.bert import BertForPreTraining, BertModel
from memplan.classes.encoders.bert_kin import RemBertAttention
from memplan.classes.encoders.layers import AttentionParts, Heads, Layer, PlainScores, Stack
from memplan.classes.encoders.tables import Embeddings, token_rows, zero_ids
from memplan.classes.encoders.tasks import EncodedStates, EncoderTask, Tasks
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.basic import Dropout, Embedding, Linear
from memplan.graph.modules.batch import ids_bytes
from memplan.graph.modules.functional import gather, log_softmax
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import OneLayer
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.state import from_batch
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import NUM_REGIONS


class VisualBertEmbeddings(Embeddings):
    num_buffers = 1

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        width, self.features = config.integer("hidden_size"), config.integer("visual_embedding_dim")
        types, positions = (
            config.integer("type_vocab_size"),
            config.integer("max_position_embeddings"),
        )
        self.visual_token_type_embeddings = Embedding(types, width)
        self.visual_position_embeddings = Embedding(positions, width)
        self.visual_projection = Linear(self.features, width, bias=True)

    def forward(self, batch: int, length: int, _: Handle | None = None) -> Handle:
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        token_type_ids = zero_ids(self, batch, length)
        token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
        embeddings = inputs_embeds + token_type_embeddings
        position_embeddings = self.position_embeddings((1, length))
        embeddings += position_embeddings
        shape = batch, NUM_REGIONS
        visual_token_type_ids = made_by(self.run, OperationKind.ONES, shape, DType.INT64)
        given = from_batch(self.run, batch * NUM_REGIONS * self.features, self.run.compute)
        visual_embeds = Handle(self.run, given, (*shape, self.features))
        visual_embeds = self.visual_projection(visual_embeds)
        visual_token_type_embeddings = self.visual_token_type_embeddings(
            shape, visual_token_type_ids
        )
        visual_position_ids = zero_ids(self, *shape)
        visual_position_embeddings = self.visual_position_embeddings(shape, visual_position_ids)
        visual_embeddings = (
            visual_embeds + visual_position_embeddings + visual_token_type_embeddings
        )
        embeddings = concatenate(embeddings, visual_embeddings, dim=1)
        embeddings = self.LayerNorm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


class VisualBertSelfAttention(PlainScores):
    hands_on_weights = False


class VisualBertAttention(RemBertAttention):
    self_class: Callable[[ConfigReader], Heads] = VisualBertSelfAttention


class VisualBertLayer(Layer):
    attention_class: Callable[[ConfigReader], AttentionParts] = VisualBertAttention


class VisualBertEncoder(Stack):
    layer_class: Callable[[ConfigReader], EncoderLayer] = VisualBertLayer


class Pooled(EncoderTask):
    """Classes of what the pooler gives."""

    pooled = True

    def add_head(self, config: ConfigReader) -> None:
        self.dropout = Dropout(config.number("hidden_dropout_prob"))
        self.cls = Linear(self.spec.hidden_size, self.spec.num_labels, bias=True)

    def loss_of(self, outputs: Encoded) -> Tensor:
        assert outputs.pooler_output is not None
        pooled_output = self.dropout(outputs.pooler_output)
        logits = self.cls(pooled_output)
        return cross_entropy(self.run, logits.record)


class VisualBertForMultipleChoice(Pooled):
    outputs = 1


class VisualBertForQuestionAnswering(Pooled):
    """Answers as classes of the last word, and how far they are from those that annotators gave."""

    pooled = False

    def loss_of(self, outputs: Encoded) -> Tensor:
        sequence_output = outputs.last_hidden_state
        batch, _, width = sequence_output.shape
        index_to_gather = made_by(self.run, OperationKind.INDICES, (batch, 1, width), DType.INT64)
        pooled_output = gather(sequence_output, index_to_gather, dim=1)
        pooled_output = self.dropout(pooled_output)
        logits = self.cls(pooled_output)
        reshaped_logits = log_softmax(logits)
        self.run.give_out(reshaped_logits.record)
        labels = from_batch(self.run, logits.numel, reshaped_logits.dtype)
        weighed = reshaped_logits * Handle(self.run, labels, reshaped_logits.shape)
        return self.run.mean(weighed.record, weighed.numel)


class VisualBertModel(BertModel):
    prefix = "visual_bert"
    eager_only = always_pools = True
    num_regions = NUM_REGIONS
    tasks: ClassVar[Tasks] = {
        Task.PRETRAINING: BertForPreTraining,
        Task.BASE: EncodedStates,
        Task.OTHER: Pooled,
        Task.QUESTION_ANSWERING: VisualBertForQuestionAnswering,
        Task.MULTIPLE_CHOICE: VisualBertForMultipleChoice,
    }
    embeddings_class: Callable[[ConfigReader], Module] = VisualBertEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = VisualBertEncoder

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        super().__init__(config, pooled=pooled)
        self.bypasses = config.flag("bypass_transformer")
        if self.bypasses:
            made = OneLayer("additional_layer", VisualBertLayer(config))
            self.additional_layer = made

    def batch_holds(self, batch: int, length: int) -> None:
        """Masks of tokens and regions, labels of regions too, and whether picture and text belong together."""
        run, regions = self.run, batch * NUM_REGIONS
        tokens = ids_bytes(run, batch * length)
        from_batch(run, batch * length, DType.INT64)
        from_batch(run, regions, DType.FP32)
        from_batch(run, batch, DType.INT64)
        run.inputs.append(ids_bytes(run, batch * length + regions) - tokens)

    def forward(self, batch: int, length: int) -> Encoded:
        self.batch_holds(batch, length)
        embedding_output = self.embeddings(batch, length)
        keys = length + NUM_REGIONS
        mask = made_by(self.run, OperationKind.MASK, (batch, 1, 1, keys), self.run.compute)
        if not self.bypasses:
            sequence_output = self.encoder(embedding_output, mask)
            return Encoded(sequence_output, self.pooled(sequence_output))
        # transformers 5.23 reads a row of the mask that is not there, and raises.
        text, regions = embedding_output.split(length, NUM_REGIONS, dim=1)
        sequence_output = self.encoder(text, mask.narrow(length))
        concatenated_input = concatenate(sequence_output, regions, dim=1)
        sequence_output = self.additional_layer(concatenated_input, mask)
        return Encoded(sequence_output, self.pooled(sequence_output))
