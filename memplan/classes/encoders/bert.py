"""BERT, RoBERTa and ELECTRA: norms behind each sum, tables of positions and types.

(transformers 5.23: models/bert, models/roberta, models/electra, and those that copy them)
"""

from collections.abc import Callable
from typing import Any, ClassVar

from memplan.classes.encoders.base import Encoded, Encoder, read_no_decoder
from memplan.classes.encoders.layers import Pooler, Stack, last_norm
from memplan.classes.encoders.tables import (
    CountedEmbeddings,
    Embeddings,
    NarrowEmbeddings,
    positions_behind_padding,
    zero_ids,
)
from memplan.classes.encoders.tasks import (
    ClassificationHead,
    EncodedStates,
    EncoderTask,
    HeadClassification,
    LMHead,
    MaskedLM,
    OutputMatrix,
    PooledClassification,
    QuestionAnswering,
    Tasks,
    TokenClassification,
    Transform,
    read_spare,
)
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.basic import ActivationModule, LayerNorm, Linear
from memplan.graph.modules.functional import binary_cross_entropy
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import written_mask
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.unread import forget_graph
from memplan.graph.operations.losses import cross_entropy
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.networks import Activation


class BertPredictionHeadTransform(Transform):
    activation_name = "transform_act_fn"

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.dense = Linear(hidden, hidden, bias=True)
        self.transform_act_fn = ActivationModule(read_activation(config, "hidden_act"))
        self.LayerNorm = LayerNorm(hidden)


class BertLMPredictionHead(Module):
    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = OutputMatrix(task.spec, task.spec.hidden_size)
        self.decoder.tie(task)
        self.bias = Weight(task.spec.num_outputs)
        if task.spec.head.tied:
            self.decoder.bias = self.bias

    def forward(self, x: Handle) -> Handle:
        read_spare(self)
        x = self.transform(x)
        x = self.decoder(x)
        return x


class BertOnlyMLMHead(Module):
    predictions_class: Callable[[ConfigReader, EncoderTask], Module] = BertLMPredictionHead

    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:
        self.predictions = self.predictions_class(config, task)

    def forward(self, x: Handle) -> Handle:
        made: Handle = self.predictions(x)
        return made


class BertPreTrainingHeads(BertOnlyMLMHead):
    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:
        super().__init__(config, task)
        self.seq_relationship = Linear(config.integer("hidden_size"), 2, bias=True)


class BertForPreTraining(EncoderTask):
    """Masked tokens, and whether one sentence follows the other."""

    pooled = True

    def add_head(self, config: ConfigReader) -> None:
        self.cls = BertPreTrainingHeads(config, self)

    def loss_of(self, outputs: Encoded) -> Tensor:
        sequence_output, pooled_output = outputs
        prediction_scores = self.cls.predictions(sequence_output)
        seq_relationship_score = self.cls.seq_relationship(pooled_output)
        run = self.run
        masked_lm_loss = cross_entropy(run, prediction_scores.record)
        next_sentence_loss = cross_entropy(run, seq_relationship_score.record)
        total_loss = run.add(masked_lm_loss, next_sentence_loss)
        for each in (prediction_scores, seq_relationship_score):
            run.returned.append(each.record)
            run.give_out(each.record)
        return total_loss


class BertForMaskedLM(MaskedLM):
    named_head = "cls", BertOnlyMLMHead


class BertModel(Encoder):
    prefix = "bert"
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: BertForMaskedLM,
        Task.BASE: EncodedStates,
        Task.SEQUENCE_CLASSIFICATION: PooledClassification,
        Task.TOKEN_CLASSIFICATION: TokenClassification,
        Task.QUESTION_ANSWERING: QuestionAnswering,
    }
    embeddings_class: Callable[[ConfigReader], Module] = Embeddings
    encoder_class: Callable[[ConfigReader], Module] = Stack
    norm = ""
    """The norm behind all layers, where the base model has one."""
    always_pools = False
    """It has a pooler also where no loss reads what it gives."""
    pooler_class: Callable[[ConfigReader], Any] = Pooler
    """What pools the first token."""
    pooler: Any = None
    embeddings_project: Linear | None = None
    """From the width of the tables to that of the layers."""
    makes_mask = False
    """It makes ones that say which token is padding, whatever attends, and a mask of them."""
    makes_types = False
    """Types of tokens are zeros that it makes itself, and holds until it returns."""

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        read_no_decoder(config)
        self.embeddings = self.embeddings_class(config)
        self.add_beside(config)
        self.encoder = self.encoder_class(config)
        if self.norm:
            setattr(self, self.norm, last_norm(config.integer("hidden_size")))
        self.pooler = self.pooler_class(config) if pooled or self.always_pools else None
        if self.pooler is not None:
            self.pooler.is_read = pooled

    def add_beside(self, config: ConfigReader) -> None:
        """Declare what stands between the embeddings and the layers."""

    def forward(self, batch: int, length: int) -> Encoded:
        run, mask = self.run, None
        if self.makes_mask:
            mask = made_by(run, OperationKind.ONES, (batch, length), DType.FP32)
        token_type_ids = zero_ids(self, batch, length) if self.makes_types else None
        embedding_output = self.embedded(batch, length, token_type_ids)
        if mask is not None:
            mask = written_mask(mask, embedding_output)
        sequence_output = self.encoder(embedding_output, mask)
        if self.norm:
            sequence_output = self.children[self.norm](sequence_output)
        return Encoded(sequence_output, self.pooled(sequence_output))

    def embedded(self, batch: int, length: int, token_type_ids: Handle | None) -> Handle:
        """What the first layer is given."""
        embedding_output: Handle = self.embeddings(batch, length, token_type_ids)
        if self.embeddings_project is not None:
            embedding_output = self.embeddings_project(embedding_output)
        return embedding_output

    def pooled(self, sequence_output: Handle) -> Handle | None:
        """The pooler's, where a loss reads it."""
        pooler = self.pooler
        return pooler(sequence_output) if pooler is not None and pooler.is_read else None

    def leave_unread(self, sequence_output: Handle) -> list[Handle]:
        """Its pooler runs, whoever reads what it gives."""
        if self.pooler is None or self.pooler.is_read:
            return []
        start = len(self.run.segment.operations)
        pooled: Handle = self.pooler(sequence_output)
        return [pooled, *forget_graph(self.run, start)]


# --- RoBERTa ------------------------------------------------------------------------------------------


class RobertaLMHead(LMHead):
    activation = Activation.GELU
    norm_name = "layer_norm"

    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:  # noqa: ARG002
        hidden = task.spec.hidden_size
        self.dense = Linear(hidden, hidden, bias=True)
        self.layer_norm = LayerNorm(hidden)
        self.bias = Weight(task.spec.num_outputs)
        self.add_decoder(task, hidden)


class RobertaForMaskedLM(MaskedLM):
    named_head = "lm_head", RobertaLMHead


class RobertaModel(BertModel):
    prefix = "roberta"
    tasks: ClassVar[Tasks] = {
        **BertModel.tasks,
        Task.MASKED_LM: RobertaForMaskedLM,
        Task.SEQUENCE_CLASSIFICATION: HeadClassification,
    }
    embeddings_class: Callable[[ConfigReader], Module] = CountedEmbeddings

    def context_length(self, config: ConfigReader) -> int:
        return positions_behind_padding(config)


class XLMRobertaModel(RobertaModel):
    """Declared behind the heads (CamemBERT too)."""

    is_declared_last = True


# --- ELECTRA --------------------------------------------------------------------------------------------


class ElectraGeneratorPredictions(Transform):
    def __init__(self, config: ConfigReader) -> None:
        width = config.integer("embedding_size")
        self.activation = ActivationModule(Activation.GELU)
        self.LayerNorm = LayerNorm(width)
        self.dense = Linear(config.integer("hidden_size"), width, bias=True)


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

    head_class: Callable[[ConfigReader], Module] = ElectraDiscriminatorPredictions

    def add_head(self, config: ConfigReader) -> None:
        self.discriminator_predictions = self.head_class(config)

    def loss_of(self, outputs: Encoded) -> Tensor:
        discriminator_sequence_output = outputs.last_hidden_state
        logits = self.discriminator_predictions(discriminator_sequence_output)
        loss = binary_cross_entropy(logits)
        self.run.give_out(logits.record)
        return loss


class ElectraClassificationHead(ClassificationHead):
    def add_activation(self, config: ConfigReader) -> None:  # noqa: ARG002
        self.activation = ActivationModule(Activation.GELU)


class ElectraForSequenceClassification(HeadClassification):
    head_class: Callable[[ConfigReader, EncoderTask], ClassificationHead] = (
        ElectraClassificationHead
    )


class ElectraModel(BertModel):
    prefix = "electra"
    tasks: ClassVar[Tasks] = {
        **BertModel.tasks,
        Task.MASKED_LM: ElectraForMaskedLM,
        Task.SEQUENCE_CLASSIFICATION: ElectraForSequenceClassification,
        Task.PRETRAINING: ElectraForPreTraining,
    }

    embeddings_class: Callable[[ConfigReader], Module] = NarrowEmbeddings

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:  # noqa: ARG002
        super().__init__(config, pooled=False)

    def add_beside(self, config: ConfigReader) -> None:
        width, hidden = config.integer("embedding_size"), config.integer("hidden_size")
        if width != hidden:
            self.embeddings_project = Linear(width, hidden, bias=True)
