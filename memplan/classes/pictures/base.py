"""Image models: what each is given, the classes of its tasks, and what others read of it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from memplan.classes.base import Base
from memplan.classes.counted import declare_all
from memplan.classes.heads import MakeBase, Task, finish
from memplan.dtypes import DType
from memplan.families.classes import BARE, chosen_ending
from memplan.graph.core.tensors import Tensor
from memplan.graph.modules.basic import Linear
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList, numbered
from memplan.graph.modules.module import Module, Site
from memplan.graph.modules.unread import UnreadGraph
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.stacks import BASE_MODEL
from memplan.graph.towers.images import picture_size
from memplan.graph.towers.state import from_batch, sensed
from memplan.model.config import ConfigReader
from memplan.model.heads import Task as TaskKind
from memplan.model.parameters import ModelPart, owner_of
from memplan.model.pictures import PictureSpec

if TYPE_CHECKING:
    from memplan.model.spec import ModelSpec

IMAGES = "ForImageClassification"
PICTURE = 224
"""What pictures are cut to, where a config does not say it [pixels]."""


class PictureModel(Base):
    """A base model that is given pictures."""

    speaks = classifies = classifies_tokens = False
    picture: PictureSpec
    casts = False
    """It casts its pictures itself."""
    width: int
    """Of what it gives."""
    tower = ""
    """How the name of its first segment begins, where it has several towers or is one."""
    beside_text = False
    """It is the tower of a language model, each of whose samples has so many pictures."""
    vocab = 0
    """Rows of its token table, where it reads texts too."""
    tied = False
    """The output matrix of a class that scores its tokens is that table."""
    context = 1
    """What its layers see of one sample: patches; 1 where there is no sequence."""
    eager_only = False
    """Its attention is written out, whatever is asked for."""
    recomputes = False
    """The class can checkpoint its activations."""
    endings: ClassVar[dict[str, "type[PictureTask]"]]
    """The classes of its tasks by their endings, the usual one first."""
    stands_alone = True
    """It has a class without a task."""
    bare: ClassVar["type[PictureTask] | None"] = None
    """Its class without a task, where that has more than the base model."""
    frames = 0
    """Of each clip; 0: it takes pictures."""
    reads_pooled = True
    """Somebody reads the vector that it returns beside its hidden states."""

    @classmethod
    def named_task(cls, config: ConfigReader, model: "ModelSpec") -> "type[PictureTask]":
        """That which ``architectures`` name or the task means."""
        if model.task is TaskKind.BASE:
            return cls.bare or PictureStates
        return cls.endings[ending_of(cls, config, model.family, model.task)]

    counted_as = ""
    """Why nothing of that is known, where there is a reason."""

    def left_out(self, ending: str) -> bool:  # noqa: ARG002
        """Whether the operations of its class for a task are not written down."""
        return False

    def sides(self) -> tuple[int, int]:
        """Patches of a picture down and across."""
        height, width = picture_size(self.run.options.image_size, self.picture)
        down, across = self.picture.patch
        return height // down, width // across

    @property
    def num_pictures(self) -> int:
        """Of the batch."""
        options = self.run.options
        each = options.images_per_sample * self.picture.crops if self.beside_text else 1
        return options.batch_size * each

    def pixels_shape(self) -> tuple[int, ...]:
        """Of the batch's pictures, or of clips of so many ``frames``."""
        kind = self.picture
        picture = kind.channels, *picture_size(self.run.options.image_size, kind)
        return (self.num_pictures, *((self.frames,) if self.frames else ()), *picture)

    def pixels(self) -> Handle:
        """The batch's pictures."""
        shape = self.pixels_shape()
        given = sensed(self.run, prod(shape), casts=self.picture.casts)
        return Handle(self.run, given, shape)

    def inputs(self) -> Handle:
        """What it is called with."""
        return self.pixels()

    def pooling(self, hidden_states: Handle) -> AbstractContextManager[object]:
        """What stands behind the layers begins: a vector, which leads nowhere where a task reads hidden states alone."""
        name, part = (
            (f"{self.tower}.pooler", ModelPart.OTHER) if self.tower else ("head", ModelPart.HEAD)
        )
        begin(self, name, part, hidden_states)
        return nullcontext() if self.reads_pooled else UnreadGraph(self.run)

    @property
    def layer_lists(self) -> list[LayerList]:
        """All of them, in order."""
        return [each for _, each in self.modules() if isinstance(each, LayerList)]

    def described(
        self, *image: int, channels: int, fixed: bool = False, patch: tuple[int, int] = (1, 1)
    ) -> PictureSpec:
        """Its pictures, of a height and a width, and its layers, which are counted through all lists."""
        lists = numbered(self)
        return PictureSpec(
            channels=channels, image=(image[0], image[-1]), fixed=fixed, casts=self.casts,
            num_layers=sum(len(each.kinds) for each in lists), patch=patch,
            stacks=tuple(dict.fromkeys(_frozen_parts(lists))),
        )  # fmt: skip


def _frozen_parts(lists: list[LayerList]) -> Iterator[str]:
    for each in lists:
        owner = owner_of(each.segment_name)
        if owner:
            yield owner


class PictureTask(Task):
    """A base model, and what the class with an ending makes of what it returns."""

    pooled = False
    """It reads the vector that the base model returns beside its hidden states."""
    meant = ""
    """The step that is meant where the class leaves it open, or has no loss of its own."""
    drops: ClassVar[tuple[str, ...]] = ()
    """Modules of the base model that it is made without."""
    begins_head = True
    """Its own segment begins as soon as the base model has returned."""

    def __init__(self, config: ConfigReader, model: "ModelSpec", base: MakeBase) -> None:
        super().__init__(config, model, base)
        self.model.reads_pooled = self.pooled
        for name in self.drops:
            self.model.children.pop(name, None)
            self.model.weights.pop(name, None)
        self.add_head(config)

    def begin(self) -> None:
        """The first segment begins: of the tower that is run first, where there are several."""
        begin_tower(self, self.model.tower)

    @property
    def model(self) -> PictureModel:
        """The base model."""
        found = self.base
        assert isinstance(found, PictureModel)
        return found

    def add_head(self, config: ConfigReader) -> None:
        """Declare what the task adds."""

    def forward(self, batch: int, length: int, received: Handle | None) -> None:
        """Run the base model, the head and the loss."""
        del batch, length, received
        if self.is_counted or self.spec.activations_left_out:
            finish(self, declare_all(self))
            return
        run = self.run
        run.enter(BASE_MODEL)
        outputs = self.base(self.model.inputs())
        if self.begins_head and run.segment.part is not ModelPart.HEAD:
            self.begin_head(outputs[-1])
        run.leave(BASE_MODEL)
        finish(self, self.loss_of(*outputs))

    def loss_of(self, last_hidden_state: Handle, *others: Handle) -> Tensor:
        """The loss of what the base model returned."""
        raise NotImplementedError


class PictureStates(PictureTask):
    """The model without a task: what it gives is the last of what it returns."""

    pooled = True

    def attach(self, site: Site, path: str = "", within: str = "") -> bool:
        """There is nothing around it."""
        super().attach(site, path, within)
        return self.base.attach(site, path, within)

    def loss_of(self, last_hidden_state: Handle, *others: Handle) -> Tensor:
        """What a loss would be made of."""
        return (last_hidden_state, *others)[-1].record


class ImageClassification(PictureTask):
    """A vector of each picture, its classes and their loss."""

    def add_head(self, config: ConfigReader) -> None:
        """The classifier, where there are classes."""
        del config
        if self.spec.num_labels:
            self.classifier = Linear(self.num_inputs, self.spec.num_labels, bias=True)

    @property
    def num_inputs(self) -> int:
        """Numbers of the vector that it reads."""
        return self.model.width

    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """What the classifier reads."""
        raise NotImplementedError

    def logits(self, vector: Handle) -> Handle:
        """What the classifier gives."""
        found: Handle = self.classifier(vector)
        return found

    def loss_of(self, last_hidden_state: Handle, *others: Handle) -> Tensor:
        """Cross-entropy; without classes there is none."""
        vector = self.vector(last_hidden_state, *others)
        if not self.spec.num_labels:
            return vector.record
        logits = self.logits(vector)
        labels = from_batch(self.run, vector.shape[0], DType.INT64)
        self.run.returned.append(logits.record)
        self.run.give_out(logits.record)
        return cross_entropy(self.run, logits.record, labels)


class FirstToken(ImageClassification):
    """The vector is that of the first token."""

    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """That one."""
        del others
        return last_hidden_state.select(1)


class PooledClassification(ImageClassification):
    """The vector is the one that the base model makes of all tokens."""

    pooled = True

    def vector(self, last_hidden_state: Handle, *others: Handle) -> Handle:
        """The pooled tokens."""
        del last_hidden_state
        return others[0]


def begin(module: Module, name: str, part: ModelPart, x: Handle) -> None:
    """A segment begins that a loop of a module's own runs through."""
    frozen = module.is_frozen(part, name.partition(".")[0])
    module.run.start(name, x.record, part=part, frozen=frozen)


def as_tower(model: Any, name: str) -> None:
    """Have the segments of a model begin with the name of the tower that it is."""
    before = f"{getattr(model, 'tower', '')}."
    for _, each in model.modules():
        if isinstance(each, LayerList):
            each.segment_name = f"{name}.{each.segment_name.removeprefix(before)}"
        elif each.segment is not None:
            segment, part = each.segment
            part = ModelPart.OTHER if part is ModelPart.HEAD else part
            each.segment = f"{name}.{segment.removeprefix(before)}", part
    model.tower = name


def begin_tower(module: Module, tower: str) -> None:
    """The first segment of a model begins, or of one of its towers."""
    name, frozen = f"{tower}.embed".lstrip("."), module.is_frozen(ModelPart.EMBEDDING, tower)
    module.run.start(name, None, part=ModelPart.EMBEDDING, frozen=frozen)


def ending_of(
    base: type[PictureModel], config: ConfigReader, family: str, task: TaskKind | None
) -> str:
    """How the class for a task is named.

    Raises ``ConfigError`` for a task that the type has no class for.
    """
    usual, *others = base.endings
    bare = (BARE,) if base.stands_alone else ()
    return chosen_ending(config, family, task, tuple(dict.fromkeys((usual, *bare, *others))))
