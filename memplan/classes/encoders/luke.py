"""LUKE: BERT with tables, queries and predictions of entities, which serve nothing where a batch has none.

(transformers 5.23: models/luke)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.base import EncoderLayer
from memplan.classes.encoders.bert import RobertaLMHead, RobertaModel
from memplan.classes.encoders.layers import (
    Attention,
    AttentionParts,
    Heads,
    Layer,
    PlainScores,
    Stack,
)
from memplan.classes.encoders.tables import TypesLast
from memplan.classes.encoders.tasks import (
    EncoderTask,
    MaskedLM,
    PooledClassification,
    PooledMultipleChoice,
    Tasks,
)
from memplan.families.llama import read_activation
from memplan.graph.modules.attention import Attended, in_heads, matmul
from memplan.graph.modules.basic import (
    ActivationModule,
    Embedding,
    LayerNorm,
    Linear,
    spare,
    spare_alone,
)
from memplan.graph.modules.functional import softmax
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.masks import positions_past_padding
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.heads import Task


class LukeEmbeddings(TypesLast):
    num_buffers = 0

    def position_ids(self, batch: int, length: int) -> Handle | None:
        return positions_past_padding(self.run, (batch, length), cached=False)


class LukeEntityEmbeddings(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden, width = config.integer("hidden_size"), config.integer("entity_emb_size")
        self.entity_embeddings = Embedding(config.integer("entity_vocab_size"), width)
        if width != hidden:
            self.entity_embedding_dense = Linear(width, hidden)
        self.position_embeddings = Embedding(config.integer("max_position_embeddings"), hidden)
        self.token_type_embeddings = Embedding(config.integer("type_vocab_size"), hidden)
        self.LayerNorm = LayerNorm(hidden)


class LukeSelfAttention(PlainScores):
    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        hidden = config.integer("hidden_size")
        self.of_entities = [
            Linear(hidden, hidden, bias=True)
            for _ in range(3 * config.flag("use_entity_aware_attention"))
        ]
        for name, each in zip(
            ("w2e_query", "e2w_query", "e2e_query"), self.of_entities, strict=False
        ):
            setattr(self, name, each)

    def forward(self, x: Handle, mask: Handle | None, *beside: Handle) -> Attended:
        del beside
        key_layer = in_heads(self.key(x), self.head_dim)
        value_layer = in_heads(self.value(x), self.head_dim)
        for each in self.of_entities:
            spare(each)
        # Where there are entities scores come first: their name is older than the queries', and dies before it.
        attention_scores = query_layer = in_heads(self.query(x), self.head_dim)
        attention_scores = matmul(query_layer, key_layer.transpose(2, 3))
        attention_scores = attention_scores / self.head_dim**0.5
        if mask is not None:
            attention_scores = attention_scores + mask
        attention_probs = softmax(attention_scores)
        attention_probs = self.dropout(attention_probs)
        context_layer = matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        context_layer = context_layer.view(*x.shape[:2], -1)
        return context_layer, None


class LukeAttention(Attention):
    self_class: Callable[[ConfigReader], Heads] = LukeSelfAttention


class LukeLayer(Layer):
    attention_class: Callable[[ConfigReader], AttentionParts] = LukeAttention


class LukeEncoder(Stack):
    layer_class: Callable[[ConfigReader], EncoderLayer] = LukeLayer


class LukeLMHead(RobertaLMHead):
    """Its matrix is never the token table; its bias is the head's own."""

    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:
        super().__init__(config, task)
        if config.flag("tie_word_embeddings"):
            self.decoder.bias = self.bias


class EntityPredictionHeadTransform(Module):
    def __init__(self, config: ConfigReader) -> None:
        width = config.integer("entity_emb_size")
        self.dense = Linear(config.integer("hidden_size"), width, bias=True)
        self.transform_act_fn = ActivationModule(read_activation(config, "hidden_act"))
        self.LayerNorm = LayerNorm(width)


class EntityPredictionHead(Module):
    def __init__(self, config: ConfigReader, entities: Embedding) -> None:
        rows, width = entities.weight.shape
        self.transform = EntityPredictionHeadTransform(config)
        self.decoder = Linear(width, rows)
        if config.flag("tie_word_embeddings"):
            self.decoder.weight = entities.weight
        self.bias = Weight(rows)


class LukeForMaskedLM(MaskedLM):
    """Its base model pools, though nothing reads it."""

    pooled = True

    def add_head(self, config: ConfigReader) -> None:
        model = self.encoder
        assert isinstance(model, LukeModel)
        assert model.pooler is not None
        model.pooler.is_read = False
        self.lm_head = LukeLMHead(config, self)
        self.entity_predictions = EntityPredictionHead(
            config, model.entity_embeddings.entity_embeddings
        )

    def scores(self, x: Handle) -> Handle:
        logits = self.lm_head(x)
        spare(self.entity_predictions.transform)
        spare(self.entity_predictions.decoder)
        spare_alone(self.entity_predictions)
        return logits


class LukeModel(RobertaModel):
    prefix = "luke"
    tasks: ClassVar[Tasks] = {
        **RobertaModel.tasks,
        Task.MASKED_LM: LukeForMaskedLM,
        Task.SEQUENCE_CLASSIFICATION: PooledClassification,
        Task.MULTIPLE_CHOICE: PooledMultipleChoice,
    }
    ties_output = False
    eager_only = True
    makes_mask = True
    makes_types = True
    embeddings_class: Callable[[ConfigReader], Module] = LukeEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = LukeEncoder

    def add_beside(self, config: ConfigReader) -> None:
        self.entity_embeddings = LukeEntityEmbeddings(config)

    def embedded(self, batch: int, length: int, token_type_ids: Handle | None) -> Handle:
        embedding_output = super().embedded(batch, length, token_type_ids)
        spare(self.entity_embeddings)  # FSDP's root shards them in their modules' order
        return embedding_output
