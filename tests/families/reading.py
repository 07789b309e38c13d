"""What the tests of several families share: reading a config, and counting what it makes."""

from collections.abc import Mapping

from memplan.families import read_model
from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import count_parameters, trainable_parameters
from memplan.graph.model import record_model
from memplan.model.spec import ModelSpec, Task
from memplan.sources.about_models.defaults import class_defaults


def read(config: Mapping[str, object], task: Task | None = None) -> ModelSpec:
    return read_model(config, source="config.json", name="x", defaults=class_defaults(), task=task)


def counted(config: Mapping[str, object], task: Task | None = None) -> tuple[int, int]:
    """Parameters in all, and of the module that owns the most."""
    counts = count_parameters(read(config, task))
    return counts.total, counts.largest_layer


def trained(config: Mapping[str, object], task: Task | None = None) -> int:
    return trainable_parameters(record_model(read(config, task), TapeOptions()))
