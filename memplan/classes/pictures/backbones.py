"""Image models whose stages another model reads, and which of them it does.

(transformers 5.23, backbone_utils.py)
"""

from collections.abc import Mapping, Sequence

from memplan.classes.pictures.base import PictureModel
from memplan.classes.registry import class_at
from memplan.families.nesting import Part, unknown_part
from memplan.graph.modules.handles import Handle
from memplan.model.config import ConfigReader


class Backbone(PictureModel):
    """It returns what the stages that its config names gave."""

    channels: list[int]
    """Of the stem and of each stage."""
    picked: list[int]
    """Which of these are read."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        names = ["stem", *(f"stage{number}" for number in range(1, len(self.channels)))]
        named = config.texts("out_features") or names[-1:]
        self.picked = [names.index(config.choice("out_features", each, names)) for each in named]

    @property
    def widths(self) -> list[int]:
        """Channels of what it returns."""
        return [self.channels[each] for each in self.picked]

    def feature_maps(self, hidden_states: Mapping[int, Handle]) -> tuple[Handle, ...]:
        """What it returns of what the stem and each stage gave."""
        return tuple(hidden_states[each] for each in self.picked)


BACKBONES = {
    "convnext": "pictures.convnext.ConvNextBackbone",
    "convnextv2": "pictures.convnext.ConvNextV2Backbone",
    "resnet": "pictures.staged.ResNetBackbone",
    "vitdet": "pictures.vitdet.VitDetBackbone",
}
"""By ``model_type``, as ``memplan.classes.registry`` names classes."""


def backbone_of(part: Part, known: Sequence[str]) -> Backbone:
    """The class of a nested config.

    Raises ``ConfigError`` for a type that is none of those known.
    """
    if part.model_type not in known:
        raise unknown_part(part, dict.fromkeys(known))
    found = class_at(BACKBONES[part.model_type])(part.reader)
    assert isinstance(found, Backbone)
    return found
