"""What a mask costs the memory-efficient kernel, beside what was measured of it."""

import json
from pathlib import Path
from statistics import median

import pytest

from memplan.compute.attended import ADDED_SHARES

FILE = Path(__file__).parent.parent / "measured" / "kernels.json"
BIASES = {False: "mask", True: "bias_b"}


def times() -> dict[tuple[object, ...], tuple[float, float]]:
    """Milliseconds forward and backward, by dtype, shape and what is added."""
    tables = json.loads(FILE.read_text(encoding="utf-8"))["tables"]
    rows = next(each["rows"] for each in tables if each["kind"] == "efficient")
    return {tuple(row[:-2]): (row[-2], row[-1]) for row in rows}


@pytest.mark.parametrize(("is_half", "is_trained"), ADDED_SHARES)
def test_shares(is_half: bool, is_trained: bool) -> None:
    found = times()
    shapes = [key[:-1] for key in found if key[0] == ("bf16" if is_half else "fp32")]
    for direction, share in enumerate(ADDED_SHARES[is_half, is_trained]):
        ratios = [
            found[*each, "none"][direction] / found[*each, BIASES[is_trained]][direction]
            for each in dict.fromkeys(shapes)
        ]
        assert share == pytest.approx(median(ratios), abs=0.01)
        assert max(ratios) - min(ratios) < 0.15
