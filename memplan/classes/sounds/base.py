"""Models of sound: what each is given, the classes of its tasks, and what others read of it."""

from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from memplan.classes.base import Base
from memplan.classes.counted import declare_all
from memplan.classes.heads import MakeBase, Task, finish
from memplan.families.classes import BARE, chosen_ending
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Site
from memplan.graph.stacks import BASE_MODEL
from memplan.graph.towers.state import sensed
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.parameters import ModelPart
from memplan.model.sounds import SoundSpec

if TYPE_CHECKING:
    from memplan.model.spec import ModelSpec

SECONDS = 30
"""How long clips are cut where the setup says nothing else."""
SAMPLING_RATE = 16000
"""Samples a second of speech."""


class SoundModel(Base):
    """A base model that is given clips of sound."""

    speaks = classifies = classifies_tokens = False
    sound: SoundSpec
    width: int
    """Of what it gives."""
    recomputes = True
    """The class can checkpoint its activations."""
    eager_only = False
    """Its class writes its scores out, whatever kernel is asked for."""
    vocab_size = 0
    """Of the tokens that it writes."""
    is_tied = False
    """The output matrix is the table of these."""
    endings: ClassVar[dict[str, "type[SoundTask]"]]
    """The classes of its tasks by their endings, the usual one first."""

    @classmethod
    def named_task(cls, config: ConfigReader, model: "ModelSpec") -> "type[SoundTask]":
        """That which ``architectures`` name or the task means."""
        ending = cls.ending(config, model.family, model.task)
        return cls.endings.get(ending, SoundStates)

    @classmethod
    def ending(cls, config: ConfigReader, family: str, task: TaskKind | None) -> str:
        """How the class for a task is named.

        Raises ``ConfigError`` for a task that the type has no class for.
        """
        usual, *others = cls.endings
        return chosen_ending(config, family, task, (usual, BARE, *others))

    def context_length(self, config: ConfigReader) -> int:
        """What its layers see of a sample."""
        raise NotImplementedError

    def clips_length(self) -> int:
        """Of the batch's clips [samples or frames]."""
        seconds = self.run.options.audio_seconds
        return self.sound.length if seconds is None else seconds * self.sound.rate

    def clips(self) -> Handle:
        """The batch's clips: of a channel of numbers, or of frames."""
        shape = self.run.options.batch_size, self.sound.channels, self.clips_length()
        if self.sound.is_framed:
            shape = shape[0], shape[2], shape[1]
        return Handle(self.run, sensed(self.run, prod(shape)), shape)

    def begin_first(self) -> None:
        """The first segment begins."""
        raise NotImplementedError

    def described(
        self,
        channels: int,
        length: int,
        rate: int,
        *,
        is_framed: bool = False,
        stacks: tuple[str, ...] = (),
    ) -> SoundSpec:
        """Its clips and its layers, which are counted in each list anew."""
        lists = (each for _, each in self.modules() if isinstance(each, LayerList))
        return SoundSpec(
            channels=channels, length=length, rate=rate, is_framed=is_framed,
            num_layers=sum(len(each.kinds) for each in lists), stacks=stacks,
        )  # fmt: skip


class SoundTask(Task):
    """A base model, and what the class with an ending makes of what it returns."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        super().__init__(config, model, base)
        self.add_head(config)

    @property
    def listener(self) -> Any:
        """The base model."""
        return self.base

    def add_head(self, config: ConfigReader) -> None:
        """Declare what the task adds."""

    def begin(self) -> None:
        """The base model's first segment begins; of one that is counted, the only one before its layers."""
        if self.is_counted:
            writes = self.listener.vocab_size > 0
            name, part = ("embed", ModelPart.EMBEDDING) if writes else ("model", ModelPart.OTHER)
            begin(self, name, part, None)
        else:
            self.listener.begin_first()

    def forward(self, batch: int, length: int, received: Handle | None) -> None:
        """Run the base model, the head and the loss."""
        del batch, length, received
        if self.is_counted:
            made = declare_all(self)
            for weight in self.weights.values():
                self.parameter(weight)
            finish(self, made)
            return
        run = self.run
        run.enter(BASE_MODEL)
        outputs = self.outputs()
        self.begin_head(outputs[0])
        run.leave(BASE_MODEL)
        finish(self, self.loss_of(*outputs))

    def outputs(self) -> Any:
        """Run the base model, and hold what it is given and returns."""
        return self.base(self.listener.clips())

    def loss_of(self, last_hidden_state: Handle, *others: Any) -> Tensor:
        """The loss of what the base model returned."""
        raise NotImplementedError


class SoundStates(SoundTask):
    """The model without a task: what it gives is its hidden states."""

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """There is nothing around it."""
        super().attach(site, path, within)
        return self.base.attach(site, path, within)

    def loss_of(self, last_hidden_state: Handle, *others: Any) -> Tensor:
        """What a loss would be made of."""
        del others
        return last_hidden_state.record


def beside_its_lists(module: Module) -> list[Module]:
    """It and all modules in it that no layer has."""
    found = [module]
    for each in module.children.values():
        if not isinstance(each, LayerList):
            found += beside_its_lists(each)
    return found


def begin(
    module: Module, name: str, part: ModelPart, x: Handle | None, *, checkpointed: bool = False
) -> None:
    """A segment begins that no list of layers is; a stack that is frozen whole has all of its own frozen."""
    run, stack = module.run, name.partition(".")[0]
    frozen = module.is_frozen(part, stack) or module.is_frozen(ModelPart.LAYERS, stack)
    record = None if x is None else x.record
    run.start(name, record, part=part, frozen=frozen, checkpointed=checkpointed)
