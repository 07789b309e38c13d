"""Memory that others measured on GPUs (``published.yaml``), and what memplan says of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from memplan.estimator import Estimate, estimate
from memplan.sources.models import load_model
from memplan.sources.setup_file import setup_from_mapping
from tests.accuracy.comparison import remember

FILE = Path(__file__).with_name("published.yaml")
MEASUREMENTS = yaml.safe_load(FILE.read_text(encoding="utf-8"))["measurements"]
SAVE_PHASE = "save"


def counted(kind: str) -> list[dict[str, Any]]:
    """The measurements of one counter."""
    return [each for each in MEASUREMENTS if each["counted"] == kind]


def estimate_of(measurement: dict[str, Any]) -> Estimate:
    """What memplan says of the same run, with what was inferred of it."""
    setup = setup_from_mapping(measurement["setup"], source=FILE.name)
    return estimate(load_model(measurement["model"]), setup)


def fullest_bytes(measurement: dict[str, Any]) -> int:
    """Loading and training; these runs save no checkpoint."""
    phases = estimate_of(measurement).phases.items()
    return max(phase.peak_bytes for name, phase in phases if name != SAVE_PHASE)


def as_stated(measurement: dict[str, Any]) -> dict[str, Any]:
    """The same run before anything was inferred from a comparison."""
    return {**measurement, "setup": measurement["setup"] | measurement.get("as_stated", {})}


def allocated_error(measurement: dict[str, Any]) -> float:
    """How far the allocated peak is from the measured one, as a share of it."""
    measured: int = measurement["measured_bytes"]
    return abs(estimate_of(measurement).peak_bytes - measured) / measured


def reserved_ratio(measurement: dict[str, Any]) -> float:
    """Measured reserved memory over what the replayed run reserves."""
    reserved = estimate_of(measurement).reserved_bytes
    assert reserved is not None
    ratio: float = measurement["measured_bytes"] / reserved
    return ratio


CLOSE = 0.08
"""How far off a replay may be without a reason."""


def is_close(ratio: float) -> bool:
    """Whether the replay agrees, but for what the sources leave open."""
    return abs(ratio - 1) <= CLOSE


def ids(rows: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(each, id=each["id"]) for each in rows]


def test_every_measurement_says_where() -> None:
    assert len({each["id"] for each in MEASUREMENTS}) == len(MEASUREMENTS)
    assert all(each["where"] and each["gpu"] for each in MEASUREMENTS)
    assert {each["counted"] for each in MEASUREMENTS} == {"allocated", "reserved"}
    assert all(("inferred" in each) is ("as_stated" in each) for each in MEASUREMENTS)


@pytest.mark.parametrize("measurement", ids(counted("allocated")))
def test_allocated(measurement: dict[str, Any]) -> None:
    """Explained to 2.5 %, each with a setting that was inferred."""
    assert allocated_error(measurement) <= 0.025


@pytest.mark.parametrize("measurement", ids(counted("reserved")))
def test_reserved(measurement: dict[str, Any]) -> None:
    """Within 8 % of the replay, or named with its ratio and what is known of why."""
    ratio = reserved_ratio(measurement)
    assert is_close(ratio) is ("outside" not in measurement), f"{ratio:.4f}"
    if "outside" in measurement:
        assert ratio == pytest.approx(measurement["outside"]["ratio"], abs=0.005)
        assert measurement["outside"]["why"]


def test_bytes_of_each_further_token() -> None:
    """From 64k to 256k tokens the slope is the step's own: what is reserved at the start drops out.

    The page's own fit over all lengths is 0.00043 GiB a token.
    """
    long = {each["setup"]["seq_len"]: each for each in MEASUREMENTS if "stas-z3-h200" in each["id"]}
    short, full = long[65536], long[262144]
    measured = full["measured_bytes"] - short["measured_bytes"]
    assert fullest_bytes(full) - fullest_bytes(short) == pytest.approx(measured, rel=0.04)


def test_the_readme_shows_them(pytestconfig: pytest.Config) -> None:
    """Both answers: with the settings that were inferred, and with those of the sources alone."""
    allocated, reserved = counted("allocated"), counted("reserved")
    stated = [allocated_error(as_stated(each)) for each in allocated]
    rows = {
        "allocated": {
            "records": len(allocated),
            "inferred": sum("inferred" in each for each in allocated),
            "worst": round(max(allocated_error(each) for each in allocated), 4),
            "least_as_stated": round(min(stated), 4),
            "worst_as_stated": round(max(stated), 4),
        },
        "reserved": {
            "records": len(reserved),
            "inside": sum(is_close(reserved_ratio(each)) for each in reserved),
            "inside_as_stated": sum(is_close(reserved_ratio(as_stated(e))) for e in reserved),
            "close": sum(abs(reserved_ratio(each) - 1) <= 0.03 for each in reserved),
        },
    }
    remember("measured on GPUs", rows, update=pytestconfig.getoption("--update-accuracy"))
