"""``memplan compare --params``: a published layout of a table, without a model."""

import json
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]
ARTICLE = (
    "compare", "--params", "10B", "--hidden-size", "4096", "--layers", "48", "--heads", "32", "--gpus", "64",
    "--seq-len", "512", "--batch-size", "8",
)  # fmt: skip


def test_an_articles_table(run: Run) -> None:
    """medium.com/@maxshapp: 203.49, 85.37, 65.68, 45.99 GB without checkpointing."""
    told = run(*ARTICLE)
    assert told.exit_code == 0, told.stderr
    assert "ZeRO-0  160.00 (149.01)   203.49 (189.51)" in told.stdout
    rows = json.loads(run(*ARTICLE, "--formulas", "--format", "json").stdout)["rows"]
    assert [(row["zero_stage"], row["checkpointing"]) for row in rows] == [
        (stage, kept) for stage in range(4) for kept in ("none", "full")
    ]
    # The article rounds the activations first.
    totals = [row["total_bytes"] / 10**9 for row in rows[::2]]
    assert totals == pytest.approx([203.49, 85.37, 65.68, 45.99], abs=0.01)
    states = [16 * 10**10, 4 * 10**10 + 12 * 10**10 // 64, 2 * 10**10 + 14 * 10**10 // 64]
    assert [row["states_bytes"] for row in rows[:6:2]] == states
    sbh = 512 * 8 * 4096
    layer = 34 * sbh + 5 * 32 * 512**2 * 8
    assert {row["activations_bytes"] for row in rows[::2]} == {48 * layer}
    assert {row["activations_bytes"] for row in rows[1::2]} == {48 * 2 * sbh + layer}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--params", "10B"), "its table needs --hidden-size and --layers and --heads too"),
        (
            ("--params", "ten", "--hidden-size", "1", "--layers", "1", "--heads", "1"),
            "--params: 'ten' is not",
        ),
        (("gpt2", "--hidden-size", "64"), "means nothing without --params"),
        (("gpt2", "--params", "10B"), "--params makes no use of MODEL"),
        (("--params", "10B", "--zero", "3"), "--params makes no use of --zero"),
        ((), "name a MODEL"),
    ],
)
def test_what_does_not_fit_together(run: Run, options: tuple[str, ...], words: str) -> None:
    refused = run("compare", *options)
    assert refused.exit_code == 2
    assert words in refused.stderr
