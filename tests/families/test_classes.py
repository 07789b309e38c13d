"""Which class is meant where a type's classes are named after other tasks than a text's."""

from collections.abc import Mapping

import pytest

from memplan.errors import ConfigError
from memplan.families import read_model
from memplan.graph.counts import count_parameters
from memplan.model.spec import ModelSpec, Task
from memplan.sources.about_models.defaults import class_defaults


def read(config: Mapping[str, object], task: Task | None = None) -> ModelSpec:
    return read_model(config, source="config.json", name="x", defaults=class_defaults(), task=task)


@pytest.mark.parametrize(
    ("architectures", "asked", "expected"),
    [
        pytest.param(["ViTForImageClassification"], None, Task.OTHER, id="named"),
        pytest.param(["ViTModel"], None, Task.BASE, id="bare"),
        pytest.param([], None, Task.OTHER, id="usual"),
        pytest.param(["ViTForImageClassification"], Task.BASE, Task.BASE, id="base-asked-for"),
        pytest.param(["ViTForImageClassification"], Task.OTHER, Task.OTHER, id="other-asked-for"),
        pytest.param(["MyOwnNet"], None, Task.OTHER, id="unknown-name-usual-class"),
    ],
)
def test_task(architectures: list[str], asked: Task | None, expected: Task) -> None:
    config = {"model_type": "vit", "architectures": architectures}
    assert read(config, asked).task is expected


def test_a_longer_ending_wins() -> None:
    config = {"model_type": "deit", "num_labels": 10}
    single = read({**config, "architectures": ["DeiTForImageClassification"]})
    double = read({**config, "architectures": ["DeiTForImageClassificationWithTeacher"]})
    added = count_parameters(double).total - count_parameters(single).total
    assert added == 10 * (768 + 1)


def test_a_task_without_a_class_is_refused() -> None:
    config = {"model_type": "vit", "architectures": ["ViTModel"]}
    with pytest.raises(ConfigError, match="vit: no class is known for task 'causal-lm'"):
        read(config, Task.CAUSAL_LM)


def test_a_class_that_is_not_known_is_refused() -> None:
    config = {"model_type": "vit", "architectures": ["ViTForSomethingElse"]}
    with pytest.raises(ConfigError, match="vit: no class is known for ViTForSomethingElse"):
        read(config)


def test_classes_of_an_image_are_those_that_the_class_would_make() -> None:
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    assert read(config).num_labels == 2
    assert read({**config, "id2label": {"0": "cat", "1": "dog", "2": "eel"}}).num_labels == 3
