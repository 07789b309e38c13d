"""DistilBERT: no token types, no pooler, names of its own.

(transformers 5.23: models/distilbert)
"""

from typing import ClassVar

from memplan.classes.encoders.base import LAYER_NORM, Encoded, Encoder, EncoderLayer, first_token
from memplan.classes.encoders.layers import Heads
from memplan.classes.encoders.tables import hold_ids, token_rows
from memplan.classes.encoders.tasks import (
    EncodedStates,
    MaskedLM,
    OutputMatrix,
    QuestionAnswering,
    SequenceClassification,
    Tasks,
    TokenClassification,
)
from memplan.families.llama import read_activation
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.operations.losses import span_loss
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.parameters import LayerBlock, WeightRole


class Embeddings(Module):
    def __init__(self, config: ConfigReader) -> None:
        dim, rows = config.integer("dim"), config.integer("vocab_size")
        self.word_embeddings = Embedding(rows, dim, role=WeightRole.TOKEN_TABLE)
        self.num_positions = config.integer("max_position_embeddings")
        self.position_embeddings = Embedding(self.num_positions, dim)
        self.LayerNorm = LayerNorm(dim)
        self.dropout = Dropout(config.number("dropout"))

    def forward(self, batch: int, length: int) -> Handle:
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        position_embeddings = self.position_embeddings((1, length))
        embeddings = inputs_embeds + position_embeddings
        embeddings = self.LayerNorm(embeddings)
        embeddings = self.dropout(embeddings)
        hold_ids(self.run, self.num_positions)
        return embeddings


class DistilBertSelfAttention(Heads):
    names = "q_lin", "k_lin", "v_lin"
    dropout_key = "attention_dropout"

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        dim, role = config.integer("dim"), WeightRole.ATTENTION_OUTPUT
        self.out_lin = Linear(dim, dim, bias=True, role=role)

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        query_layer, key_layer, value_layer = self.heads(x)
        out, weights = self.attend(query_layer, key_layer, value_layer, mask)
        out = out.reshape(*x.shape[:2], -1)
        out = self.out_lin(out)
        return out, weights


class FFN(Module):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader) -> None:
        dim, inner = config.integer("dim"), config.integer("hidden_dim")
        self.dropout = Dropout(config.number("dropout"))
        self.lin1 = Linear(dim, inner, bias=True)
        self.lin2 = Linear(inner, dim, bias=True)
        self.activation = ActivationModule(read_activation(config, "activation"))

    def facts(self) -> FeedForwardSpec:
        """Of a network without a gate."""
        inner, kind = self.lin1.out_features, self.activation.kind
        return FeedForwardSpec(intermediate_size=inner, activation=kind, bias=True)

    def forward(self, x: Handle) -> Handle:
        return self.ff_chunk(x)

    def ff_chunk(self, given: Handle) -> Handle:
        x = self.lin1(given)
        x = self.activation(x)
        x = self.lin2(x)
        x = self.dropout(x)
        return x


class TransformerBlock(EncoderLayer):
    def __init__(self, config: ConfigReader) -> None:
        dim = config.integer("dim")
        self.attention = DistilBertSelfAttention(config)
        self.sa_layer_norm = LayerNorm(dim)
        self.ffn = FFN(config)
        self.output_layer_norm = LayerNorm(dim)

    def facts(self) -> LayerSpec:
        return LayerSpec(
            attention=self.attention.facts(), feed_forward=self.ffn.facts(), norm=LAYER_NORM,
            placement=NormPlacement.POST, dropout=self.ffn.dropout.probability,
            feed_forward_dropout_only=True,
        )  # fmt: skip

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        attention_output, _ = self.attention(x, mask)
        attention_output = self.sa_layer_norm(attention_output + x)
        ffn_output = self.ffn(attention_output)
        ffn_output = self.output_layer_norm(ffn_output + attention_output)
        return ffn_output


class Transformer(Module):
    def __init__(self, config: ConfigReader) -> None:
        kinds = [None] * config.layers("n_layers")
        self.layer = LayerList("encoder.layers", kinds, lambda _: TransformerBlock(config))

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        for layer_module in self.layer:
            x = layer_module(x, mask)
        return x


class DistilBertForMaskedLM(MaskedLM):
    def add_head(self, config: ConfigReader) -> None:
        dim = self.spec.hidden_size
        self.activation = ActivationModule(read_activation(config, "activation"))
        self.vocab_transform = Linear(dim, dim, bias=True)
        self.vocab_layer_norm = LayerNorm(dim)
        self.vocab_projector = OutputMatrix(self.spec, dim)
        self.vocab_projector.tie(self)

    def scores(self, x: Handle) -> Handle:
        prediction_logits = self.vocab_transform(x)
        prediction_logits = self.activation(prediction_logits)
        prediction_logits = self.vocab_layer_norm(prediction_logits)
        prediction_logits = self.vocab_projector(prediction_logits)
        return prediction_logits


class DistilBertForSequenceClassification(SequenceClassification):
    def add_head(self, config: ConfigReader) -> None:
        dim = self.spec.hidden_size
        self.pre_classifier = Linear(dim, dim, bias=True)
        self.relu = ActivationModule(Activation.RELU)
        self.classifier = Linear(dim, self.spec.num_labels, bias=True)
        self.dropout = Dropout(config.number("seq_classif_dropout"))

    def logits(self, outputs: Encoded) -> Handle:
        hidden_state = outputs.last_hidden_state
        pooled_output = first_token(hidden_state)
        pooled_output = self.pre_classifier(pooled_output)
        pooled_output = self.relu(pooled_output)
        pooled_output = self.dropout(pooled_output)
        return self.classifier(pooled_output)


class DistilBertForTokenClassification(TokenClassification):
    def classifier_dropout(self, config: ConfigReader) -> float:
        return config.number("dropout")


class DistilBertForQuestionAnswering(QuestionAnswering):
    def add_head(self, config: ConfigReader) -> None:
        super().add_head(config)
        self.dropout = Dropout(config.number("qa_dropout"))

    def loss_of(self, outputs: Encoded) -> Tensor:
        hidden_states = outputs.last_hidden_state
        hidden_states = self.dropout(hidden_states)
        logits = self.qa_outputs(hidden_states)
        return span_loss(self.run, logits.record, self.spec.num_labels)


class DistilBertModel(Encoder):
    prefix = "distilbert"
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: DistilBertForMaskedLM,
        Task.BASE: EncodedStates,
        Task.SEQUENCE_CLASSIFICATION: DistilBertForSequenceClassification,
        Task.TOKEN_CLASSIFICATION: DistilBertForTokenClassification,
        Task.QUESTION_ANSWERING: DistilBertForQuestionAnswering,
    }

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:  # noqa: ARG002
        self.embeddings = Embeddings(config)
        self.transformer = Transformer(config)

    def hidden_size(self, config: ConfigReader) -> int:
        return config.integer("dim")

    def forward(self, batch: int, length: int) -> Encoded:
        embeddings = self.embeddings(batch, length)
        return Encoded(self.transformer(embeddings, None))
