"""Checkpointing of some layers: a share, a number, or a list of them."""

from collections.abc import Callable
from typing import Any

import pytest

from memplan.errors import SetupError
from memplan.estimator import Estimate, estimate
from memplan.graph.core.options import TapeOptions
from memplan.graph.stages import stage_options
from memplan.sources.models import load_model
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.parallelism import StagePlace

DEPTH = 16


def answer(checkpointing: object) -> Estimate:
    setup = TrainingSetup(seq_len=512, precision="bf16", checkpointing=checkpointing)  # type: ignore[arg-type]
    return estimate(load_model("llama-3.2-1b"), setup)


def kept(checkpointing: object) -> int:
    return answer(checkpointing).activations_bytes


@pytest.mark.parametrize(
    ("text", "ranges", "shown"),
    [
        ("0-3,12", ((0, 3), (12, 12)), "layers.0-3+12"),
        ("layers.0-3+layers.4", ((0, 4),), "layers.0-4"),
        ("5,1,2", ((1, 2), (5, 5)), "layers.1-2+5"),
        ("layers.7", ((7, 7),), "layers.7"),
    ],
)
def test_reading(text: str, ranges: tuple[tuple[int, int], ...], shown: str) -> None:
    layers = CheckpointedLayers.parse(text)
    assert layers.ranges == ranges
    assert str(layers) == shown
    assert CheckpointedLayers.parse(shown) == layers
    assert TrainingSetup(checkpointing=text).checkpointing == layers  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["3-1", "0-", "layers.", "1,,2", "0-999999999", "1.5", "-1"])
def test_what_names_no_layers_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match="checkpointing"):
        TrainingSetup(checkpointing=text)  # type: ignore[arg-type]


def test_the_same_layers_by_other_words() -> None:
    assert kept(DEPTH) == kept("full") == kept(1.0) == kept("0-15")
    assert kept(8) == kept("8") == kept(0.5) == kept("0-7")
    assert kept("layers.3") < kept("none")


def test_each_layer_saves_as_much_wherever_it_is() -> None:
    """But for the position ids, which all checkpoints hold alike."""
    whole = kept("none")
    one = kept("layers.3") - kept("3,9")
    positions = one - (whole - kept("layers.3"))
    assert positions == 8 * 512
    assert whole - kept("3,9,12") == 3 * one - positions
    assert whole - kept("8-15") == whole - kept("0-7") == 8 * one - positions


def test_layers_that_there_are_not_are_refused(run: Callable[..., Any]) -> None:
    done = run("estimate", "llama-3.2-1b", "--checkpointing", "0-16")
    assert done.exit_code == 3
    assert "llama-3.2-1b has 16 layers, counted from 0" in done.stderr


def test_on_the_command_line(run: Callable[..., Any]) -> None:
    done = run("estimate", "llama-3.2-1b", "--checkpointing", "0-3,12", "--gpu", "h100")
    assert "checkpointing layers.0-3+12" in " ".join(done.stdout.split())
    found = run(
        "sweep", "llama-3.2-1b", "--checkpointing", "none,0.5,8,0-7+12,full", "--gpu", "h100",
        "--format", "csv",
    ).stdout  # fmt: skip
    for value in ("none", "0.5", "layers.0-7", "layers.0-7+12", "full"):
        assert f",{value}," in found
    plan = run("plan", "llama-3.2-1b", "--gpus", "1", "--checkpointing", "0-7+12,full")
    assert "layers.0-7+12" in plan.stdout


def test_no_framework_can_be_told(run: Callable[..., Any]) -> None:
    done = run("estimate", "llama-3.2-1b", "--checkpointing", "8", "--emit", "training-args")
    assert done.exit_code != 0
    assert "layers.0-7" in done.stderr


def test_a_share_of_a_pipelines_layers_is_of_the_models_first_ones() -> None:
    place = StagePlace(is_first=True, is_last=True)

    def within(share: float, layers: range) -> object:
        options = TapeOptions(checkpointed_layers=share)
        found = stage_options(options, num_layers=8, layers=layers, place=place)
        return found.checkpointed_layers

    assert within(0.5, range(4)) == 1.0
    assert within(0.5, range(4, 8)) == 0.0
    assert within(0.75, range(4, 8)) == CheckpointedLayers(((0, 1),))
    assert [within(share, range(4, 8)) for share in (0.0, 1.0)] == [0.0, 1.0]


def test_layers_of_a_tower_are_counted_too() -> None:
    setup = TrainingSetup(checkpointing="11-12")  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="has 12 layers, counted from 0"):
        estimate(load_model({"model_type": "vit"}), setup)
