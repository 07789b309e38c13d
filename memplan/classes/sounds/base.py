"""Models of sound: what each is given, the classes of its tasks, and what others read of it."""

from math import prod
from typing import Any

from memplan.classes.sensed.base import SensedModel, SensedStates, SensedTask
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.towers.state import sensed
from memplan.model.parameters import ModelPart
from memplan.model.sounds import SoundSpec

SECONDS = 30
"""How long clips are cut where the setup says nothing else."""
SAMPLING_RATE = 16000
"""Samples a second of speech."""


class SoundModel(SensedModel):
    """A base model that is given clips of sound."""

    sound: SoundSpec
    recomputes = True

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

    def inputs(self) -> Handle:
        """What it is called with."""
        return self.clips()

    def senses(self, task: type[SensedTask]) -> dict[str, Any]:  # noqa: ARG002
        """Clips."""
        return {"sound": self.sound}

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


class SoundTask(SensedTask):
    """A base model, and what the class with an ending makes of what it returns."""

    def begin(self) -> None:
        """The base model's first segment begins; of one that is counted, the only one before its layers."""
        if not self.is_counted:
            super().begin()
        elif self.model.vocab:
            begin(self, "embed", ModelPart.EMBEDDING, None)
        else:
            begin(self, "model", ModelPart.OTHER, None)


class SoundStates(SensedStates, SoundTask):
    """The model without a task: what it gives is its hidden states."""


SoundModel.bare = SoundStates


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
