"""What a task adds to a decoder: logits and their loss, or classes of sequences and tokens.

(transformers 5.23, modeling_layers.py: ``GenericForSequenceClassification``, ``GenericForTokenClassification``)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from memplan.classes.base import Base
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.losses.tasks import language_model_loss, takes_matrix
from memplan.graph.modules.basic import Dropout, Linear
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module, Site, Weight
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.stacks import BASE_MODEL, WHOLE_MODEL
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart, WeightRole
from memplan.training.objectives import JOINED, Objective

if TYPE_CHECKING:
    from memplan.model.spec import ModelSpec

MakeBase = Callable[..., Base]


class Task(Module):
    """A base model, and what a task does with its hidden states."""

    is_counted = False
    """Its operations are not written down."""
    ordered: tuple[Weight, ...] = ()
    """All weights in the order of ``named_parameters()``, once the model stands as it runs."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        self.spec = model
        built = base(config)
        self.prefix = built.prefix
        self.children[built.prefix] = built

    @property
    def width(self) -> int:
        """Of the hidden states that the base model gives: that of its table."""
        table = self.base.token_table
        return self.spec.hidden_size if table is None else table.width

    @property
    def base(self) -> Base:
        """The model that every task shares, under the name that its type gives it."""
        found = self.children[self.prefix]
        assert isinstance(found, Base)
        return found

    def forward(self, batch: int, length: int, received: Handle | None) -> None:
        run = self.run
        if received is None:
            run.enter(BASE_MODEL)
        x = self.base(batch, length, received)
        self.begin_head(x)
        run.leave(BASE_MODEL)
        finish(self, self.loss(x))

    def begin(self) -> None:
        """The first segment begins."""
        run, frozen = self.run, self.run.options.freeze.embeddings
        run.start("embed", None, part=ModelPart.EMBEDDING, frozen=frozen)

    def begin_head(self, x: Handle) -> None:
        """The task's own segment begins."""
        self.run.start("head", x.record, part=ModelPart.HEAD, frozen=self.is_frozen(ModelPart.HEAD))

    def loss(self, x: Handle) -> Tensor:
        """The loss of the hidden states, or what the job makes of them."""
        raise NotImplementedError


def finish(module: Task, loss: Tensor) -> None:
    """The model returns; where several take part, their loss is made behind it."""
    run = module.run
    run.release_cache()
    run.leave(WHOLE_MODEL)
    run.finish(loss)
    if run.options.objective in JOINED and run.options.ends_in_loss:
        from memplan.graph.losses.joint import joint_loss  # only where several take part

        joint_loss(run, loss, module.spec.num_outputs)


class BaseModel(Task):
    """The model without a task: its hidden states are what it gives."""

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """There is nothing around it."""
        super().attach(site, path, within)
        return self.base.attach(site, path or self.base.inner, within)

    def forward(self, batch: int, length: int, received: Handle | None) -> None:
        x = self.base(batch, length, received)
        self.begin_head(x)
        finish(self, x.record)


class ForCausalLM(Task):
    """Logits of every token and the loss on the next one."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        super().__init__(config, model, base)
        table = self.base.token_table
        self.lm_head = Linear(
            self.width, model.num_outputs, bias=model.head.bias, role=WeightRole.OUTPUT
        )
        if model.head.tied and table is not None:
            self.lm_head.weight = table.weight
            table.tied = True

    def loss(self, x: Handle) -> Tensor:
        run, x = self.run, self.base.before_head(x)

        def project(hidden: Tensor) -> Tensor:
            width = x.shape[-1]
            rows = hidden.numel // width
            shape = (rows, width) if hidden.is_flat else (1, rows, width)
            found = self.logits(Handle(run, hidden, shape)).record
            stage = run.options.stage
            if stage is not None and stage.runtime.holds_logits:
                # A stage returns logits: no variable of its names what they were made from as their loss is computed.
                run.let_input_go()
            return found

        if run.options.objective is not Objective.TASK:
            from memplan.graph.losses.joint import objective_outputs  # only then

            return objective_outputs(run, self.spec, x.record, self.table(), project)
        self.base.keep_logits()
        run.loss_apart = self.spec.head.unnamed_loss
        count = self.spec.num_outputs
        group = run.options.tensor_parallel
        if group is not None and group.loss:
            count //= group.degree
        if self.spec.head.attended_loss:
            from memplan.graph.attended_loss import attended_loss  # only for such a loss

            return attended_loss(run, self.logits(x).record, count)
        weight = self.lm_head.parameter(self.lm_head.weight) if takes_matrix(run) else None
        return language_model_loss(run, x.record, weight, count, project)

    def logits(self, x: Handle) -> Handle:
        """Hidden states through the output matrix, and what the class does with them."""
        return self.base.adjusted(self.lm_head(x))

    def table(self) -> Parameter:
        """The token table, of which another stage's head knows the shape alone."""
        table = self.base.token_table
        if table is not None:
            return self.run.parameters[table.weight]
        shape = self.spec.vocab_size, self.spec.hidden_size
        return Parameter("embed_tokens.weight", shape, self.run.compute, module="", trainable=False)


class ForSequenceClassification(Task):
    """Logits of every token, of which the last one's of each sequence count."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        super().__init__(config, model, base)
        self.score = Linear(self.width, model.num_labels)

    def loss(self, x: Handle) -> Tensor:
        run = self.run
        logits = self.score(x)
        batch, _, labels = logits.shape
        pooled = run.slice(logits.record, batch * labels)
        return cross_entropy(run, pooled)


class ForTokenClassification(Task):
    """Classes of every token."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        super().__init__(config, model, base)
        self.dropout = Dropout(model.head.token_dropout)
        self.score = Linear(model.hidden_size, model.num_labels, bias=True)

    def loss(self, x: Handle) -> Tensor:
        x = self.dropout(x)
        logits = self.score(x)
        return cross_entropy(self.run, logits.float().record)


class ForRetrieval(Task):
    """A short vector of every token (ColPali)."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        super().__init__(config, model, base)
        self.embedding_proj_layer = Linear(self.width, model.head.vector_size, bias=True)

    def loss(self, x: Handle) -> Tensor:
        """The sum of all vectors, each over its length: the class has no loss of its own."""
        from memplan.graph.modules.functional import divide, root_of_squares, total  # only then

        embeddings = self.embedding_proj_layer(x)
        embeddings = divide(embeddings, root_of_squares(embeddings))
        attention_mask = made_by(
            self.run, OperationKind.ARANGE, (*embeddings.shape[:2], 1), DType.INT64
        )
        embeddings = embeddings * attention_mask
        self.run.give_out(embeddings.record)
        return total(embeddings.view(1, -1)).record
