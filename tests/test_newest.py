"""The weekly look at what moved says so, and says nothing where nothing did."""

import datetime
import importlib.util
import json
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


def test_recorded_runs_hold(newest: ModuleType) -> None:
    line, good = newest.recorded()
    assert good, line
    assert "verdicts held" in line


def test_the_workflow_calls_it() -> None:
    text = (ROOT / ".github" / "workflows" / "newest.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert "make newest" in workflow["jobs"]["newest"]["steps"][-1]["run"]
    assert "benchmarks/newest.py" in (ROOT / "Makefile").read_text(encoding="utf-8")
