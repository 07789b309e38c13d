"""Readers of others' files: a misspelt key is refused, and no value is a traceback."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.errors import ConfigError, MemplanError
from memplan.estimator import estimate
from memplan.model.spec import ModelSpec
from memplan.sources import accelerate_config
from memplan.sources.accelerate_config import accelerate_fields
from memplan.sources.deepspeed_config import deepspeed_fields
from memplan.sources.deepspeed_keys import OPTIMIZER_PARAMS, TOP, Key, Section
from memplan.sources.models import load_model
from memplan.sources.setup_file import setup_from_mapping
from memplan.sources.trainer.keys import known_arguments
from memplan.sources.training_arguments import arguments_file
from memplan.training.setup import SETUP_FIELDS, TrainingSetup

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**30, 0.0, 1.5, 5e8, "", "auto", "true", "no", "2", "2.5",
    "fp32", "none", "cpu", "text", [], [1], ["a"], [None], {}, {"enabled": True}, {"a": 1},
    {"enabled": {"x": []}}, "5e8", "{", "{}", "-3", "\x00",
)  # fmt: skip
"""One or more of every type, and those that readers treat in their own way."""

Place = tuple[str, ...]


def places(section: Section, above: Place = ()) -> Iterator[Place]:
    """Every key of a schema, with the sections it stands in."""
    for name, kind in section.items():
        yield (*above, name)
        if not isinstance(kind, Key):
            yield from places(kind, (*above, name))


DEEPSPEED: list[Place] = [
    *places(TOP), *(("optimizer", "params", name) for name in OPTIMIZER_PARAMS),
]  # fmt: skip
ACCELERATE: list[Place] = [
    *((name,) for name in sorted(accelerate_config._IGNORED)),
    *(("fsdp_config", f"fsdp_{name}") for name in accelerate_config._FSDP_KEYS),
    *(("deepspeed_config", name) for name in accelerate_config._DEEPSPEED_KEYS),
    *(("deepspeed_config", name) for name in accelerate_config._DEEPSPEED_LAUNCH_KEYS),
    *(("parallelism_config", name) for name in accelerate_config._PARALLEL_KEYS),
]
ARGUMENTS: list[Place] = [(name,) for name in known_arguments()]
SETUP: list[Place] = [(name,) for name in SETUP_FIELDS]


def nested(place: Place, value: Any, kind: str = "") -> dict[str, Any]:
    """A file with one key."""
    for name in reversed(place):
        value = {name: value}
    if place[0] == "optimizer" and isinstance(value["optimizer"], dict):
        value["optimizer"].setdefault("type", "AdamW")
    if kind:
        value.setdefault("distributed_type", kind)
    found: dict[str, Any] = value
    return found


def of_deepspeed(config: Mapping[str, Any]) -> TrainingSetup:
    read = deepspeed_fields(config, {"num_gpus": 8}, source="ds.json")
    return TrainingSetup(**{"num_gpus": 8, **read.fields})  # type: ignore[arg-type]


def of_accelerate(config: Mapping[str, Any]) -> TrainingSetup:
    return TrainingSetup(**accelerate_fields(config, {}, source="a.yaml").fields)  # type: ignore[arg-type]


def of_arguments(config: Mapping[str, Any]) -> TrainingSetup:
    return arguments_file(config, TrainingSetup(num_gpus=8), source="args.json").setup


def of_setup(config: Mapping[str, Any]) -> TrainingSetup:
    return setup_from_mapping(config, source="setup.yaml")


READERS: list[tuple[Callable[[Mapping[str, Any]], TrainingSetup], list[Place], str]] = [
    (of_deepspeed, DEEPSPEED, ""),
    (of_accelerate, ACCELERATE, "FSDP"),
    (of_accelerate, ACCELERATE, "DEEPSPEED"),
    (of_arguments, ARGUMENTS, ""),
    (of_setup, SETUP, ""),
]
IDS = ["deepspeed", "accelerate-fsdp", "accelerate-deepspeed", "arguments", "setup"]


@cache
def tiny_model() -> ModelSpec:
    """A model whose estimate takes no time."""
    config = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
        "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    return load_model(config)


def misspelt(name: str) -> Iterator[str]:
    """One letter left out, and two in each other's place, away from the ends."""
    middle = len(name) // 2
    yield name[:middle] + name[middle + 1 :]
    yield name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]


@pytest.mark.parametrize(("read", "known", "kind"), READERS, ids=IDS)
def test_every_misspelt_key_is_refused(
    read: Callable[[Mapping[str, Any]], TrainingSetup], known: list[Place], kind: str
) -> None:
    names = {place[-1] for place in known}
    for *above, name in known:
        if above and above[0].startswith(("fsdp", "deepspeed")) and kind.lower() not in above[0]:
            continue
        for wrong in misspelt(name):
            if wrong in names or len(name) < 4:
                continue
            with pytest.raises(ConfigError) as caught:
                read(nested((*above, wrong), True, kind))
            message = str(caught.value)
            assert wrong in message
            assert "\n" not in message
            assert len(message) < 400


@pytest.mark.parametrize(("read", "known", "kind"), READERS, ids=IDS)
def test_no_value_is_a_traceback(
    read: Callable[[Mapping[str, Any]], TrainingSetup], known: list[Place], kind: str
) -> None:
    setups = set()
    for place in known:
        for value in VALUES:
            try:
                setups.add(read(nested(place, value, kind)))
            except MemplanError as error:
                assert "\n" not in str(error)
                assert len(str(error)) < 800, (
                    "all optimizers' names, where none is near, are 700 characters"
                )
    for setup in setups:
        try:
            estimate(tiny_model(), replace(setup, seq_len=8))
        except MemplanError as error:
            assert "\n" not in str(error)


ANYTHING = st.recursive(
    st.sampled_from([each for each in VALUES if not isinstance(each, list | dict)]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


def merged(parts: list[tuple[Place, Any]]) -> dict[str, Any]:
    """One file of several keys."""
    whole: dict[str, Any] = {}
    for (*above, name), value in parts:
        section = whole
        for folder in above:
            inner = section.get(folder)
            section[folder] = section = inner if isinstance(inner, dict) else {}
        section[name] = value
    return whole


def answers_or_refuses(
    read: Callable[[Mapping[str, Any]], TrainingSetup], parts: list[tuple[Place, Any]]
) -> None:
    try:
        read(merged(parts))
    except MemplanError as error:
        assert "\n" not in str(error)


SLOW = [HealthCheck.too_slow]


@settings(derandomize=True, max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(parts=st.lists(st.tuples(st.sampled_from(DEEPSPEED), ANYTHING), max_size=8))
def test_whole_ds_configs(parts: list[tuple[Place, Any]]) -> None:
    answers_or_refuses(of_deepspeed, parts)


@settings(derandomize=True, max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(parts=st.lists(st.tuples(st.sampled_from(ACCELERATE), ANYTHING), max_size=8))
def test_whole_accelerate_files(parts: list[tuple[Place, Any]]) -> None:
    answers_or_refuses(of_accelerate, [*parts, (("distributed_type",), "DEEPSPEED")])


@settings(derandomize=True, max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(parts=st.lists(st.tuples(st.sampled_from(ARGUMENTS), ANYTHING), max_size=8))
def test_whole_files_of_arguments(parts: list[tuple[Place, Any]]) -> None:
    answers_or_refuses(of_arguments, parts)


@pytest.mark.fuzz
@settings(max_examples=2_000, deadline=None, suppress_health_check=SLOW)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(DEEPSPEED + ACCELERATE + ARGUMENTS), ANYTHING), max_size=8
    )
)
def test_many_files(parts: list[tuple[Place, Any]]) -> None:
    for read in (of_deepspeed, of_accelerate, of_arguments):
        answers_or_refuses(read, parts)
