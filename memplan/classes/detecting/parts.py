"""What detectors declare alike."""

from collections.abc import Iterable

from memplan.classes.pictures.base import PictureModel, PictureStates, PictureTask
from memplan.classes.sensed.counted import Parts
from memplan.families.nesting import PartSpec, read_part, unknown_part
from memplan.graph.modules.basic import Linear
from memplan.graph.modules.grids import BatchNorm, Conv2d
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader
from memplan.model.parameters import WeightRole

DETECTION = "ForObjectDetection"
BOX = 4
"""Numbers that say where an object is."""


class Detector(PictureModel):
    """Its operations are not written down."""

    prefix = "model"
    tower = "backbone"

    def left_out(self, ending: str) -> bool:
        """All of them."""
        del ending
        return True

    def add_labels(self, config: ConfigReader, count: int) -> None:
        """Declare what of it tells classes apart."""
        raise NotImplementedError


class DetectorTask(PictureTask):
    """What a class adds to a detector."""

    def add_head(self, config: ConfigReader) -> None:
        """What of the base model knows of classes."""
        model = self.model
        assert isinstance(model, Detector)
        model.add_labels(config, self.spec.num_labels)


class DetectorStates(DetectorTask, PictureStates):
    """Nothing else."""


def backbone_config(config: ConfigReader, model_type: str) -> ConfigReader:
    """That of the pictures' tower, which is of one type."""
    part = read_part(config, PartSpec(key="backbone_config", model_type=model_type))
    if part.model_type != model_type:
        error = unknown_part(part, {model_type: None})
        raise error
    return part.reader


def listed(parts: Iterable[Module]) -> Parts:
    """``torch.nn.ModuleList``."""
    return Parts(**{str(index): each for index, each in enumerate(parts)})


def multi_layer(size: int, inner: int, out: int, num_layers: int) -> Parts:
    """Linear layers one behind the other, all but the last as wide as ``inner``."""
    sizes = [size, *[inner] * (num_layers - 1), out]
    made = (Linear(sizes[at], sizes[at + 1], bias=True) for at in range(num_layers))
    return Parts(layers=listed(made))


def perceptron(size: int, inner: int) -> Parts:
    """Two linear layers with biases."""
    return Parts(fc1=Linear(size, inner, bias=True), fc2=Linear(inner, size, bias=True))


def attention(size: int, *, width: int = 0, bias: bool = True, key_bias: bool = True) -> Parts:
    """Queries, keys, values and output as four linear layers; ``width`` is that of all heads."""
    width = width or size
    biases = {"q_proj": bias, "k_proj": bias and key_bias, "v_proj": bias}
    named = {name: Linear(size, width, bias=own) for name, own in biases.items()}
    return Parts(**named, o_proj=Linear(width, size, bias=True, role=WeightRole.ATTENTION_OUTPUT))


def conv_norm(before: int, after: int, kernel: int, *, groups: int = 1) -> Parts:
    """A convolution without a bias, and a norm."""
    return Parts(
        conv=Conv2d(before, after, kernel, groups=groups, bias=False), norm=BatchNorm(after)
    )


def deformable(size: int, points: int) -> dict[str, Module]:
    """Where in the image to look, and how much each place counts."""
    return {
        "sampling_offsets": Linear(size, 2 * points, bias=True),
        "attention_weights": Linear(size, points, bias=True),
    }
