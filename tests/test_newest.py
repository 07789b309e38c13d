"""The weekly look at what moved says so, and says nothing where nothing did."""

import datetime
import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def newest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("newest", ROOT / "benchmarks" / "newest.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_types_and_defaults(newest: ModuleType) -> None:
    known = {"gpt2": {"defaults": {"n_layer": 12, "n_head": 12}}}
    same = {"gpt2": {"n_layer": 12}}
    assert list(newest.types_news(known, ["gpt2"], same)) == []
    moved = {"gpt2": {"n_layer": 13}, "gpt9": {}}
    assert list(newest.types_news(known, ["gpt2", "old"], moved)) == [
        "types, new: `gpt9`", "types, gone: `old`", "gpt2: `n_layer` is 13 now, and was 12",
    ]  # fmt: skip


def test_catalog(newest: ModuleType) -> None:
    catalog = json.loads((ROOT / "memplan" / "data" / "gpus.json").read_text(encoding="utf-8"))
    looked = datetime.date.fromisoformat(catalog["as_of"])
    fresh = list(newest.catalog_news(catalog, looked))
    old = list(newest.catalog_news(catalog, looked + datetime.timedelta(days=newest.OLD_DAYS + 1)))
    assert len(old) == len(fresh) + 1
    assert "are there new cards?" in old[0]


def test_recorded_runs(newest: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that is further off than the bar is bad news, unless it is named with what is known of why."""
    sent = tmp_path / "sent"
    sent.mkdir()
    for name in ("h100-phi-1-fp32.json", "h200-regnet.json"):
        shutil.copy(newest.SENT / name, sent)
    named = newest.SENT.with_name("sent_off.json")
    monkeypatch.setattr(newest, "SENT", sent)
    shutil.copy(named, tmp_path)
    line, good = newest.recorded()
    assert good, line
    assert "2 of 2 verdicts held" in line
    (tmp_path / "sent_off.json").write_text("{}", encoding="utf-8")
    assert not newest.recorded()[1]


def test_the_workflow_calls_it() -> None:
    text = (ROOT / ".github" / "workflows" / "newest.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert "make newest" in workflow["jobs"]["newest"]["steps"][-1]["run"]
    assert "benchmarks/newest.py" in (ROOT / "Makefile").read_text(encoding="utf-8")
