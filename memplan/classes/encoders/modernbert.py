"""ModernBERT: heads that are turned, windows in two layers of three, a classifier with a dense layer and a norm.

(transformers 5.23: models/modernbert)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.base import Encoded, Encoder, EncoderLayer, first_token
from memplan.classes.encoders.tables import token_rows
from memplan.classes.encoders.tasks import (
    EncodedStates,
    EncoderTask,
    MaskedLM,
    OutputMatrix,
    SequenceClassification,
    Tasks,
    Transform,
)
from memplan.classes.llama import FULL, SLIDING, Network, halves
from memplan.families.llama import named_activation
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import mean_of_tokens
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import two_sided_mask, uncached_positions
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import (
    RotaryEmbedding,
    Tables,
    apply_rotary_in_fp32,
    turn_function,
)
from memplan.graph.operations.losses import cross_entropy, span_loss
from memplan.model.attention import AttentionSpec, Projection, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import LayerSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole

GLOBAL_EVERY = 3
"""Every how many layers one sees everything, where the file does not say."""


def other_activation(config: ConfigReader, key: str) -> Activation:
    """An activation that is a GELU by default."""
    return named_activation(config, key, config.text(key, default=Activation.GELU.value))


Joined = Callable[[Handle], tuple[Handle, ...]]
"""What is made of the tokens' rows where towers give some of them."""


def read_pooling(config: ConfigReader, known: tuple[str, ...]) -> str:
    """What a classifier of sequences makes of their tokens."""
    return config.choice("classifier_pooling", config.text("classifier_pooling"), known)


class ModernBertEmbeddings(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden, rows = config.integer("hidden_size"), config.integer("vocab_size")
        self.tok_embeddings = Embedding(rows, hidden, role=WeightRole.TOKEN_TABLE)
        self.norm = LayerNorm(hidden, bias=config.flag("norm_bias"))
        self.drop = Dropout(config.number("embedding_dropout"))

    def forward(self, batch: int, length: int, joined: Joined) -> Handle:
        return self.drop(self.norm(joined(token_rows(self.tok_embeddings, batch, length))[0]))


class ModernBertMLP(Network):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        bias = config.flag("mlp_bias")
        self.Wi = Linear(hidden, 2 * inner, bias=bias)
        self.act = ActivationModule(other_activation(config, "hidden_activation"))
        self.drop = Dropout(config.number("mlp_dropout"))
        self.Wo = Linear(inner, hidden, bias=bias)

    def facts(self) -> FeedForwardSpec:
        """Of a network with a gate."""
        return FeedForwardSpec(
            intermediate_size=self.Wo.in_features, activation=self.act.kind, gated=True,
            fused_gate_up=True, bias="bias" in self.Wi.weights,
            activation_dropout=self.drop.probability,
        )  # fmt: skip

    def forward(self, x: Handle) -> Handle:
        given, gate = halves(self.Wi(x))
        return self.Wo(self.drop(self.act(given) * gate))


class ModernBertAttention(Module):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, window: int | None) -> None:
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        bias = config.flag("attention_bias")
        self.num_heads, self.window = heads, window
        self.head_dim = config.divide("hidden_size", hidden, "num_attention_heads", heads)
        self.attention_dropout = config.number("attention_dropout")
        self.Wqkv = Linear(hidden, 3 * hidden, bias=bias)
        self.Wo = Linear(hidden, hidden, bias=bias, role=WeightRole.ATTENTION_OUTPUT)
        self.out_drop = Dropout(self.attention_dropout)

    def facts(self) -> AttentionSpec:
        """Of attention to all tokens, or those near by."""
        bias = "bias" in self.Wqkv.weights
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=self.head_dim,
            projection=Projection.FUSED_SPLIT, query_bias=bias, key_bias=bias, value_bias=bias,
            output_bias=bias, rotary=RotarySpec(dim=self.head_dim), causal=False,
            sliding_window=self.window, dropout=self.attention_dropout,
        )  # fmt: skip

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        qkv = self.Wqkv(x)
        qkv = qkv.view(batch, length, 3, -1, self.head_dim)
        query, key, value = qkv.unbind(2)
        query = query.transpose(1, 2)
        key = key.transpose(1, 2)
        value = value.transpose(1, 2)
        cos, sin = tables
        turn = turn_function(self.run.kernels.rotary, apply_rotary_in_fp32)
        query, key = turn(query, key, cos, sin)
        attend = attention_function(self.run, causal=False)
        out, weights = attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.out_drop(self.Wo(out))
        return out, weights


def facts_of_norm(norm: LayerNorm) -> NormSpec:
    """What others read of a norm that may have a bias."""
    return NormSpec(kind=norm.kind, bias="bias" in norm.weights)


class ModernBertEncoderLayer(EncoderLayer):
    def __init__(self, config: ConfigReader, *, normed: bool, window: int | None) -> None:
        hidden, bias = config.integer("hidden_size"), config.flag("norm_bias")
        self.attn_norm = LayerNorm(hidden, bias=bias) if normed else None
        self.attn = ModernBertAttention(config, window)
        self.mlp_norm = LayerNorm(hidden, bias=bias)
        self.mlp = ModernBertMLP(config)

    def facts(self) -> LayerSpec:
        return LayerSpec(
            attention=self.attn.facts(), feed_forward=self.mlp.facts(),
            norm=facts_of_norm(self.mlp_norm),
            dropout=self.attn.attention_dropout, attention_dropout_only=True,
        )  # fmt: skip

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        attn_output, _ = self.attn(x if self.attn_norm is None else self.attn_norm(x), tables, mask)
        x = x + attn_output
        x = x + self.mlp(self.mlp_norm(x))
        return x


class ModernBertPredictionHead(Transform):
    activation_name, norm_name = "act", "norm"

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.dense = Linear(hidden, hidden, bias=config.flag("classifier_bias"))
        self.act = ActivationModule(other_activation(config, "classifier_activation"))
        self.norm = LayerNorm(hidden, bias=config.flag("norm_bias"))


class ModernBertForMaskedLM(MaskedLM):
    upcasts = True

    def add_head(self, config: ConfigReader) -> None:
        self.head = ModernBertPredictionHead(config)
        bias = config.flag("decoder_bias")
        self.decoder = OutputMatrix(self.spec, self.spec.hidden_size, bias=bias)
        self.decoder.tie(self)

    def scores(self, x: Handle) -> Handle:
        return self.decoder(self.head(x))


class ModernBertClassifier(EncoderTask):
    """A dense layer, activation and norm before the classes of whatever it is."""

    def add_head(self, config: ConfigReader) -> None:
        labels = self.spec.num_labels
        self.head = ModernBertPredictionHead(config)
        self.drop = Dropout(config.number("classifier_dropout"))
        self.classifier = Linear(self.spec.hidden_size, labels, bias=True)


class ModernBertForSequenceClassification(ModernBertClassifier, SequenceClassification):
    def logits(self, outputs: Encoded) -> Handle:
        last_hidden_state = outputs.last_hidden_state
        pool = mean_of_tokens if self.encoder.classifier_pooling == "mean" else first_token
        last_hidden_state = pool(last_hidden_state)
        pooled_output = self.head(last_hidden_state)
        pooled_output = self.drop(pooled_output)
        return self.classifier(pooled_output)


class ModernBertForMultipleChoice(ModernBertForSequenceClassification):
    outputs = 1


class ModernBertForTokenClassification(ModernBertClassifier):
    def loss_of(self, outputs: Encoded) -> Tensor:
        last_hidden_state = outputs.last_hidden_state
        last_hidden_state = self.head(last_hidden_state)
        last_hidden_state = self.drop(last_hidden_state)
        logits = self.classifier(last_hidden_state)
        return cross_entropy(self.run, logits.record)


class ModernBertForQuestionAnswering(ModernBertClassifier):
    def loss_of(self, outputs: Encoded) -> Tensor:
        last_hidden_state = outputs.last_hidden_state
        last_hidden_state = self.head(last_hidden_state)
        last_hidden_state = self.drop(last_hidden_state)
        logits = self.classifier(last_hidden_state)
        return span_loss(self.run, logits.record, self.spec.num_labels)


class ModernBertModel(Encoder):
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: ModernBertForMaskedLM,
        Task.BASE: EncodedStates,
        Task.SEQUENCE_CLASSIFICATION: ModernBertForSequenceClassification,
        Task.TOKEN_CLASSIFICATION: ModernBertForTokenClassification,
        Task.QUESTION_ANSWERING: ModernBertForQuestionAnswering,
        Task.MULTIPLE_CHOICE: ModernBertForMultipleChoice,
    }

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:  # noqa: ARG002
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        window = config.integer("local_attention", minimum=2) // 2
        kinds = [
            (index > 0, window if kind == SLIDING else None)
            for index, kind in enumerate(modernbert_layers(config))
        ]
        self.classifier_pooling = read_pooling(config, ("cls", "mean"))
        self.window = window
        self.windows = sorted({kind[1] for kind in kinds}, key=bool)
        self.embeddings = ModernBertEmbeddings(config)
        self.layers = LayerList(
            "encoder.layers", kinds,
            lambda kind: ModernBertEncoderLayer(config, normed=kind[0], window=kind[1]),
        )  # fmt: skip
        self.final_norm = LayerNorm(hidden, bias=config.flag("norm_bias"))
        self.final_norm.segment = "encoder.norm", ModelPart.NORM
        self.rotary_emb = RotaryEmbedding(hidden // heads)

    def last_norm(self) -> NormSpec | None:
        return facts_of_norm(self.final_norm)

    def forward(self, batch: int, length: int) -> Encoded:
        run = self.run
        positions = uncached_positions(run, batch, length)
        x = self.embeddings(batch, length, self.joined)
        mask_kwargs = x  # the class's own mapping of that name holds it
        near = two_sided_mask(run, batch, length, window=self.window)
        masks = {None: None, self.window: near}
        tables = {each: self.rotary_emb(x, positions) for each in self.windows}
        for layer in self.layers:
            window = layer.kind[1]
            x = layer(x, tables[window], masks[window])
        x = self.final_norm(x)
        del mask_kwargs
        return Encoded(x)


def modernbert_layers(config: ConfigReader) -> list[str]:
    """What each layer sees."""
    count, key = config.layers("num_hidden_layers"), "layer_types"
    listed = config.texts(key)
    for kind in listed:
        config.choice(key, kind, (FULL, SLIDING))
    if listed and len(listed) != count:
        error = config.fail(key, f"has {len(listed)} entries for {count} layers")
        raise error
    every = config.integer("global_attn_every_n_layers", default=GLOBAL_EVERY)
    return list(listed) or [SLIDING if index % every else FULL for index in range(count)]
