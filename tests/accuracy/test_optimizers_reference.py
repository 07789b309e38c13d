"""Optimizers run by their own packages: what they keep, tensor by tensor, and what their steps hold.

Every record of ``optimizers.jsonl`` is one GPU, three steps, PyTorch's own CUDA build and the optimizer's
own package. The figures of the last step are compared as the allocator counts them, whole blocks.
"""

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from memplan.dtypes import DType
from memplan.sources.about_models.registry import builtin_config
from memplan.training.optimizers.script import ActKind, Stepped, states_of
from memplan.training.optimizers.table import chosen
from tests.accuracy.comparison import Comparison, read_records, remember
from tests.accuracy.optimizer_records import played, setup_of, stepped_tensors

RESERVED = "reserved_peak"
BARS = {
    "peak_forward": (1.5e-5, 3.3e-4),
    "bytes_before": (3.5e-5, 5e-4),
    "peak_backward": (1.4e-5, 3.8e-4),
    "peak_step": (1.9e-5, 5e-4),
    "peak": (1.4e-5, 3.3e-4),
    RESERVED: (0.0, 0.001),
}
"""95th percentile and worst of each figure: no more than five times what is reached."""

BYTES = {"float32": 4, "bfloat16": 2, "uint8": 1, "float8_e4m3fn": 1}


def truth_of(record: dict[str, Any]) -> dict[str, int]:
    """The last step's figures."""
    real = record["real"]
    names = ("bytes_before", "peak_forward", "peak_backward", "peak_step", "peak")
    found = {name: real[f"{name}_of_step"][-1] for name in names}
    return {**found, RESERVED: real[RESERVED]}


@pytest.mark.reference
def test_steps(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Comparison()
    for record in read_records(reference_dir / "optimizers.jsonl"):
        found.add(record, truth_of(record), played)
    with capsys.disabled():
        sys.stdout.write(f"\noptimizers.jsonl: {found.table()}\n")
    assert not found.refused
    assert found.errors.keys() == BARS.keys()
    for name, (p95, worst) in BARS.items():
        assert found.quantile(name, 0.95) <= p95, name
        assert found.worst(name)[0] <= worst, name
    remember(
        "Optimizers",
        {
            "held between steps": found.row("bytes_before"),
            "peak": found.row("peak"),
            "peak of the optimizer's step": found.row("peak_step"),
            "reserved": found.row(RESERVED),
        },
        update=pytestconfig.getoption("--update-accuracy"),
        points=found.points("peak"),
        found=[found],
    )


@pytest.mark.reference
def test_states_tensor_by_tensor(reference_dir: Path) -> None:
    num_tensors = 0
    for record in read_records(reference_dir / "optimizers.jsonl"):
        for key, truth in record["real"]["states"].items():
            shape, _, dtype = key.rpartition(" ")
            ours = _ours(record, json.loads(shape), dtype)
            assert _listed(truth) in ours, (record["id"], record["settings"]["opt"], key)
            num_tensors += 1
    assert num_tensors > 300


def _listed(truth: dict[str, Any]) -> dict[str, tuple[int, bool]]:
    """Each state's bytes, and whether torch counts it; counters on the CPU left out."""
    return {
        name: (prod(shape) * BYTES[dtype], place == "cuda")
        for name, (dtype, shape, place) in truth.items()
        if not (name == "step" and place == "cpu") and not _is_view(name, dtype)
    }


def _is_view(name: str, dtype: str = "float32") -> bool:
    """An fp32 projector is listed as the part of U or Vh that is used, and holds all of it."""
    return name.startswith("projector") and dtype == "float32"


def _ours(
    record: dict[str, Any], shape: list[int], dtype: str
) -> list[dict[str, tuple[int, bool]]]:
    setup = setup_of(record)
    row, options = chosen(setup.optimizer, setup.optimizer_options)
    found = []
    for tensor in stepped_tensors(record):
        if sorted(tensor.shape) != sorted(shape):
            continue
        own = DType.FP32 if dtype == "float32" else DType.BF16
        turned = Stepped(tuple(shape), own, tensor.role, tensor.module)
        acts = states_of(row, options, turned)
        views = own is DType.FP32 or setup.optimizer.value == "galore-adafactor"
        found.append(
            {
                act.name: (act.num_bytes, act.kind is not ActKind.MANAGED)
                for act in acts
                if not (views and act.name.startswith("projector"))
            }
        )
    return found


@pytest.mark.usefixtures("labels_are_ids")
def test_representative_records(checkout: Path) -> None:
    """Those of built-in models, for users without the reference folder."""
    data = json.loads((checkout / "tests" / "data" / "optimizers.json").read_text())
    assert len(data) >= 12
    for run in data:
        builtin = builtin_config(run["model"])
        assert builtin is not None
        record = {
            "config": dict(builtin[1]), "task": "causal",
            "settings": {"b": 1, "ckpt": True, "steps": 3, **run["settings"]},
        }  # fmt: skip
        found = played(record)
        for name, truth in run["figures"].items():
            assert found[name] == pytest.approx(truth, rel=0.0005), (run["settings"], name)
