"""Image models: what each is given, the classes of its tasks, and what others read of it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, ClassVar

from memplan.classes.sensed.base import SensedModel, SensedStates, SensedTask
from memplan.dtypes import DType
from memplan.fast_dataclass import replace
from memplan.graph.core.tensors import Tensor
from memplan.graph.losses.tasks import hand_out
from memplan.graph.modules.basic import Linear
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList, numbered
from memplan.graph.modules.module import Module
from memplan.graph.modules.unread import UnreadGraph
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.images import picture_size
from memplan.graph.towers.state import from_batch, sensed
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart, owner_of
from memplan.model.pictures import PictureSpec

IMAGES = "ForImageClassification"
PICTURE = 224
"""What pictures are cut to, where a config does not say it [pixels]."""


class PictureModel(SensedModel):
    """A base model that is given pictures."""

    picture: PictureSpec
    casts = False
    """It casts its pictures itself."""
    tower = ""
    """How the name of its first segment begins, where it has several towers or is one."""
    beside_text = False
    """It is the tower of a language model, each of whose samples has so many pictures."""
    frames = 0
    """Of each clip; 0: it takes pictures."""
    reads_pooled = True
    """Somebody reads the vector that it returns beside its hidden states."""

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

    def senses(self, task: type[SensedTask]) -> dict[str, Any]:
        """Pictures, and the step that is meant."""
        return {"picture": replace(self.picture, meant=getattr(task, "meant", ""))}

    def begin_first(self) -> None:
        """The first segment begins: of the tower that is run first, where there are several."""
        begin_tower(self, self.tower)

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


class PictureTask(SensedTask):
    """A base model, and what the class with an ending makes of what it returns."""

    pooled = False
    """It reads the vector that the base model returns beside its hidden states."""
    meant = ""
    """The step that is meant where the class leaves it open, or has no loss of its own."""
    drops: ClassVar[tuple[str, ...]] = ()
    """Modules of the base model that it is made without."""
    follows = -1

    def prepare(self) -> None:
        """Have the base model as the class makes it."""
        self.model.reads_pooled = self.pooled
        for name in self.drops:
            self.model.children.pop(name, None)
            self.model.weights.pop(name, None)

    @property
    def model(self) -> PictureModel:
        """The base model."""
        found = self.base
        assert isinstance(found, PictureModel)
        return found


class PictureStates(SensedStates, PictureTask):
    """The model without a task: what it gives is the last of what it returns."""

    pooled = True


PictureModel.bare = PictureStates


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
        loss = cross_entropy(self.run, logits.record, labels)
        hand_out(self.run, logits.record)
        return loss


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
