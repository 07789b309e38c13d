"""Pipelines of torch: what is in flight and what a rank holds, against every record of them."""

import json
import sys
from pathlib import Path

import pytest

from memplan.training.splitting.parallelism import PipelineSchedule
from memplan.training.splitting.schedules import PassKind, most_in_flight, rank_passes
from tests.accuracy.comparison import Comparison, read_records, remember
from tests.accuracy.pipeline_records import (
    SCHEDULES,
    predict_composed,
    predict_deepspeed,
    predict_own,
    predict_pipeline,
)

BARS = {"bytes_before": 1.8e-6, "peak_fwd_bwd": 2.2e-5, "peak_step": 1.4e-6}
OWN_BARS = {"bytes_before": 0.00001, "peak_fwd_bwd": 0.0002, "peak_step": 0.00001}
"""The worst relative error; far below what is asked for (peaks 1.5 %)."""


@pytest.mark.reference
def test_every_count(reference_dir: Path) -> None:
    num_records = 0
    for record in read_records(reference_dir / "pipeline_in_flight.jsonl"):
        settings, figures = record["settings"], record["figures"]
        passes = rank_passes(
            PipelineSchedule(SCHEDULES[settings["schedule"]]),
            num_ranks=settings["pp"],
            num_virtual=settings["stages_per_rank"],
            num_micro_batches=settings["microbatches"],
            rank=settings["rank"],
        )
        found = most_in_flight(passes)
        num_records += 1
        if "peak_in_flight" in figures:
            assert found.until_weight == figures["peak_in_flight"], settings
            continue
        counts = {kind: sum(each.kind is kind for each in passes) for kind in PassKind}
        assert {
            "peak_stage_microbatches_until_input_backward": found.until_input,
            "peak_stage_microbatches_until_weight_backward": found.until_weight,
            "peak_pending_weight_backwards": found.waiting,
            "per_stage_peak": {str(stage): count for stage, count in found.by_stage},
            "n_forward": counts[PassKind.FORWARD],
            "n_full_backward": counts[PassKind.BACKWARD],
            "n_input_backward": counts[PassKind.INPUT],
            "n_weight_backward": counts[PassKind.WEIGHT],
            "peak_in_flight_in_units_of_model_over_pp": found.until_weight
            / settings["stages_per_rank"],
        } == figures, settings
    assert num_records > 400


@pytest.mark.reference
def test_every_rank(
    reference_dir: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = Comparison()
    for record in read_records(reference_dir / "pipeline_memory.jsonl"):
        comparison.add(record, record["bytes"], predict_pipeline)
    with capsys.disabled():
        sys.stdout.write(f"\npipeline_memory.jsonl: {comparison.table()}\n")
    assert not comparison.refused
    for figure, worst in BARS.items():
        assert comparison.worst(figure)[0] <= worst, comparison.worst(figure)
    remember(
        "Pipeline parallel",
        {figure: comparison.row(figure) for figure in ("bytes_before", "peak_fwd_bwd")},
        update=pytestconfig.getoption("--update-accuracy"),
        points=comparison.points("peak_fwd_bwd"),
        found=[comparison],
    )


def test_own_records(checkout: Path) -> None:
    """Fresh cases: every schedule, uneven layers, checkpointing, other models and optimizers, FSDP2."""
    records = json.loads((checkout / "tests" / "data" / "pipeline.json").read_text())["memory"]
    for record in records:
        predicted = predict_own(record)
        for figure, truth in record["bytes"].items():
            own = pytest.approx(truth, rel=OWN_BARS[figure])
            assert predicted[figure] == own, (record["settings"], figure)


def test_composed_ranks(checkout: Path) -> None:
    """DDP, tensor parallelism with and without split sequences, hybrid FSDP2, and both beside a pipeline."""
    records = json.loads((checkout / "tests" / "data" / "pipeline.json").read_text())["composed"]
    for record in records:
        predicted = predict_composed(record)
        for figure, truth in record["bytes"].items():
            near = pytest.approx(truth, rel=0.0001)
            assert predicted[figure] == near, (record["settings"], figure)


def test_deepspeed_ranks(checkout: Path) -> None:
    """DeepSpeed 0.19.8's PipelineEngine over stub kernels, a rank at a time: ZeRO 0 and 1, all precisions,
    tied weights, each way to deal layers. The records' rotary tables lie in a variable between passes."""
    records = json.loads((checkout / "tests" / "data" / "deepspeed_pipeline.json").read_text())
    for record in records:
        predicted = predict_deepspeed(record)
        for figure, truth in record["bytes"].items():
            bar = 0.005 if record["settings"]["ckpt"] else 0.002
            assert predicted[figure] == pytest.approx(truth, rel=bar), (record["settings"], figure)
