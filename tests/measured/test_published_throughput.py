"""Published throughput against memplan's: llm-foundry, fms-acceleration, torchtitan, prime-rl, Megatron-LM, NeMo, DeepSpeed."""

import sys
from pathlib import Path

import pytest

from tests.accuracy.comparison import read_records, remember
from tests.measured.throughput import Comparison, predicted

ROWS = Path(__file__).parent.parent / "data" / "published_throughput.jsonl"
SAMPLE = 7
"""Of so many rows one is looked at in every run; all of them with ``--update-accuracy``."""
MEDIAN, WITHIN, SHARE, ORDER = 0.12, 0.30, 0.90, 0.90
SOURCES = {
    "lf-": "llm-foundry, MPT 125M-70B",
    "fms-": "fms-acceleration, HF Trainer",
    "tt-": "torchtitan, Llama 8B",
    "prime-": "prime-rl, Qwen3 and GLM",
    "mg-": "Megatron-LM, GPT 1.7B-1T",
    "zero3-": "DeepSpeed 2021-22, ZeRO-3, GPT 175B-2T",
    "nemo-dense-": "NeMo, Llama and Qwen",
    "nemo-moe-": "NeMo, mixtures whose tokens DeepEP sends",
    "peft-": "PEFT's comparison, Llama 3B",
}


@pytest.fixture(scope="module")
def comparison(pytestconfig: pytest.Config) -> Comparison:
    rows = list(read_records(ROWS))
    is_whole = pytestconfig.getoption("--update-accuracy")
    return predicted(rows if is_whole else rows[::SAMPLE])


def test_rates_are_close(comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{comparison.table()}\n")
        for name, why in comparison.refused.items():
            sys.stdout.write(f"refused {name}: {why}\n")
    assert comparison.median <= MEDIAN
    assert comparison.share_within(WITHIN) >= SHARE


def test_setups_stand_in_order(comparison: Comparison) -> None:
    count, right = comparison.order()
    assert right / count >= ORDER


def test_the_figures_of_the_readme(comparison: Comparison, pytestconfig: pytest.Config) -> None:
    """Rewritten with all rows alone; a sample's are others."""
    if not pytestconfig.getoption("--update-accuracy"):
        pytest.skip("the sample says nothing of all rows: `make accuracy` looks at all")
    remember(
        "published throughput",
        {
            words: _row(comparison.errors(start), comparison, start)
            for start, words in SOURCES.items()
        },
        update=True,
    )


def _row(errors: list[float], comparison: Comparison, start: str) -> dict[str, float]:
    ordered = sorted(errors)
    refused = sum(name.startswith(start) for name in comparison.refused)
    return {
        "records": len(ordered),
        "of": len(ordered) + refused,
        "median": round(ordered[len(ordered) // 2], 4),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 4),
        "worst": round(ordered[-1], 4),
    }
