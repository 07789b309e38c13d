"""Types that are written as classes: what others read of them is taken off the class."""

from memplan.families.request import ReadRequest
from memplan.model.config import ConfigReader
from memplan.model.spec import ModelSpec
from memplan.upward import provided


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Have the class made, which reads its config itself (``memplan.classes``)."""
    model: ModelSpec = provided("class_facts", reader, request)
    return model
