"""Models of what is sensed: the classes of their tasks, how one is chosen, and what each of them does."""

from typing import TYPE_CHECKING, Any, ClassVar

from memplan.classes.base import Base
from memplan.classes.heads import MakeBase, Task, finish
from memplan.classes.sensed.counted import declare_all
from memplan.families.classes import BARE, chosen_ending
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.module import Site
from memplan.graph.stacks import BASE_MODEL
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.parameters import ModelPart

if TYPE_CHECKING:
    from memplan.model.spec import ModelSpec


class SensedModel(Base):
    """A base model that is given something else than tokens alone."""

    speaks = classifies = classifies_tokens = False
    width: int
    """Of what it gives."""
    vocab = 0
    """Rows of its token table, where it reads or writes texts too."""
    tied = False
    """The output matrix of a class that scores its tokens is that table."""
    context = 1
    """What its layers see of one sample: patches, frames; 1 where there is no sequence."""
    eager_only = False
    """Its attention is written out, whatever is asked for."""
    recomputes = False
    """The class can checkpoint its activations."""
    endings: ClassVar[dict[str, type[Any]]]
    """The classes of its tasks by their endings, the usual one first."""
    stands_alone = True
    """It has a class without a task."""
    bare: ClassVar[type[Any]]
    """That class."""
    counted_as = ""
    """Why nothing of what is left out is known, where there is a reason."""

    @classmethod
    def named_task(cls, config: ConfigReader, model: "ModelSpec") -> type[Any]:
        """That which ``architectures`` name or the task means."""
        ending = cls.ending(config, model.family, model.task)
        return cls.endings.get(ending, cls.bare)

    @classmethod
    def ending(cls, config: ConfigReader, family: str, task: TaskKind | None) -> str:
        """How the class for a task is named.

        Raises ``ConfigError`` for a task that the type has no class for.
        """
        usual, *others = cls.endings
        bare = (BARE,) if cls.stands_alone else ()
        return chosen_ending(config, family, task, tuple(dict.fromkeys((usual, *bare, *others))))

    def left_out(self, ending: str) -> bool:  # noqa: ARG002
        """Whether the operations of its class for a task are not written down."""
        return False

    def context_length(self, config: ConfigReader) -> int:  # noqa: ARG002
        """What its layers see of a sample."""
        return self.context

    def senses(self, task: type["SensedTask"]) -> dict[str, Any]:
        """What it is given, by the name that a model's facts have for it."""
        raise NotImplementedError

    def begin_first(self) -> None:
        """The first segment begins."""
        raise NotImplementedError

    def inputs(self) -> Handle:
        """What it is called with."""
        raise NotImplementedError


class SensedTask(Task):
    """A base model, and what the class with an ending makes of what it returns."""

    begins_head = True
    """Its own segment begins as soon as the base model has returned."""
    follows = 0
    """Which of what the base model returns it follows on."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        super().__init__(config, model, base)
        self.prepare()
        self.add_head(config)

    def prepare(self) -> None:
        """Have the base model as the class makes it."""

    @property
    def model(self) -> Any:
        """The base model."""
        return self.base

    def add_head(self, config: ConfigReader) -> None:
        """Declare what the task adds."""

    def begin(self) -> None:
        """The base model's first segment begins."""
        self.model.begin_first()

    def forward(self, batch: int, length: int, received: Handle | None) -> None:
        """Run the base model, the head and the loss."""
        del batch, length, received
        if self.is_counted or self.spec.activations_left_out:
            finish(self, declare_all(self))
            return
        run = self.run
        run.enter(BASE_MODEL)
        outputs = self.outputs()
        if self.begins_head and run.segment.part is not ModelPart.HEAD:
            self.begin_head(outputs[self.follows])
        run.leave(BASE_MODEL)
        finish(self, self.loss_of(*outputs))

    def outputs(self) -> Any:
        """Run the base model, and hold what it is given and returns."""
        return self.base(self.model.inputs())

    def loss_of(self, last_hidden_state: Handle, *others: Any) -> Tensor:
        """The loss of what the base model returned."""
        raise NotImplementedError


class SensedStates(SensedTask):
    """The model without a task: what it gives is what it returns."""

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """There is nothing around it."""
        super().attach(site, path, within)
        return self.base.attach(site, path, within)

    def loss_of(self, last_hidden_state: Handle, *others: Any) -> Tensor:
        """What a loss would be made of."""
        found: Handle = (last_hidden_state, *others)[self.follows]
        return found.record
