"""BERT, RoBERTa and ELECTRA: norms behind each sum, tables of positions and types.

(transformers 5.23: models/bert, models/roberta, models/electra, and those that copy them)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders import (
    Encoded,
    EncodedStates,
    Encoder,
    EncoderLayer,
    EncoderTask,
    MaskedLM,
    OutputMatrix,
    PooledClassification,
    QuestionAnswering,
    SequenceClassification,
    Tasks,
    TokenClassification,
    first_token,
    idle,
    read_no_decoder,
)
from memplan.classes.llama import Network
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.modules.attention import Attended, attention_function, unwidened_attention
from memplan.graph.modules.basic import ActivationModule, Dropout, Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import activated, binary_cross_entropy
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.tensors import Tensor
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole

LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
"""What others read of ``torch.nn.LayerNorm``."""


class BertTables(Module):
    """Of tokens, types and positions, and what stands behind their sum."""

    def __init__(self, config: ConfigReader) -> None:
        width = self.width(config)
        rows, role = config.integer("vocab_size"), WeightRole.TOKEN_TABLE
        self.word_embeddings = Embedding(rows, width, role=role)
        self.position_embeddings = Embedding(config.integer("max_position_embeddings"), width)
        self.token_type_embeddings = Embedding(config.integer("type_vocab_size"), width)
        self.LayerNorm = LayerNorm(width)
        self.dropout = Dropout(config.number("hidden_dropout_prob"))

    def width(self, config: ConfigReader) -> int:
        return config.integer("hidden_size")


class BertEmbeddings(BertTables):
    def forward(self, batch: int, length: int) -> Handle:
        token_type_ids = gathered_types(self, 1, length)
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
        embeddings = inputs_embeds + token_type_embeddings
        position_embeddings = self.position_embeddings((1, length))
        embeddings = embeddings + position_embeddings
        embeddings = self.LayerNorm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


def token_rows(table: Embedding, batch: int, length: int) -> Handle:
    """Rows of the token table, of which an adapter may want a gradient."""
    x: Handle = table((batch, length))
    table.run.embedded(x.record, table.run.parameters[table.weight])
    return x


def gathered_types(module: Module, batch: int, length: int) -> Handle:
    """``torch.gather`` of a buffer of zeros; or zeros made anew for each token."""
    return made_by(module.run, OperationKind.INDICES, (batch, length), DType.INT64)


class BertHeads(Module):
    """Queries, keys and values of all heads."""

    block = LayerBlock.ATTENTION
    bias = True

    def __init__(self, config: ConfigReader) -> None:
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        self.num_heads = heads
        self.head_dim = config.divide("hidden_size", hidden, "num_attention_heads", heads)
        role = WeightRole.QUERY_KEY
        self.query = Linear(hidden, hidden, bias=self.bias, role=role)
        self.key = Linear(hidden, hidden, bias=self.bias, role=role)
        self.value = Linear(hidden, hidden, bias=self.bias)
        self.dropout = Dropout(config.number("attention_probs_dropout_prob"))

    def facts(self) -> AttentionSpec:
        """Of attention to all tokens."""
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=self.head_dim,
            query_bias=self.bias, key_bias=self.bias, value_bias=self.bias, output_bias=self.bias,
            causal=False, dropout=self.dropout.probability,
        )  # fmt: skip

    def attend(self, query: Handle, key: Handle, value: Handle, mask: Handle | None) -> Attended:
        attend = attention_function(self.run, unwidened_attention, causal=False)
        return attend(query, key, value, mask, self.dropout.probability)


class BertSelfAttention(BertHeads):
    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query_layer = self.query(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        key_layer = self.key(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        value_layer = self.value(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        out, weights = self.attend(query_layer, key_layer, value_layer, mask)
        out = out.reshape(batch, length, -1)
        return out, weights


class BertSelfOutput(Module):
    """A dense layer, dropout, the norm of the sum."""

    role = WeightRole.ATTENTION_OUTPUT

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.dense = Linear(self.inner(config), hidden, bias=True, role=self.role)
        self.add_norm(hidden)
        self.dropout = Dropout(config.number("hidden_dropout_prob"))

    def add_norm(self, hidden: int) -> None:
        self.LayerNorm = LayerNorm(hidden)

    def inner(self, config: ConfigReader) -> int:
        return config.integer("hidden_size")

    def forward(self, x: Handle, input_tensor: Handle) -> Handle:
        x = self.dense(x)
        x = self.dropout(x)
        x = self.LayerNorm(x + input_tensor)
        return x


class BertOutput(BertSelfOutput):
    block = LayerBlock.NETWORK
    role = WeightRole.MATRIX

    def inner(self, config: ConfigReader) -> int:
        return config.integer("intermediate_size")


class BertAttentionParts(Module):
    """Heads, and what leads back to the hidden size."""

    block = LayerBlock.ATTENTION
    self_class: Callable[[ConfigReader], BertHeads] = BertSelfAttention
    output_class: Callable[[ConfigReader], BertSelfOutput] = BertSelfOutput

    def __init__(self, config: ConfigReader) -> None:
        self.self = self.self_class(config)
        self.output = self.output_class(config)


class BertAttention(BertAttentionParts):
    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        attention_output, attn_weights = self.self(x, mask)
        attention_output = self.output(attention_output, x)
        return attention_output, attn_weights


class BertIntermediate(Network):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.dense = Linear(hidden, inner, bias=True)
        self.intermediate_act_fn = ActivationModule(read_activation(config, "hidden_act"))

    def facts(self) -> FeedForwardSpec:
        """Of a network without a gate."""
        return FeedForwardSpec(
            intermediate_size=self.dense.out_features, activation=self.intermediate_act_fn.kind,
            bias=True,
        )  # fmt: skip

    def forward(self, x: Handle) -> Handle:
        x = self.dense(x)
        x = self.intermediate_act_fn(x)
        return x


class BertLayerParts(EncoderLayer):
    """Attention and network."""

    placement = NormPlacement.POST
    attention_class: Callable[[ConfigReader], BertAttentionParts] = BertAttention
    intermediate_class: Callable[[ConfigReader], Network] = BertIntermediate
    output_class: Callable[[ConfigReader], Module] = BertOutput

    def __init__(self, config: ConfigReader) -> None:
        self.attention = self.attention_class(config)
        self.intermediate = self.intermediate_class(config)
        self.output = self.output_class(config)

    def facts(self) -> LayerSpec:
        return LayerSpec(
            attention=self.attention.self.facts(), feed_forward=self.intermediate.facts(),
            norm=LAYER_NORM, placement=self.placement,
            dropout=self.attention.output.dropout.probability,
        )  # fmt: skip

    def feed_forward_chunk(self, attention_output: Handle) -> Handle:
        intermediate_output = self.intermediate(attention_output)
        layer_output = self.output(intermediate_output, attention_output)
        return layer_output


class BertLayer(BertLayerParts):
    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        self_attention_output, _ = self.attention(x, mask)
        attention_output = self_attention_output
        layer_output = self.feed_forward_chunk(attention_output)
        return layer_output


class BertEncoder(Module):
    layer_class: Callable[[ConfigReader], EncoderLayer] = BertLayer

    def __init__(self, config: ConfigReader) -> None:
        kinds = [None] * config.layers("num_hidden_layers")
        self.layer = LayerList("encoder.layers", kinds, lambda _: self.layer_class(config))

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class BertPooler(Module):
    """A dense layer and a tanh on the first token."""

    segment = "head", ModelPart.HEAD

    is_read = True
    """A loss reads what it gives."""

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.dense = Linear(hidden, hidden, bias=True)
        self.activation = ActivationModule(Activation.TANH)

    def forward(self, x: Handle) -> Handle | None:
        if not self.is_read:
            idle(self)
            return None
        first_token_tensor = first_token(x)
        pooled_output = self.dense(first_token_tensor)
        pooled_output = self.activation(pooled_output)
        return pooled_output


# --- heads -----------------------------------------------------------------------------------------


class BertPredictionHeadTransform(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.dense = Linear(hidden, hidden, bias=True)
        self.transform_act_fn = ActivationModule(read_activation(config, "hidden_act"))
        self.LayerNorm = LayerNorm(hidden)

    def forward(self, x: Handle) -> Handle:
        x = self.dense(x)
        x = self.transform_act_fn(x)
        x = self.LayerNorm(x)
        return x


class BertLMPredictionHead(Module):
    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = OutputMatrix(task.spec, task.spec.hidden_size)
        self.decoder.tie(task)
        self.bias = Weight(task.spec.num_outputs)
        if task.spec.head.tied:
            self.decoder.bias = self.bias

    def forward(self, x: Handle) -> Handle:
        read_spare(self, self.bias, self.decoder)
        x = self.transform(x)
        x = self.decoder(x)
        return x


def read_spare(module: Module, bias: Weight, decoder: Linear) -> None:
    """Declare a head's own bias, which nothing reads where the output matrix has another one."""
    if decoder.bias is not bias:
        module.parameter(bias).unused = True


class BertOnlyMLMHead(Module):
    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:
        self.predictions = BertLMPredictionHead(config, task)

    def forward(self, x: Handle) -> Handle:
        return self.predictions(x)


class BertForMaskedLM(MaskedLM):
    def add_head(self, config: ConfigReader) -> None:
        self.cls = BertOnlyMLMHead(config, self)

    def scores(self, x: Handle) -> Handle:
        return self.cls(x)


class BertModel(Encoder):
    prefix = "bert"
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: BertForMaskedLM,
        Task.BASE: EncodedStates,
        Task.SEQUENCE_CLASSIFICATION: PooledClassification,
        Task.TOKEN_CLASSIFICATION: TokenClassification,
        Task.QUESTION_ANSWERING: QuestionAnswering,
    }
    embeddings_class: Callable[[ConfigReader], Module] = BertEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = BertEncoder

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        read_no_decoder(config)
        self.embeddings = self.embeddings_class(config)
        self.encoder = self.encoder_class(config)
        self.pooler = BertPooler(config) if pooled else None

    def forward(self, batch: int, length: int) -> Encoded:
        embedding_output = self.embeddings(batch, length)
        sequence_output = self.encoder(embedding_output, None)
        pooled_output = self.pooler(sequence_output) if self.pooler is not None else None
        return Encoded(sequence_output, pooled_output)


# --- RoBERTa ------------------------------------------------------------------------------------------


class RobertaEmbeddings(BertEmbeddings):
    """Positions are counted from the ids, and start behind the padding token's."""

    def __init__(self, config: ConfigReader) -> None:
        width = self.width(config)
        rows, role = config.integer("vocab_size"), WeightRole.TOKEN_TABLE
        self.word_embeddings = Embedding(rows, width, role=role)
        self.token_type_embeddings = Embedding(config.integer("type_vocab_size"), width)
        self.add_norm(width)
        self.dropout = Dropout(config.number("hidden_dropout_prob"))
        self.position_embeddings = Embedding(config.integer("max_position_embeddings"), width)

    def add_norm(self, width: int) -> None:
        self.LayerNorm = LayerNorm(width)

    def forward(self, batch: int, length: int) -> Handle:
        position_ids = made_by(self.run, OperationKind.INDICES, (batch, length), DType.INT64)
        token_type_ids = gathered_types(self, batch, length)
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
        embeddings = inputs_embeds + token_type_embeddings
        position_embeddings = self.position_embeddings((batch, length), position_ids)
        embeddings = embeddings + position_embeddings
        embeddings = self.LayerNorm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


class RobertaLMHead(Module):
    activation = Activation.GELU

    def __init__(self, task: EncoderTask) -> None:
        hidden = task.spec.hidden_size
        self.dense = Linear(hidden, hidden, bias=True)
        self.layer_norm = LayerNorm(hidden)
        self.decoder = OutputMatrix(task.spec, hidden)
        self.decoder.tie(task)
        self.bias = Weight(task.spec.num_outputs)
        if task.spec.head.tied:
            self.decoder.bias = self.bias

    def forward(self, features: Handle) -> Handle:
        read_spare(self, self.bias, self.decoder)
        x = self.dense(features)
        x = activated(x, self.activation)
        x = self.layer_norm(x)
        x = self.decoder(x)
        return x


class RobertaForMaskedLM(MaskedLM):
    def add_head(self, config: ConfigReader) -> None:  # noqa: ARG002
        self.lm_head = RobertaLMHead(self)

    def scores(self, x: Handle) -> Handle:
        return self.lm_head(x)


class RobertaClassificationHead(Module):
    """A dense layer and the classes, behind a dropout each."""

    activation = Activation.TANH

    def __init__(self, task: EncoderTask, probability: float) -> None:
        hidden = task.spec.hidden_size
        self.dense = Linear(hidden, hidden, bias=True)
        self.dropout = Dropout(probability)
        self.out_proj = Linear(hidden, task.spec.num_labels, bias=True)

    def forward(self, features: Handle) -> Handle:
        x = first_token(features)
        x = self.dropout(x)
        x = self.dense(x)
        x = activated(x, self.activation)
        x = self.dropout(x)
        x = self.out_proj(x)
        return x


class RobertaForSequenceClassification(SequenceClassification):
    def add_head(self, config: ConfigReader) -> None:
        self.classifier = RobertaClassificationHead(self, self.classifier_dropout(config))

    def logits(self, outputs: Encoded) -> Handle:
        sequence_output = outputs.last_hidden_state
        return self.classifier(sequence_output)


class RobertaModel(BertModel):
    prefix = "roberta"
    tasks: ClassVar[Tasks] = {
        **BertModel.tasks,
        Task.MASKED_LM: RobertaForMaskedLM,
        Task.SEQUENCE_CLASSIFICATION: RobertaForSequenceClassification,
    }
    embeddings_class: Callable[[ConfigReader], Module] = RobertaEmbeddings

    def context_length(self, config: ConfigReader) -> int:
        return positions_behind_padding(config)


class XLMRobertaModel(RobertaModel):
    """Declared behind the heads (CamemBERT too)."""

    is_declared_last = True


def positions_behind_padding(config: ConfigReader) -> int:
    """Positions that tokens can take: those up to the padding token's own are skipped."""
    key = "max_position_embeddings"
    positions = config.integer(key)
    skipped = config.integer("pad_token_id", default=1, minimum=0) + 1
    if positions <= skipped:
        error = config.fail(key, f"{positions} leaves none behind the padding token's")
        raise error
    return positions - skipped


# --- ELECTRA --------------------------------------------------------------------------------------------


class ElectraEmbeddings(BertEmbeddings):
    def width(self, config: ConfigReader) -> int:
        return config.integer("embedding_size")


class ElectraGeneratorPredictions(Module):
    def __init__(self, config: ConfigReader) -> None:
        width = config.integer("embedding_size")
        self.activation = ActivationModule(Activation.GELU)
        self.LayerNorm = LayerNorm(width)
        self.dense = Linear(config.integer("hidden_size"), width, bias=True)

    def forward(self, x: Handle) -> Handle:
        x = self.dense(x)
        x = self.activation(x)
        x = self.LayerNorm(x)
        return x


class ElectraForMaskedLM(MaskedLM):
    def add_head(self, config: ConfigReader) -> None:
        self.generator_predictions = ElectraGeneratorPredictions(config)
        self.generator_lm_head = OutputMatrix(self.spec, config.integer("embedding_size"))
        self.generator_lm_head.tie(self)

    def scores(self, x: Handle) -> Handle:
        prediction_scores = self.generator_predictions(x)
        prediction_scores = self.generator_lm_head(prediction_scores)
        return prediction_scores


class ElectraDiscriminatorPredictions(Module):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.dense = Linear(hidden, hidden, bias=True)
        self.activation = ActivationModule(read_activation(config, "hidden_act"))
        self.dense_prediction = Linear(hidden, 1, bias=True)

    def forward(self, x: Handle) -> Handle:
        x = self.dense(x)
        x = self.activation(x)
        logits = self.dense_prediction(x)
        return logits


class ElectraForPreTraining(EncoderTask):
    """Which tokens were replaced."""

    def add_head(self, config: ConfigReader) -> None:
        self.discriminator_predictions = ElectraDiscriminatorPredictions(config)

    def loss_of(self, outputs: Encoded) -> Tensor:
        discriminator_sequence_output = outputs.last_hidden_state
        logits = self.discriminator_predictions(discriminator_sequence_output)
        loss = binary_cross_entropy(logits)
        self.run.give_out(logits.record)
        return loss


class ElectraClassificationHead(Module):
    def __init__(self, task: EncoderTask, probability: float) -> None:
        hidden = task.spec.hidden_size
        self.dense = Linear(hidden, hidden, bias=True)
        self.activation = ActivationModule(Activation.GELU)
        self.dropout = Dropout(probability)
        self.out_proj = Linear(hidden, task.spec.num_labels, bias=True)

    def forward(self, features: Handle) -> Handle:
        x = first_token(features)
        x = self.dropout(x)
        x = self.dense(x)
        x = self.activation(x)
        x = self.dropout(x)
        x = self.out_proj(x)
        return x


class ElectraForSequenceClassification(SequenceClassification):
    def add_head(self, config: ConfigReader) -> None:
        self.classifier = ElectraClassificationHead(self, self.classifier_dropout(config))

    def logits(self, outputs: Encoded) -> Handle:
        sequence_output = outputs.last_hidden_state
        return self.classifier(sequence_output)


class ElectraModel(BertModel):
    prefix = "electra"
    tasks: ClassVar[Tasks] = {
        **BertModel.tasks,
        Task.MASKED_LM: ElectraForMaskedLM,
        Task.SEQUENCE_CLASSIFICATION: ElectraForSequenceClassification,
        Task.PRETRAINING: ElectraForPreTraining,
    }

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:  # noqa: ARG002
        read_no_decoder(config)
        width, hidden = config.integer("embedding_size"), config.integer("hidden_size")
        self.embeddings = ElectraEmbeddings(config)
        self.is_narrow = width != hidden
        if self.is_narrow:
            self.embeddings_project = Linear(width, hidden, bias=True)
        self.encoder = BertEncoder(config)

    def forward(self, batch: int, length: int) -> Encoded:
        embedding_output = self.embeddings(batch, length)
        if self.is_narrow:
            embedding_output = self.embeddings_project(embedding_output)
        return Encoded(self.encoder(embedding_output, None))
