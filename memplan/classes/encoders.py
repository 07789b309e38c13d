"""Encoders of text: what the base model returns, and what each task's class makes of it.

(transformers 5.23: the classes ``For...`` of models/bert/modeling_bert.py and of its kin)
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from memplan.classes.base import Base
from memplan.classes.heads import Task, finish
from memplan.graph.heads import span_loss
from memplan.graph.losses import copy_outputs
from memplan.graph.modules.basic import Dropout, Embedding, Linear
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module, Site
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.stacks import BASE_MODEL
from memplan.graph.tensors import Tensor
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.layers import LayerSpec
from memplan.model.norms import NormSpec
from memplan.model.parameters import ModelPart, WeightRole
from memplan.model.spec import ModelSpec


class Encoded(NamedTuple):
    """What a base model returns."""

    last_hidden_state: Handle
    pooler_output: Handle | None = None


Tasks = Mapping[TaskKind, "type[EncoderTask]"]
"""The classes around a base model, the usual one first."""


class EncoderLayer(Module):
    """A layer that says what others read of it."""

    def facts(self) -> LayerSpec:
        """Its heads, widths, norms and dropouts."""
        raise NotImplementedError


class Encoder(Base):
    """A base model whose tokens see one another."""

    eager_only = False
    """The class has no other attention than the one written out in Python."""
    recomputes = True
    """Its layers can be checkpointed."""
    classifier_dropout_key = "classifier_dropout"
    """What the config calls the dropout before classes."""
    classifier_pooling = ""
    """What its classifier of sequences makes of their tokens, where the config says it."""
    is_declared_last = False
    """Tasks' classes declare their heads before it."""
    ties = True
    """The output matrix is the token table where the config says nothing of it."""

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        raise NotImplementedError

    @property
    def token_table(self) -> Embedding:
        """The table that tokens are looked up in."""
        found = next(each for _, each in self.modules() if isinstance(each, Embedding))
        return found

    @property
    def layer_list(self) -> LayerList:
        """Its layers."""
        return next(each for _, each in self.modules() if isinstance(each, LayerList))

    @property
    def num_positions(self) -> int:
        """Rows of its table of positions; 0 where it has none."""
        names = dict(self.modules())
        table = names.get("position_embeddings")
        return table.weight.shape[0] if isinstance(table, Embedding) else 0

    def hidden_size(self, config: ConfigReader) -> int:
        """Width of what it returns."""
        return config.integer("hidden_size")

    def last_norm(self) -> NormSpec | None:
        """The norm behind its layers, where it has one."""
        return None

    def context_length(self, config: ConfigReader) -> int:
        """Positions that tokens can take."""
        return config.integer("max_position_embeddings")


def read_no_decoder(config: ConfigReader) -> None:
    """Refuse the same class as a decoder."""
    require_flag(config, "is_decoder", value=False, problem="only the encoder is supported")


def require_flag(config: ConfigReader, key: str, *, value: bool, problem: str) -> None:
    """Refuse a config whose flag is not the one that is supported."""
    if config.flag(key, default=value) is not value:
        error = config.fail(key, f"{problem}; set it to {str(value).lower()}")
        raise error


def first_token(x: Handle) -> Handle:
    """``x[:, 0]``."""
    run, (batch, _, width) = x.run, x.shape
    made = run.slice(x.record, batch * width)
    return x.leads_to(Handle(run, made, (batch, width), x.strides[::2]), in_rows(x.shape))


def idle(module: Module) -> None:
    """Declare what no loss reads: of it only autocast's copies are kept to the end of the forward pass."""
    from memplan.graph.counted import idle_linear  # only for such parts

    run = module.run
    for each in (module, *(inner for _, inner in module.modules())):
        found = [each.parameter(weight) for weight in each.weights.values()]
        for parameter in found:
            parameter.unused = True
            run.cast_weight(parameter)
        if isinstance(each, Linear):
            idle_linear(run, found[0])


class EncoderTask(Task):
    """A base model, and what a task does with what it returns."""

    pooled = False
    """Its base model pools the first token."""
    upcasts = False
    """Its loss takes a copy of the logits in fp32 (``ForMaskedLMLoss``)."""
    outputs = 0
    """How many numbers it gives, whatever the labels; 0: one for each of them."""

    def __init__(self, config: ConfigReader, model: ModelSpec, base: Callable[..., Base]) -> None:
        self.spec = model
        built = base(config, pooled=self.pooled)
        assert isinstance(built, Encoder)
        self.prefix = built.prefix
        setattr(self, built.prefix, built)
        self.add_head(config)
        if built.is_declared_last:
            self.children[built.prefix] = self.children.pop(built.prefix)

    def add_head(self, config: ConfigReader) -> None:
        """Declare what the task adds."""

    def classifier_dropout(self, config: ConfigReader) -> float:
        """The head's own, or that of the hidden states."""
        key = self.encoder.classifier_dropout_key
        return config.number(key, default=config.number("hidden_dropout_prob"))

    @property
    def encoder(self) -> Encoder:
        """The base model."""
        found = self.base
        assert isinstance(found, Encoder)
        return found

    def forward(self, batch: int, length: int, received: Handle | None) -> None:
        """Run the base model, the head and the loss."""
        del received
        run = self.run
        run.enter(BASE_MODEL)
        outputs = self.base(batch, length)
        if run.segment.part is not ModelPart.HEAD:
            self.begin_head(outputs.last_hidden_state)
        run.leave(BASE_MODEL)
        finish(self, self.loss_of(outputs))

    def loss_of(self, outputs: Encoded) -> Tensor:
        """The loss of what the base model returned."""
        raise NotImplementedError


class EncodedStates(EncoderTask):
    """The model without a task: what it gives is its pooled token, or its hidden states."""

    pooled = True

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """There is nothing around it."""
        super().attach(site, path, within)
        return self.base.attach(site, path, within)

    def forward(self, batch: int, length: int, received: Handle | None) -> None:
        """Run the base model."""
        del received
        outputs = self.base(batch, length)
        if self.run.segment.part is not ModelPart.HEAD:
            self.begin_head(outputs.last_hidden_state)
        finish(self, self.loss_of(outputs))

    def loss_of(self, outputs: Encoded) -> Tensor:
        """What a loss would be made of."""
        pooled = outputs.pooler_output
        return (outputs.last_hidden_state if pooled is None else pooled).record


class OutputMatrix(Linear):
    """Hidden states to logits; the token table, where they are tied."""

    def __init__(self, model: ModelSpec, width: int, *, bias: bool = True) -> None:
        super().__init__(width, model.num_outputs, bias=bias, role=WeightRole.OUTPUT)

    def tie(self, task: EncoderTask) -> None:
        """Take the token table's weight, where the config says so."""
        if task.spec.head.tied:
            self.weight = task.encoder.token_table.weight


class MaskedLM(EncoderTask):
    """Logits of every token, and the loss on the masked ones."""

    def scores(self, x: Handle) -> Handle:
        """Logits of every token."""
        raise NotImplementedError

    def loss_of(self, outputs: Encoded) -> Tensor:
        """Cross entropy; the logits are given out beside it."""
        run = self.run
        sequence_output = outputs.last_hidden_state
        prediction_scores = self.scores(sequence_output)
        given = prediction_scores.float() if self.spec.head.loss_upcast else prediction_scores
        loss = cross_entropy(run, given.record)
        run.returned.append(prediction_scores.record)
        if not copy_outputs(run, prediction_scores.record):
            run.give_out(prediction_scores.record)
        return loss


class SequenceClassification(EncoderTask):
    """Classes of each sequence."""

    def logits(self, outputs: Encoded) -> Handle:
        """A row of logits for each sequence."""
        raise NotImplementedError

    def loss_of(self, outputs: Encoded) -> Tensor:
        """Cross entropy."""
        logits = self.logits(outputs)
        return cross_entropy(self.run, logits.record)


class PooledClassification(SequenceClassification):
    """Of what the pooler gives (``BertForSequenceClassification``)."""

    pooled = True

    def add_head(self, config: ConfigReader) -> None:
        """A dropout and the classes."""
        self.dropout = Dropout(self.classifier_dropout(config))
        self.classifier = Linear(self.spec.hidden_size, self.spec.num_labels, bias=True)

    def logits(self, outputs: Encoded) -> Handle:
        """A row of logits for each sequence."""
        pooled_output = outputs.pooler_output
        assert pooled_output is not None
        pooled_output = self.dropout(pooled_output)
        return self.classifier(pooled_output)


class TokenClassification(EncoderTask):
    """Classes of every token."""

    def add_head(self, config: ConfigReader) -> None:
        """A dropout and the classes."""
        self.dropout = Dropout(self.classifier_dropout(config))
        self.classifier = Linear(self.spec.hidden_size, self.spec.num_labels, bias=True)

    def loss_of(self, outputs: Encoded) -> Tensor:
        """Cross entropy."""
        sequence_output = outputs.last_hidden_state
        sequence_output = self.dropout(sequence_output)
        logits = self.classifier(sequence_output)
        return cross_entropy(self.run, logits.record)


class QuestionAnswering(EncoderTask):
    """Where an answer begins and ends."""

    def add_head(self, config: ConfigReader) -> None:  # noqa: ARG002
        """Two numbers for every token."""
        self.qa_outputs = Linear(self.spec.hidden_size, self.spec.num_labels, bias=True)

    def loss_of(self, outputs: Encoded) -> Tensor:
        """The mean of two cross entropies."""
        sequence_output = outputs.last_hidden_state
        logits = self.qa_outputs(sequence_output)
        return span_loss(self.run, logits.record, self.spec.num_labels)
