"""From a checkpoint's size, index or header to parameters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError, UsageError
from memplan.sources.about_models.checkpoint_file import read_checkpoint

Run = Callable[..., Any]


def counted(text: str | Path) -> dict[tuple[str, str], int]:
    return {(each.format, each.unit): each.num_params for each in read_checkpoint(str(text))}


def test_a_size_that_people_write() -> None:
    """T5-11B's file of 42.1 GB, which are GiB: 11.3 billion numbers in fp32."""
    found = counted("42.1 GB")
    assert round(found["fp32", "GiB"] / 10**9, 1) == 11.3
    assert found["fp32", "GB"] == 42_100_000_000 // 4
    assert found["bf16 or fp16", "GB"] == 42_100_000_000 // 2
    assert set(counted("42.1GiB")) == {("fp32", ""), ("bf16 or fp16", ""), ("8 bits", "")}


def test_a_pickles_size_is_what_is_known_of_it(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    with path.open("wb") as file:
        file.truncate(8 * 10**9)  # it takes no room
    assert counted(path) == {
        ("fp32", ""): 2 * 10**9, ("bf16 or fp16", ""): 4 * 10**9, ("8 bits", ""): 8 * 10**9,
    }  # fmt: skip


def test_an_index_with_the_format_of_the_config_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 16_060_522_496}, "weight_map": {}}))
    assert counted(path)["bf16 or fp16", ""] == 8_030_261_248
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    assert counted(path) == {("bf16", ""): 8_030_261_248}


def safetensors(path: Path, header: object) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


def test_a_header_counts_each_format(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [4, 5], "data_offsets": [0, 40]},
        "b": {"dtype": "F32", "shape": [], "data_offsets": [40, 44]},
        "c": {"dtype": "BF16", "shape": [3], "data_offsets": [44, 50]},
    }
    assert counted(safetensors(tmp_path / "model.safetensors", header)) == {
        ("BF16", ""): 23, ("F32", ""): 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "header",
    [[], {"a": 1}, {"a": {"dtype": "X9", "shape": [1]}}, {"a": {"dtype": "F32", "shape": [-1]}}, {"a": {}},
     {"a": {"dtype": "F32", "shape": [1.5]}}, {"a": {"dtype": [], "shape": [1]}}],
)  # fmt: skip
def test_what_is_no_header(tmp_path: Path, header: object) -> None:
    with pytest.raises(ConfigError, match=r"is no \.safetensors file"):
        read_checkpoint(str(safetensors(tmp_path / "model.safetensors", header)))


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for name, data in {"a.safetensors": b"12", "b.safetensors": b"\xff" * 20}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError):
            read_checkpoint(str(tmp_path / name))
    for text in ("/dev/zero.safetensors", str(tmp_path / "none.bin")):
        with pytest.raises(ConfigError):
            read_checkpoint(text)
    with pytest.raises(UsageError, match="is no size and no file of weights"):
        read_checkpoint("llama")


def test_the_command(run: Run) -> None:
    told = run("models", "--checkpoint", "42.1 GB")
    assert told.exit_code == 0
    assert "11.30B" in told.stdout
    rows = json.loads(run("models", "--checkpoint", "42.1GB", "--format", "json").stdout)["rows"]
    assert rows[0]["num_params"] == 10_525_000_000
    assert run("models", "gpt2", "--checkpoint", "1GB").exit_code == 2
