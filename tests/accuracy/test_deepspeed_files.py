"""Others' real ``ds_config`` files: each answers or is refused for a true reason; truths agree."""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError
from memplan.estimator.recording import record_and_walk, tape_options
from memplan.memory.accounts import rank_account
from memplan.memory.rank import RankInput
from memplan.sources.deepspeed_config import deepspeed_fields
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

RANKS = 8
"""Of every record with a truth: what is held after initialisation gives it away."""
TOLERANCE = 0.006

REFUSED = {
    "axolotl/zero2_torch_compile.json": "compile.disable: DeepSpeed has no such key",
    **{
        f"DeepSpeedExamples/ds_config_{name}.json": "compression_training: trains a compressed"
        for name in (
            "W1A8_Qgroup1_fp32", "W1A8_Qgroup64_fp16", "W1or2A8_Qgroup64_fp16",
            "W8A8_Qgroup48_fp32", "W8A8_Qgroup64_fp32",
        )
    },
}  # fmt: skip
"""Files that are refused, and why: torch.compile by keys of an older form, compression."""


def records(reference_dir: Path) -> list[dict[str, Any]]:
    lines = (reference_dir / "ds_configs.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def ranks_of(config: dict[str, Any]) -> int:
    """As many as the file's batch sizes ask for."""
    whole = config.get("train_batch_size")
    return whole // config["train_micro_batch_size_per_gpu"] if isinstance(whole, int) else RANKS


@pytest.mark.reference
def test_every_file_answers_or_is_refused_for_its_reason(reference_dir: Path) -> None:
    refused = {}
    for record in records(reference_dir):
        whole = record["ds_config"].get("train_batch_size")
        ranks = (
            whole // record["ds_config"]["train_micro_batch_size_per_gpu"]
            if isinstance(whole, int)
            else RANKS
        )
        try:
            read = deepspeed_fields(record["ds_config"], {"num_gpus": ranks}, source="ds.json")
        except ConfigError as error:
            refused[record["file"]] = str(error)
        else:
            assert TrainingSetup(**{"num_gpus": ranks, **read.fields}).engine is not None  # type: ignore[arg-type]
    assert refused.keys() == REFUSED.keys()
    for name, message in refused.items():
        assert REFUSED[name] in message


def peaks_of(record: dict[str, Any]) -> dict[str, int]:
    """The figures of the first rank, as the record's job was run: bf16, one sequence, no dropout."""
    truth = record["truth"]
    given = {"num_gpus": RANKS, "micro_batch_size": 1, "gradient_accumulation_steps": 1}
    given["precision"] = "bf16-master"
    read = deepspeed_fields(record["ds_config"], given, source=record["file"])
    options = dict(read.fields["engine_options"])  # type: ignore[call-overload]
    options["zero_init"] = read.fields["zero_stage"] == 3
    fields = {**given, **read.fields, "engine_options": options, "seq_len": truth["s"]}
    setup = TrainingSetup(**fields, kernel_scratch=False).resolve()
    tape, passes = record_and_walk(
        load_model(truth["config"], "causal-lm"), tape_options(setup, None)
    )
    account = rank_account(RankInput(tape=tape, passes=passes, setup=setup), rank=0)
    phases = {phase.name: phase.peak_bytes for phase in account.phases}
    return {
        "before": account.held_bytes,
        "peak_init": phases["load"],
        "peak_forward": phases["forward"],
        "peak_backward": phases["backward"],
        "peak_step": phases["step"],
        "peak": account.peak.peak_bytes,
        "cpu_after_step": account.host.held_bytes,
        "cpu_peak_init": account.host.load_bytes,
    }


FILES_RUN = (
    "LLaMA-Factory/ds_z0_config.json", "LLaMA-Factory/ds_z2_config.json",
    "LLaMA-Factory/ds_z2_offload_config.json", "LLaMA-Factory/ds_z3_offload_config.json",
    "LLaVA/zero3_offload.json", "axolotl/zero2.json", "axolotl/zero3_bf16_cpuoffload_params.json",
)  # fmt: skip


@pytest.mark.reference
@pytest.mark.parametrize("name", FILES_RUN)
def test_files_that_were_run_agree(reference_dir: Path, name: str) -> None:
    (record,) = [each for each in records(reference_dir) if each["file"] == name]
    measured = record["truth"]["bytes"]
    for figure, found in peaks_of(record).items():
        assert found == pytest.approx(measured[figure], rel=TOLERANCE), figure


@pytest.mark.reference
def test_these_are_all_that_were_run(reference_dir: Path) -> None:
    run = [each["file"] for each in records(reference_dir) if "bytes" in each.get("truth", {})]
    assert sorted(run) == sorted(FILES_RUN)
