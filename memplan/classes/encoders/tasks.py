"""What each task's class makes of what a base model returns.

(transformers 5.23: the classes ``For...`` of models/bert/modeling_bert.py and of its kin)
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from memplan.classes.base import Base
from memplan.classes.encoders.base import Encoded, Encoder, first_token
from memplan.classes.heads import Task, finish
from memplan.classes.sensed.counted import declare_all
from memplan.graph.core.tensors import Tensor
from memplan.graph.losses.tasks import hand_out
from memplan.graph.modules.basic import ActivationModule, Dropout, Linear
from memplan.graph.modules.functional import activated
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Module, Site
from memplan.graph.operations.losses import cross_entropy, span_loss
from memplan.graph.stacks import BASE_MODEL
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart, WeightRole
from memplan.model.spec import ModelSpec

Tasks = Mapping[TaskKind, "type[EncoderTask]"]
"""The classes around a base model, the usual one first."""


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
        if self.is_counted:
            finish(self, declare_all(self))
            return
        run = self.run
        run.enter(BASE_MODEL)
        outputs = self.base(batch, length)
        if run.segment.part is not ModelPart.HEAD:
            self.begin_head(outputs.last_hidden_state)
        unread = self.encoder.leave_unread(outputs.last_hidden_state)
        run.leave(BASE_MODEL)
        loss = self.loss_of(outputs)
        del unread
        finish(self, loss)

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
        unread = self.encoder.leave_unread(outputs.last_hidden_state)
        loss = self.loss_of(outputs)
        del unread
        finish(self, loss)

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


class Transform(Module):
    """A dense layer, an activation and a norm, as each class declares and calls them."""

    activation_name, norm_name = "activation", "LayerNorm"

    def forward(self, x: Handle) -> Handle:
        x = self.children["dense"](x)
        x = nonlinear(x, getattr(self, self.activation_name))
        x = self.children[self.norm_name](x)
        return x


def nonlinear(x: Handle, activation: ActivationModule | Activation) -> Handle:
    """Through an activation, which is a module or a function."""
    if isinstance(activation, Activation):
        return activated(x, activation)
    made: Handle = activation(x)
    return made


class LMHead(Transform):
    """The same, and the output matrix, whose bias the head may declare itself."""

    def add_decoder(self, task: "EncoderTask", width: int, *, own_bias: bool = True) -> None:
        """Declare the output matrix, tied where the config says so."""
        self.decoder = OutputMatrix(task.spec, width)
        self.decoder.tie(task)
        if own_bias and task.spec.head.tied:
            self.decoder.bias = self.weights["bias"]

    def forward(self, x: Handle) -> Handle:
        read_spare(self)
        x = super().forward(x)
        x = self.decoder(x)
        return x


def read_spare(module: Module) -> None:
    """Declare a head's own bias, which nothing reads where its output matrix has another one."""
    bias, decoder = module.weights.get("bias"), module.children["decoder"]
    if bias is not None and decoder.weights.get("bias") is not bias:
        module.parameter(bias).unused = True


class MaskedLM(EncoderTask):
    """Logits of every token, and the loss on the masked ones."""

    named_head: ClassVar[tuple[str, Callable[..., Any]]]
    """What the class calls its head, and the head's own class."""

    def add_head(self, config: ConfigReader) -> None:
        """The head."""
        name, made = self.named_head
        setattr(self, name, made(config, self))

    def scores(self, x: Handle) -> Handle:
        """Logits of every token."""
        made: Handle = self.children[self.named_head[0]](x)
        return made

    def loss_of(self, outputs: Encoded) -> Tensor:
        """Cross entropy; the logits are given out beside it."""
        run = self.run
        sequence_output = outputs.last_hidden_state
        prediction_scores = self.scores(sequence_output)
        given = prediction_scores.float() if self.spec.head.loss_upcast else prediction_scores
        loss = cross_entropy(run, given.record)
        hand_out(run, prediction_scores.record)
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


class ClassificationHead(Module):
    """A dense layer on the first token and the classes, behind a dropout each."""

    activation: ActivationModule | Activation = Activation.TANH

    def __init__(self, config: ConfigReader, task: "EncoderTask") -> None:
        hidden = task.spec.hidden_size
        self.dense = Linear(hidden, hidden, bias=True)
        self.add_activation(config)
        self.dropout = Dropout(task.classifier_dropout(config))
        self.out_proj = Linear(hidden, task.spec.num_labels, bias=True)

    def add_activation(self, config: ConfigReader) -> None:
        """Declare the activation, where it is a module."""

    def forward(self, features: Handle) -> Handle:
        x = first_token(features)
        x = self.dropout(x)
        x = self.dense(x)
        x = nonlinear(x, self.activation)
        x = self.dropout(x)
        x = self.out_proj(x)
        return x


class HeadClassification(SequenceClassification):
    """Of the first token, by a head of its own (``RobertaForSequenceClassification``)."""

    head_class: Callable[[ConfigReader, EncoderTask], ClassificationHead] = ClassificationHead

    def add_head(self, config: ConfigReader) -> None:
        """The head."""
        self.classifier = self.head_class(config, self)

    def logits(self, outputs: Encoded) -> Handle:
        """A row of logits for each sequence."""
        sequence_output = outputs.last_hidden_state
        return self.classifier(sequence_output)


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


class PooledMultipleChoice(PooledClassification):
    """One number for each choice, which is a sequence of its own."""

    outputs = 1


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
