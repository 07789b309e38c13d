"""What the page's worker calls: files that a command writes are handed over, whatever their place and kind."""

import base64
import os
import pickle
from pathlib import Path

import pytest

from docs.browser import answering
from memplan.cli.output import terminal


@pytest.fixture(autouse=True)
def _page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "HF_HUB_OFFLINE", "NO_COLOR", "TERM", "FORCE_COLOR"):
        monkeypatch.setitem(os.environ, name, os.environ.get(name, ""))
    monkeypatch.setattr(answering, "FOLDER", tmp_path / "question")


@pytest.mark.parametrize("path", ["report.html", "x/report.html", "/nowhere/at all/report.html"])
def test_a_page_is_handed_over_wherever_it_was_to_go(path: str):
    code, out, err, texts, others = answering.answer(
        ["explain", "gpt2", "--report", path], {}, columns=80, colour=False
    )
    assert (code, err, others) == (0, "", {})
    assert f"Wrote {path}" in out
    assert list(texts) == [path]
    assert texts[path].startswith("<!DOCTYPE html>")
    assert terminal.taken is None


def test_a_file_that_is_no_text_is_handed_over():
    *_, texts, others = answering.answer(
        ["explain", "gpt2", "--snapshot", "run.pickle"], {}, columns=80, colour=False
    )
    assert texts == {}
    found = pickle.loads(base64.b64decode(others["run.pickle"]))
    assert found["segments"]
