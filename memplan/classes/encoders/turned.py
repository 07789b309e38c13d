"""Encoders whose heads are turned: Jina's v3 embeddings, Nomic BERT.

(transformers 5.23: models/jina_embeddings_v3, nomic_bert)
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from memplan.classes.encoders.base import (
    LAYER_NORM,
    Encoded,
    Encoder,
    EncoderLayer,
    read_no_decoder,
)
from memplan.classes.encoders.bert import BertForMaskedLM, RobertaModel
from memplan.classes.encoders.layers import Heads, Pooler
from memplan.classes.encoders.tables import TableParts, token_rows, zero_ids
from memplan.classes.encoders.tasks import (
    EncodedStates,
    PooledClassification,
    Tasks,
    TokenClassification,
)
from memplan.classes.llama import GatedMLP, Network
from memplan.families.llama import read_activation
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import uncached_positions
from memplan.graph.modules.rotary import RotaryEmbedding, Tables, apply_rotary, turn_function
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock, WeightRole


class JinaEmbeddingsV3Embeddings(TableParts):
    """Tokens and types; positions turn the heads."""

    def add_positions(self, config: ConfigReader, width: int) -> None:
        """There is no table of them."""

    def forward(self, batch: int, length: int) -> Handle:
        embeddings = token_rows(self.word_embeddings, batch, length)
        token_type_ids = zero_ids(self, batch, length)
        token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
        embeddings = embeddings + token_type_embeddings
        embeddings = self.LayerNorm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


class JinaEmbeddingsV3Attention(Heads):
    names = "q_proj", "k_proj", "v_proj"

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        hidden, role = config.integer("hidden_size"), WeightRole.ATTENTION_OUTPUT
        self.o_proj = Linear(hidden, hidden, bias=self.bias, role=role)

    def add_dropout(self, probability: float) -> None:
        self.attention_dropout = probability

    @property
    def probability(self) -> float:
        return self.attention_dropout

    def facts(self) -> AttentionSpec:
        return replace(super().facts(), rotary=RotarySpec(dim=self.head_dim))

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        query, key, value = self.heads(x)
        query, key = turn_function(self.run.kernels.rotary, apply_rotary)(query, key, *tables)
        out, weights = self.attend(query, key, value, mask)
        out = out.reshape(*x.shape[:2], -1)
        out = self.o_proj(out)
        return out, weights


class JinaEmbeddingsV3MLP(Network):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.activation_fn = ActivationModule(read_activation(config, "hidden_act"))
        self.fc1 = Linear(hidden, inner, bias=True)
        self.fc2 = Linear(inner, hidden, bias=True)

    def facts(self) -> FeedForwardSpec:
        """Of a network without a gate."""
        kind = self.activation_fn.kind
        return FeedForwardSpec(intermediate_size=self.fc1.out_features, activation=kind, bias=True)

    def forward(self, x: Handle) -> Handle:
        x = self.fc1(x)
        x = self.activation_fn(x)
        x = self.fc2(x)
        return x


class JinaEmbeddingsV3Layer(EncoderLayer):
    attention_class: Callable[[ConfigReader], JinaEmbeddingsV3Attention] = JinaEmbeddingsV3Attention
    mlp_class: Callable[[ConfigReader], Network] = JinaEmbeddingsV3MLP

    def __init__(self, config: ConfigReader) -> None:
        hidden, probability = config.integer("hidden_size"), config.number("hidden_dropout_prob")
        self.post_attention_layernorm = LayerNorm(hidden)
        self.post_attention_dropout = Dropout(probability)
        self.post_mlp_dropout = Dropout(probability)
        self.mlp = self.mlp_class(config)
        self.self_attn = self.attention_class(config)
        self.post_mlp_layernorm = LayerNorm(hidden)

    def facts(self) -> LayerSpec:
        return LayerSpec(
            attention=self.self_attn.facts(), feed_forward=self.mlp.facts(), norm=LAYER_NORM,
            placement=NormPlacement.POST, dropout=self.post_mlp_dropout.probability,
        )  # fmt: skip

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        attention_output, _ = self.self_attn(x, tables, mask)
        x = residual + self.post_attention_dropout(attention_output)
        x = self.post_attention_layernorm(x)
        residual = x
        x = self.mlp(x)
        x = residual + self.post_mlp_dropout(x)
        x = self.post_mlp_layernorm(x)
        return x


class JinaEmbeddingsV3Model(Encoder):
    prefix = "roberta"
    is_declared_last = True
    tasks: ClassVar[Tasks] = RobertaModel.tasks
    layer_class: Callable[[ConfigReader], EncoderLayer] = JinaEmbeddingsV3Layer

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        read_no_decoder(config)
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        self.embeddings = JinaEmbeddingsV3Embeddings(config)
        self.pooler = Pooler(config) if pooled else None
        self.rotary_emb = RotaryEmbedding(hidden // heads)
        kinds = [None] * config.layers("num_hidden_layers")
        self.layers = LayerList("encoder.layers", kinds, lambda _: self.layer_class(config))

    def forward(self, batch: int, length: int) -> Encoded:
        positions = uncached_positions(self.run, batch, length)
        embedding_output = self.embeddings(batch, length)
        x = embedding_output
        tables = self.rotary_emb(embedding_output, positions)
        for layer in self.layers:
            x = layer(x, tables, None, unread=positions)
        sequence_output = x
        pooled_output = self.pooler(sequence_output) if self.pooler is not None else None
        return Encoded(sequence_output, pooled_output)


class NomicBertAttention(JinaEmbeddingsV3Attention):
    bias = False


class NomicBertMLP(GatedMLP):
    block = LayerBlock.NETWORK

    def forward(self, x: Handle) -> Handle:
        down_proj: Handle = self.down_proj(self.gated(x))
        return down_proj


class NomicBertLayer(JinaEmbeddingsV3Layer):
    attention_class: Callable[[ConfigReader], JinaEmbeddingsV3Attention] = NomicBertAttention
    mlp_class: Callable[[ConfigReader], Network] = NomicBertMLP


class NomicEncodedStates(EncodedStates):
    pooled = False


class NomicBertModel(JinaEmbeddingsV3Model):
    prefix = "nomic_bert"
    is_declared_last = False
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: BertForMaskedLM,
        Task.BASE: NomicEncodedStates,
        Task.SEQUENCE_CLASSIFICATION: PooledClassification,
        Task.TOKEN_CLASSIFICATION: TokenClassification,
    }
    layer_class: Callable[[ConfigReader], EncoderLayer] = NomicBertLayer
