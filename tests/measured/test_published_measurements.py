"""Memory that others measured on GPUs (``published.yaml``), and what memplan says of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from memplan.estimator import Estimate, estimate
from memplan.memory.runtime import RESERVED_OVER_ALLOCATED
from memplan.sources.models import load_model
from memplan.sources.setup_file import setup_from_mapping
from tests.accuracy.comparison import Comparison, remember

FILE = Path(__file__).with_name("published.yaml")
MEASUREMENTS = yaml.safe_load(FILE.read_text(encoding="utf-8"))["measurements"]
SAVE_PHASE = "save"


def counted(kind: str) -> list[dict[str, Any]]:
    """The measurements of one counter."""
    return [each for each in MEASUREMENTS if each["counted"] == kind]


def estimate_of(measurement: dict[str, Any]) -> Estimate:
    """What memplan says of the same run."""
    setup = setup_from_mapping(measurement["setup"], source=FILE.name)
    return estimate(load_model(measurement["model"]), setup)


def fullest_bytes(measurement: dict[str, Any]) -> int:
    """Loading and training; these runs save no checkpoint."""
    phases = estimate_of(measurement).phases.items()
    return max(phase.peak_bytes for name, phase in phases if name != SAVE_PHASE)


def reserved_ratio(measurement: dict[str, Any]) -> float:
    """Measured reserved memory over the allocated peak that memplan counts."""
    ratio: float = measurement["measured_bytes"] / fullest_bytes(measurement)
    return ratio


def is_in_range(ratio: float) -> bool:
    """Never below what is allocated, nor above the range that the verdict uses."""
    return 1 <= ratio <= RESERVED_OVER_ALLOCATED[1]


def ids(rows: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(each, id=each["id"]) for each in rows]


def test_every_measurement_says_where() -> None:
    assert len({each["id"] for each in MEASUREMENTS}) == len(MEASUREMENTS)
    assert all(each["where"] and each["gpu"] for each in MEASUREMENTS)
    assert {each["counted"] for each in MEASUREMENTS} == {"allocated", "reserved"}


@pytest.mark.parametrize("measurement", ids(counted("allocated")))
def test_allocated(measurement: dict[str, Any]) -> None:
    peak_bytes = estimate_of(measurement).peak_bytes
    assert peak_bytes == pytest.approx(measurement["measured_bytes"], rel=0.025)


@pytest.mark.parametrize("measurement", ids(counted("reserved")))
def test_reserved(measurement: dict[str, Any]) -> None:
    """In the range, or named with what is known of why not: a figure that moves in says so."""
    ratio = reserved_ratio(measurement)
    assert is_in_range(ratio) is ("outside" not in measurement), f"{ratio:.4f}"
    assert ratio == pytest.approx(1.18, abs=0.2)


def test_bytes_of_each_further_token() -> None:
    """From 64k to 256k tokens the slope is the step's own: what is reserved at the start drops out.

    The page's own fit over all lengths is 0.00043 GiB a token.
    """
    long = {each["setup"]["seq_len"]: each for each in MEASUREMENTS if "stas-z3" in each["id"]}
    short, full = long[65536], long[262144]
    measured = full["measured_bytes"] - short["measured_bytes"]
    assert fullest_bytes(full) - fullest_bytes(short) == pytest.approx(measured, rel=0.04)


def test_the_readme_shows_them(pytestconfig: pytest.Config) -> None:
    comparison = Comparison()
    for each in counted("allocated"):
        truth = {"peak": each["measured_bytes"]}
        comparison.add(each, truth, lambda row: {"peak": estimate_of(row).peak_bytes})
    reserved = counted("reserved")
    inside = sum(is_in_range(reserved_ratio(each)) for each in reserved)
    rows = {
        "peak": comparison.row("peak"),
        "reserved": {"records": len(reserved), "inside": inside},
    }
    remember("measured on GPUs", rows, update=pytestconfig.getoption("--update-accuracy"))
