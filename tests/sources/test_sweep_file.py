from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError, UsageError
from memplan.sources.sweep_file import is_sweep_file, read_axis, read_sweep, sweep_from_mapping

GOOD: dict[str, Any] = {
    "version": 1,
    "model": {"name": "t5-3b", "task": "seq2seq-lm"},
    "hardware": {"gpu": "a100-40gb, h100", "gpu_memory": "46GiB"},
    "setup": {"seq_len": 512},
    "axes": {"num_gpus": "8..32", "zero_stage": ["0-1", 3], "checkpointing": "none,full"},
    "constraints": {"global_batch_size": 64},
    "exclude": [{"zero_stage": "0-1", "num_gpus": 32}],
}


def test_everything_is_read() -> None:
    found = sweep_from_mapping(GOOD, source="sweep.yaml")
    assert found.model is not None
    assert (found.model.name, found.model.task) == ("t5-3b", "seq2seq-lm")
    assert found.gpus == ("a100-40gb", "h100")
    assert found.gpu_memory == "46GiB"
    setups = list(found.grid.setups())
    assert len(setups) == 3 * 3 * 2 - 2 * 2
    assert {setup.seq_len for setup in setups} == {512}
    assert all(setup.gradient_accumulation_steps * setup.num_gpus == 64 for setup in setups)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"version": None}, "version: is missing", id="no version"),
        pytest.param({"version": 2}, "version: 2 is not known", id="version"),
        pytest.param({"axis": {}}, "unknown key axis. Did you mean 'axes'", id="key"),
        pytest.param(
            {"axes": {"zero_stag": 1}}, "axes.zero_stag: no such .* 'zero_stage'", id="axis"
        ),
        pytest.param(
            {"axes": {"num_gpus": "8-"}}, "axes.num_gpus: the list of numbers", id="range"
        ),
        pytest.param({"axes": {"num_gpus": [[8]]}}, "axes.num_gpus: write single", id="nested"),
        pytest.param({"axes": [1]}, "axes: write a mapping", id="axes list"),
        pytest.param({"axes": {"zero_stage": 9}}, "not one of 0, 1, 2, 3", id="value"),
        pytest.param({"setup": {"zero": 1}}, "setup.zero: no such setting", id="setup"),
        pytest.param(
            {"setup": {"num_gpus": 0}}, "setup.num_gpus: must be from 1", id="setup value"
        ),
        pytest.param({"hardware": {"gpus": "h100"}}, "hardware.gpus. Did you mean 'gpu'", id="gpu"),
        pytest.param({"hardware": {"gpu": [80]}}, "hardware.gpu: write a name", id="gpu list"),
        pytest.param(
            {"constraints": {"batch": 1}}, "unknown key constraints.batch", id="constraint"
        ),
        pytest.param({"constraints": {"global_batch_size": "x"}}, "whole number", id="batch"),
        pytest.param({"exclude": {"zero_stage": 1}}, "exclude: write a list", id="exclude"),
        pytest.param(
            {"exclude": [{"stage": 1}]}, "exclude: stage: no such setting", id="exclusion"
        ),
        pytest.param({"model": {"task": "base"}}, "model.name: is missing", id="model"),
        pytest.param({"model": {"nam": "x"}}, "model.nam. Did you mean 'name'", id="model key"),
        pytest.param({"model": 5}, "model: write a name", id="model number"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^sweep.yaml: .*{message}"):
        sweep_from_mapping({**GOOD, **changes}, source="sweep.yaml")


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        pytest.param("num_gpus", "1,2,8..32", [1, 2, 8, 16, 32], id="numbers"),
        pytest.param("precision", "bf16, fp32", ["bf16", "fp32"], id="words"),
        pytest.param("freeze", "embeddings,head", ["embeddings,head"], id="one text"),
        pytest.param("dropout", "0,0.1", [0.0, 0.1], id="probabilities"),
        pytest.param("checkpointing", "none,0.5", ["none", "0.5"], id="share"),
    ],
)
def test_axes(name: str, text: str, values: list[object]) -> None:
    assert read_axis(name, text) == values


@pytest.mark.parametrize(
    ("name", "text"),
    [("num_gpus", "0"), ("precision", "bf16,,fp32"), ("dropout", "some"), ("zero_stage", "3-1")],
)
def test_bad_axes(name: str, text: str) -> None:
    with pytest.raises(UsageError, match="--option"):
        read_axis(name, text, option="--option")


@pytest.mark.parametrize(
    ("name", "text", "is_sweep"),
    [
        pytest.param("a.yaml", "version: 1\naxes: {}\n", True, id="sweep"),
        pytest.param("a.yml", "axes: {}\n", True, id="no version"),
        pytest.param("a.yaml", "model_type: llama\nname: mine\n", False, id="model"),
        pytest.param("a.json", "{}", False, id="json"),
    ],
)
def test_a_sweep_is_told_from_a_model(tmp_path: Path, name: str, text: str, is_sweep: bool) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert is_sweep_file(path) is is_sweep


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_sweep(tmp_path / "none.yaml")
