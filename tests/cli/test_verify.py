"""``memplan verify`` where torch is not needed: recorded runs, refusals, and what is said without it."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

SENT = Path(__file__).parent.parent / "measured" / "sent"


def test_recorded_runs(run: Any, tmp_path: Path) -> None:
    for name in ("h100-phi-1-fp32", "h100-pythia-70m-bf16", "h200-llama-3.2-1b-zero3"):
        (tmp_path / f"{name}.json").write_text((SENT / f"{name}.json").read_text(encoding="utf-8"))
    done = run("verify", "--replay", str(tmp_path), "--within", "1%")
    assert done.exit_code == 0, done.stderr
    assert "measured on NVIDIA H100 80GB HBM3" in done.stdout
    assert re.search(r"a step: 1[23]\d ms predicted \(.* to .*\), 212 ms measured", done.stdout)
    assert "beside the allocator (context, NCCL)" in done.stdout
    assert "verdicts held" in done.stdout.splitlines()[-1]


def test_rows(run: Any) -> None:
    done = run("verify", "--replay", str(SENT / "h100-phi-1-fp32.json"), "--format", "json")
    rows = json.loads(done.stdout)["rows"]
    backward = next(row for row in rows if (row["part"], row["what"]) == ("backward", "allocated"))
    assert backward["predicted"] == pytest.approx(backward["measured"], rel=2e-4)
    assert {row["what"] for row in rows} >= {"parameters", "reserved", "context", "needed"}


def test_a_bar_that_is_missed(run: Any, tmp_path: Path) -> None:
    values = json.loads((SENT / "h100-phi-1-fp32.json").read_text(encoding="utf-8"))
    values["parts"]["backward"]["allocated_bytes"] *= 2
    path = tmp_path / "a.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    done = run("verify", "--replay", str(path), "--within", "1%")
    assert done.exit_code == 5
    assert "--within 1%: the worst peak is" in done.stderr


def test_a_death_that_was_not_said(run: Any, tmp_path: Path) -> None:
    """Running out of memory is a result, and the verdict stands beside it."""
    values = json.loads((SENT / "h100-phi-1-fp32.json").read_text(encoding="utf-8"))
    values["death"] = {"part": "backward", "message": "CUDA out of memory."}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    done = run("verify", "--replay", str(path))
    assert done.exit_code == 0
    assert "out of memory in backward: CUDA out of memory.; memplan says fits" in done.stdout
    path.write_text(json.dumps({**values, "context_bytes": 50 << 30}), encoding="utf-8")
    crowded = run("verify", "--replay", str(path))
    assert "WRONG" in done.stdout
    assert "another one holds it" in crowded.stdout
    assert "WRONG" not in crowded.stdout
    values["gpu_memory_bytes"] //= 4
    path.write_text(json.dumps(values), encoding="utf-8")
    done = run("verify", "--replay", str(path))
    assert "memplan says OOM" in done.stdout
    assert "WRONG" not in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ((), 2, "name a MODEL"),
        (("gtp2",), 2, "nothing is downloaded here"),
        (("meta-llama/Llama-9-1B",), 2, "nothing is downloaded here"),
        (("gpt2", "--freeze", "embeddings"), 3, "--freeze: verify cannot run this yet"),
        (("gpt2", "--gpus", "4", "--engine", "fsdp", "--tp", "2"), 3, "--tensor-parallel: verify"),
        (("flux.1-dev",), 3, "this is one of diffusers'"),
        (("gpt2", "--replay", "a.json"), 2, "--replay makes no use of MODEL"),
        (("--replay", "no.json"), 3, "no.json"),
    ],
)
def test_refusals(run: Any, words: tuple[str, ...], code: int, told: str) -> None:
    done = run("verify", *words)
    assert done.exit_code == code
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_torch(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    missing = ("torch", "transformers")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else real(name)
    )
    done = run("verify", "gpt2")
    assert done.exit_code == 2
    assert "pip install memplan[verify]" in done.stderr
    assert done.stderr.count("\n") == 1
