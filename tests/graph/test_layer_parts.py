"""Every kind of a layer's parts and of whole layers has a row that says who writes it down."""

from importlib import import_module
from inspect import signature
from types import UnionType

import pytest

from memplan.graph.written.layer_parts import LAYERS, MIXERS, NETWORKS, Writer
from memplan.model.attention import AttentionSpec
from memplan.model.mixers import MemoryAttentionSpec, MixerSpec, OtherMixer, OtherNetwork
from memplan.model.mixtures import MixtureSpec

WHOLE_LAYERS = {MemoryAttentionSpec.__name__, MixerSpec.__name__, *LAYERS}


def names(union: UnionType) -> set[str]:
    return {each.__name__ for each in union.__args__}


def test_every_kind_has_a_row_and_no_row_is_idle() -> None:
    assert set(MIXERS) == names(OtherMixer) - {AttentionSpec.__name__} - WHOLE_LAYERS
    assert set(NETWORKS) == {*names(OtherNetwork), MixtureSpec.__name__}


@pytest.mark.parametrize("row", [*MIXERS.items(), *NETWORKS.items()], ids=lambda each: each[0])
def test_a_row_names_what_takes_its_spec(row: tuple[str, Writer]) -> None:
    spec, writer = row
    function = getattr(import_module(f"memplan.graph.{writer.module}"), writer.function)
    taken = list(signature(function).parameters.values())
    assert [each.name for each in taken] == ["t", "x", "spec", "context"]
    said = getattr(taken[2].annotation, "__name__", taken[2].annotation)
    assert said == spec


@pytest.mark.parametrize("row", LAYERS.items(), ids=lambda each: each[0])
def test_a_whole_layer_takes_its_spec(row: tuple[str, Writer]) -> None:
    spec, writer = row
    function = getattr(import_module(f"memplan.graph.{writer.module}"), writer.function)
    taken = list(signature(function).parameters.values())
    assert len(taken) == 5
    assert getattr(taken[3].annotation, "__name__", taken[3].annotation) == spec
