"""EuroBERT: Llama's layers, looking both ways.

(transformers 5.23: models/eurobert)
"""

from typing import ClassVar

from memplan.classes.encoders.base import Encoded, Encoder, EncoderLayer, first_token
from memplan.classes.encoders.modernbert import read_pooling
from memplan.classes.encoders.tables import token_rows
from memplan.classes.encoders.tasks import (
    EncodedStates,
    EncoderTask,
    MaskedLM,
    OutputMatrix,
    SequenceClassification,
    Tasks,
)
from memplan.classes.llama import MLP, LayerKind, LlamaAttention, LlamaDecoderLayer, head_width
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import ActivationModule, Embedding, Linear, RMSNorm
from memplan.graph.modules.functional import mean_of_tokens
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import uncached_positions
from memplan.graph.modules.rotary import RotaryEmbedding
from memplan.graph.operations.losses import cross_entropy
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import LayerSpec
from memplan.model.networks import Activation
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import ModelPart, WeightRole


class EuroBertAttention(LlamaAttention):
    """Llama's, looking both ways."""

    def attend(
        self, query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
    ) -> Attended:
        return attention_function(self.run, causal=False)(query, key, value, mask, probability)


class EuroBertDecoderLayer(LlamaDecoderLayer, EncoderLayer):
    attention_class: type[LlamaAttention] = EuroBertAttention

    def facts(self) -> LayerSpec:
        attention, network = self.self_attn, self.mlp
        assert isinstance(attention, LlamaAttention)
        assert isinstance(network, MLP)
        bias = "bias" in attention.q_proj.weights
        return LayerSpec(
            attention=AttentionSpec(
                num_heads=attention.num_heads, num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim, query_bias=bias, key_bias=bias, value_bias=bias,
                output_bias="bias" in attention.children[attention.output].weights, causal=False,
                rotary=RotarySpec(dim=attention.head_dim), dropout=attention.attention_dropout,
            ),
            feed_forward=network.facts(), norm=NormSpec(kind=NormKind.RMS),
        )  # fmt: skip


class EuroBertForMaskedLM(MaskedLM):
    upcasts = True

    def add_head(self, config: ConfigReader) -> None:
        bias = config.flag("mlp_bias")
        self.lm_head = OutputMatrix(self.spec, self.spec.hidden_size, bias=bias)
        self.lm_head.tie(self)

    def scores(self, x: Handle) -> Handle:
        return self.lm_head(x)


class EuroBertForSequenceClassification(SequenceClassification):
    def add_head(self, config: ConfigReader) -> None:  # noqa: ARG002
        hidden = self.spec.hidden_size
        self.dense = Linear(hidden, hidden, bias=True)
        self.activation = ActivationModule(Activation.GELU)
        self.classifier = Linear(hidden, self.spec.num_labels, bias=True)

    def logits(self, outputs: Encoded) -> Handle:
        last_hidden_state = outputs.last_hidden_state
        pooling = self.encoder.classifier_pooling
        if pooling == "late":
            x = self.dense(last_hidden_state)
            x = self.activation(x)
            logits = self.classifier(x)
            return mean_of_tokens(logits)
        pool = mean_of_tokens if pooling == "mean" else first_token
        pooled_output = pool(last_hidden_state)
        pooled_output = self.dense(pooled_output)
        pooled_output = self.activation(pooled_output)
        return self.classifier(pooled_output)


class EuroBertForTokenClassification(EncoderTask):
    def add_head(self, config: ConfigReader) -> None:  # noqa: ARG002
        self.classifier = Linear(self.spec.hidden_size, self.spec.num_labels, bias=True)

    def loss_of(self, outputs: Encoded) -> Tensor:
        sequence_output = outputs.last_hidden_state
        logits = self.classifier(sequence_output)
        return cross_entropy(self.run, logits.record)


class EuroBertModel(Encoder):
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: EuroBertForMaskedLM,
        Task.BASE: EncodedStates,
        Task.SEQUENCE_CLASSIFICATION: EuroBertForSequenceClassification,
        Task.TOKEN_CLASSIFICATION: EuroBertForTokenClassification,
    }
    ties = False

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:  # noqa: ARG002
        hidden, rows = config.integer("hidden_size"), config.integer("vocab_size")
        self.classifier_pooling = read_pooling(config, ("bos", "mean", "late"))
        self.embed_tokens = Embedding(rows, hidden, role=WeightRole.TOKEN_TABLE)
        kinds = [LayerKind()] * config.layers("num_hidden_layers")
        self.layers = LayerList(
            "encoder.layers", kinds, lambda kind: EuroBertDecoderLayer(config, kind)
        )
        self.norm = RMSNorm(hidden)
        self.norm.segment = "encoder.norm", ModelPart.NORM
        self.rotary_emb = RotaryEmbedding(head_width(config))

    def last_norm(self) -> NormSpec | None:
        return NormSpec(kind=NormKind.RMS)

    def forward(self, batch: int, length: int) -> Encoded:
        inputs_embeds = token_rows(self.embed_tokens, batch, length)
        positions = uncached_positions(self.run, batch, length)
        x = inputs_embeds
        tables = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, tables, None, unread=positions)
        x = self.norm(x)
        return Encoded(x)
