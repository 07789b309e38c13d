"""The peak by lifetime: the parts are the whole, in every format."""

import json
from collections.abc import Callable
from typing import Any

from memplan.memory.account import ComponentKind, Lifetime
from memplan.report.estimates.lifetimes import HELD, LIFETIME_MEANINGS, LOWERED_BY

JOB = ("estimate", "gpt2", "--gpu", "h100", "--lifetimes")


def test_every_component_has_one_and_each_is_lowered_by_something() -> None:
    assert {kind.lifetime for kind in ComponentKind} == set(Lifetime) == set(HELD)
    assert set(LOWERED_BY) == set(Lifetime)


def test_rows_add_up_to_the_peak(run: Callable[..., Any]) -> None:
    (row,) = json.loads(run(*JOB, "--format", "json").stdout)["rows"]
    assert sum(row[name] for name in LIFETIME_MEANINGS) == row["peak_bytes"]


def test_tables_say_what_lowers_each(run: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for words in (JOB, (*JOB, "--gpus", "2"), (*JOB, "--format", "markdown")):
        found = run(*words).stdout
        assert all(each.value in found for each in Lifetime)
    assert "recomputing, offloading" in run(*JOB).stdout
