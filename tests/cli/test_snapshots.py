"""``memplan explain --snapshot`` and ``--against``."""

import csv
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parent.parent / "data" / "snapshots" / "llama-1-layer.pickle"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000,
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "tie_word_embeddings": False, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


def recorded_setup(model: str) -> tuple[str, ...]:
    """The recording's own setup."""
    return ("explain", model, "--batch-size", "2", "--seq-len", "128", "--precision", "bf16")


def half_the_batch(model: str) -> tuple[str, ...]:
    """Another setup than the recording's: both sides hold blocks that the other has not."""
    return ("explain", model, "--batch-size", "1", "--seq-len", "128", "--precision", "bf16")


def test_a_snapshot_is_written(run: Any, tmp_path: Path):
    file = tmp_path / "out.pickle"
    done = run("explain", "gpt2", "--seq-len", "64", "--snapshot", str(file))
    assert done.exit_code == 0, done.stderr
    assert "https://pytorch.org/memory_viz" in done.stdout
    made = pickle.loads(file.read_bytes())
    assert set(made) == {"segments", "device_traces", "allocator_settings", "external_annotations"}


def test_a_prediction_against_itself_does_not_part(run: Any, tmp_path: Path):
    file = str(tmp_path / "out.pickle")
    same = ("explain", "gpt2", "--seq-len", "64")
    assert run(*same, "--snapshot", file).exit_code == 0
    done = run(*same, "--against", file)
    assert done.exit_code == 0, done.stderr
    assert "Both sides hold the same blocks" in done.stdout


def test_a_prediction_against_a_real_run(run: Any, model: str):
    """Of 27 MiB all but three small blocks are foreseen, and the memory reserved to the byte."""
    done = run(*recorded_setup(model), "--against", str(RECORDED), "--format", "json")
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    peaks = {row["name"]: row for row in rows if row["part"] in ("peak", "phase")}
    assert set(peaks) == {"allocated", "reserved", "load", "forward", "backward", "step"}
    assert peaks["reserved"]["predicted_bytes"] == peaks["reserved"]["recorded_bytes"]
    for row in peaks.values():
        assert row["predicted_bytes"] == pytest.approx(row["recorded_bytes"], abs=8192)
    lone = [row for row in rows if row["part"] == "only"]
    assert max(row["block_bytes"] for row in lone) <= 4096


def test_another_setup_parts_where_it_must(run: Any, model: str):
    """Predicted for half the batch: the missing logits and activations are named with their lines."""
    done = run(*half_the_batch(model), "--against", str(RECORDED), "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    lone = [row for row in rows if row["part"] == "only"]
    assert any("modeling_llama.py" in row["name"] for row in lone)
    assert any(row["name"].startswith("head: ") for row in lone)


def test_the_table_shows_places_as_they_are(run: Any, model: str):
    """Of the recording's own setup only what is predicted parts: the script hands its ids over as labels too."""
    done = run(*recorded_setup(model), "--against", str(RECORDED))
    assert "[inputs]" in done.stdout
    done = run(*half_the_batch(model), "--against", str(RECORDED))
    assert "train.py:68 to_device" in done.stdout
    assert "in backward" in done.stdout


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (("--against", "none.pickle"), 3, "none.pickle: there is no such file"),
        (("--against", "code.pickle"), 3, "code.pickle: asks for STACK_GLOBAL at byte"),
        (("--against", "list.pickle"), 3, "expected a memory snapshot"),
        (("--against", "a", "--snapshot", "b"), 2, "--snapshot makes no use of --against"),
        (("--timeline", "--snapshot", "b"), 2, "--snapshot makes no use of --timeline"),
        (("--snapshot", "b", "--format", "json"), 2, "--snapshot makes no use of --format"),
        (("--snapshot", "none/out.pickle"), 3, "--snapshot: none/out.pickle cannot be written"),
        (("--operation", "mul", "--snapshot", "b"), 2, "--operation makes no use of"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_in_one_line(
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    exit_code: int,
    message: str,
):
    monkeypatch.chdir(tmp_path)
    Path("code.pickle").write_bytes(pickle.dumps({"a": Path}))
    Path("list.pickle").write_bytes(pickle.dumps([1]))
    named = () if "--operation" in options else ("gpt2",)
    done = run("explain", *named, *options)
    assert done.exit_code == exit_code
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not Path("b").exists()
