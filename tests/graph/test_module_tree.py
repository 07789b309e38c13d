"""The module tree holds every parameter once, and equal layers stand once."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from memplan.graph.core.options import TapeOptions
from memplan.graph.counts import count_parameters
from memplan.graph.model import record_model
from memplan.graph.module_tree import module_tree
from memplan.sources.models import load_model

Run = Callable[..., Any]


@pytest.mark.parametrize(
    "name", ["t5-3b", "llama-3.1-8b", "mixtral-8x7b", "gpt2", "bert-base-uncased", "gemma-2-9b"]
)
def test_the_tree_holds_every_parameter(name: str) -> None:
    model = load_model(name)
    root = module_tree(record_model(model, TapeOptions()), model.name)
    assert root.num_params == count_parameters(model).total


def test_equal_layers_stand_once() -> None:
    model = load_model("t5-3b")
    root = module_tree(record_model(model, TapeOptions()), model.name)
    assert root.children["encoder.layers.1-23"].count == 23
    first, rest = root.children["encoder.layers.0"], root.children["encoder.layers.1-23"]
    assert first.num_params - rest.num_params == 32 * 32  # the relative position bias


def test_printed(run: Run) -> None:
    done = run("models", "llama-3.1-8b", "--tree")
    assert done.exit_code == 0
    assert "32 x 218,112,000" in done.stdout
    assert "weight 128256x4096" in done.stdout


def test_json_for_scripts(run: Run) -> None:
    (row,) = json.loads(run("models", "llama-3.1-8b", "--format", "json").stdout)["rows"]
    assert row["tree"]["num_params"] == row["total_params"] == 8_030_261_248
    layers = row["tree"]["modules"][1]
    assert (layers["count"], layers["num_params"]) == (32, 218_112_000)


def test_a_tree_needs_a_model(run: Run) -> None:
    done = run("models", "--tree")
    assert done.exit_code == 2
    assert "MODEL" in done.stderr
