"""A step that was measured, and what it says of other setups; parts of a step that add up to it."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

import memplan
from memplan.cli.output.calibrating import lines_of
from memplan.compute.host import HostSpeed
from memplan.compute.rates import rates_of
from memplan.errors import ConfigError, InputError, MemplanError, UsageError
from memplan.estimator.job import Job
from memplan.estimator.time.calibration import Calibration, Part
from memplan.estimator.time.site import USUAL_SITE, Site
from memplan.estimator.time.step_time import StepTime, calibrated, cases_for, time_of
from memplan.hardware.network import network_of
from memplan.options.run_times import TIME_OPTIONS, time_question
from memplan.sources.cards.calibration_file import calibration_text, read_calibration
from memplan.training.splitting.exchange import ExchangeKind
from memplan.verify.node_timing import (
    Timed,
    adam_said,
    calibration_of,
    collective_said,
    copied_said,
    moved_said,
    product_said,
)

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192,
    "max_position_embeddings": 8192,
}  # fmt: skip
SETUPS: dict[str, dict[str, object]] = {
    "one GPU, short": {"seq_len": 128},
    "accumulated": {"seq_len": 512, "gradient_accumulation_steps": 8, "checkpointing": "full"},
    "FSDP": {"seq_len": 2048, "num_gpus": 16, "engine": "fsdp", "gradient_accumulation_steps": 5},
    "ZeRO-2, offloaded": {
        "seq_len": 512, "num_gpus": 8, "zero_stage": 2, "offload_optimizer": "cpu",
        "gradient_accumulation_steps": 4, "engine_options": {"overlap_comm": True},
    },
    "ZeRO-3, offloaded": {
        "seq_len": 512, "num_gpus": 8, "zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu",
    },
    "split": {"seq_len": 2048, "num_gpus": 8, "engine": "megatron", "tensor_parallel": 4},
    "1F1B": {
        "seq_len": 512, "num_gpus": 8, "engine": "megatron", "pipeline_parallel": 4,
        "gradient_accumulation_steps": 8,
    },
    "virtual stages": {
        "seq_len": 2048, "num_gpus": 16, "engine": "megatron", "pipeline_parallel": 4, "virtual_stages": 2,
        "pipeline_schedule": "interleaved-1f1b", "gradient_accumulation_steps": 8,
        "engine_options": {
            "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True,
        },
    },
}  # fmt: skip


NAMES = {each.parameter: each.default for each in TIME_OPTIONS}


def job_of(name: str, gpu: str = "h100") -> Job:
    model = memplan.load_model(CONFIG, "causal-lm")
    return Job.of(model, memplan.TrainingSetup(**SETUPS[name]), memplan.load_gpu(gpu))


def time_of_setup(name: str, site: Site = USUAL_SITE) -> StepTime:
    return time_of(job_of(name), site=site)


@pytest.mark.parametrize("name", SETUPS)
def test_the_parts_of_a_step_add_up_to_it(name: str) -> None:
    found = time_of_setup(name)
    assert sum(each.seconds for each in found.shares) == pytest.approx(found.expected_s)
    assert all(each.seconds > 0 for each in found.shares)
    assert found.low_s < found.expected_s < found.high_s


def test_parts_and_paths_of_drawn_setups() -> None:
    """Of 30 setups that a seed draws, those that are refused apart: parts sum to the step, its path has no gaps, its range is in order."""
    draw = Random(32)
    model, told = memplan.load_model(CONFIG, "causal-lm"), 0
    while told < 30:
        settings: dict[str, Any] = {
            "engine": draw.choice(["ddp", "deepspeed", "fsdp", "fsdp1", "megatron"]),
            "num_gpus": draw.choice([1, 2, 8, 64]), "seq_len": draw.choice([64, 512, 2048]),
            "gradient_accumulation_steps": draw.choice([1, 3, 8]), "checkpointing": draw.choice(["none", "full"]),
        }  # fmt: skip
        if settings["engine"] == "deepspeed":
            settings |= {
                "zero_stage": draw.choice([1, 2, 3]),
                "offload_optimizer": draw.choice(["none", "cpu", "nvme"]),
            }
        if settings["engine"] == "megatron":
            settings |= {
                "tensor_parallel": draw.choice([1, 2]),
                "pipeline_parallel": draw.choice([1, 2, 4]),
            }
        try:
            setup = memplan.TrainingSetup(**settings)
            found = time_of(
                Job.of(
                    model, setup, memplan.load_gpu(draw.choice(["h100", "a100-80gb", "rtx4090"]))
                )
            )
        except MemplanError:
            continue
        told += 1
        assert sum(each.seconds for each in found.shares) == pytest.approx(found.expected_s), (
            settings
        )
        assert found.low_s <= found.expected_s <= found.high_s, settings
        for one, other in pairwise(found.path):
            assert other.start_s == pytest.approx(one.stop_s), settings


def test_virtual_stages_wait_less() -> None:
    """What overlaps runs beside other chunks' passes: the bubble shrinks as stages do."""

    def waited(**changes: object) -> float:
        sizes = {"num_hidden_layers": 16, "hidden_size": 4096, "intermediate_size": 11008}
        model = memplan.load_model(CONFIG | sizes, "causal-lm")
        settings = SETUPS["virtual stages"] | changes
        job = Job.of(model, memplan.TrainingSetup(**settings), memplan.load_gpu("h100"))
        words = "waiting for other stages of the pipeline"
        shares = {each.words: each.seconds for each in time_of(job).shares}
        return shares[words]

    plain = waited(virtual_stages=1, pipeline_schedule="1f1b")
    assert waited(virtual_stages=4) < waited(virtual_stages=2) < plain


def test_a_step_says_more_of_setups_that_run_the_same_code() -> None:
    """Another length of it is as much off as it was; another engine's less, and in a wider range."""

    def job(**settings: object) -> Job:
        fields = {"seq_len": 2048, "num_gpus": 8, "engine": "fsdp", **settings}
        return Job.of(
            memplan.load_model(CONFIG, "causal-lm"),
            memplan.TrainingSetup(**fields),
            memplan.load_gpu("h100"),
        )  # type: ignore[arg-type]

    measured = job()
    calibration = calibrated(measured, 1.4 * time_of(measured).expected_s)
    site = Site(calibration=calibration)

    def moved(other: Job) -> tuple[float, float]:
        said = time_of(other, site=site)
        return said.expected_s / time_of(other).expected_s, said.high_s / said.low_s

    same, its_range = moved(job(seq_len=4096, num_gpus=16))
    other, wider = moved(job(engine="ddp"))
    assert 1 < other < same < 1.4
    assert its_range < wider
    assert calibration.code == measured.code == job(seq_len=64).code != job(engine="ddp").code
    assert replace(calibration, code="", of_code=1.0).of_code < calibration.of_code


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("ratio", [0.8, 1.5])
def test_a_measured_step_is_what_is_said_then(name: str, ratio: float) -> None:
    measured = ratio * time_of_setup(name).expected_s
    found = calibrated(job_of(name), measured)
    said = time_of_setup(name, Site(calibration=found))
    assert said.expected_s == pytest.approx(measured, rel=2e-4)
    assert said.low_s < said.expected_s < said.high_s
    assert said.high_s / said.low_s < 1.2
    assert said.notes == (f"scaled by a step that was measured: {found.words}",)


def test_what_a_measured_step_explains() -> None:
    """A short one the host, an offloaded one the CPUs, by what little is known of these; and other setups are as much slower there."""
    short = calibrated(job_of("one GPU, short"), 2 * time_of_setup("one GPU, short").expected_s)
    assert short.host > 1.8
    assert 1.0 < short.own < 1.1
    assert 1.0 < short.compute < 1.02
    assert short.links == short.offload == 1.0
    told = time_of_setup("accumulated", Site(calibration=short)).expected_s
    other = time_of_setup("accumulated", Site(calibration=replace(short, own=1.0))).expected_s
    assert told == other  # what the measured setup takes beside says nothing of another
    assert other > 1.3 * time_of_setup("accumulated").expected_s
    the_rest = replace(short, host=1.0)
    by_factor = time_of_setup("accumulated", Site(host=short.host, calibration=the_rest)).expected_s
    assert other == pytest.approx(by_factor, rel=1e-6)
    name = "ZeRO-3, offloaded"
    away = calibrated(job_of(name), 1.5 * time_of_setup(name).expected_s)
    assert away.offload > away.compute > 1.0


def test_a_calibration_keeps_what_was_said_of_the_machines(tmp_path: Path) -> None:
    """Factors are of what was said when they were measured: a host that is slow, a network that was named."""
    site = Site(host=HostSpeed.SLOW, between_nodes=6.25e9)
    for name in ("one GPU, short", "FSDP"):
        measured = 1.3 * time_of_setup(name, site).expected_s
        path = tmp_path / "machines.yaml"
        path.write_text(
            calibration_text(calibrated(job_of(name), measured, site=site), date="2026-11-26")
        )
        found = read_calibration(path)
        assert found.between_nodes == site.between_nodes
        assert found.host > 2.5
        for beside in (Site(calibration=found), replace(site, calibration=found)):
            assert time_of_setup(name, beside).expected_s == pytest.approx(measured, rel=2e-5)
        with pytest.raises(UsageError, match="leave one of them out"):
            time_question(NAMES | {"host": 2.5, "calibration": path})
    elsewhere = Site(between_nodes=50e9, calibration=found)
    assert time_of_setup("FSDP", elsewhere).expected_s < measured


def test_more_nodes_are_more_crowded() -> None:
    """At the high end, where the network is named: 64 nodes' links by more than 32's, 32's as two's; the expected step is not touched."""

    def ends(num_gpus: int) -> tuple[float, float]:
        setup = SETUPS["FSDP"] | {"num_gpus": num_gpus, "seq_len": 128}
        model = memplan.load_model(CONFIG, "causal-lm")
        job = Job.of(model, memplan.TrainingSetup(**setup), memplan.load_gpu("h100"))
        links = cases_for(job, Site(between_nodes=50e9))
        return links.expected.links, links.high.links

    assert ends(16) == ends(256) == (1.0, 1.4)
    assert ends(512) == (1.0, pytest.approx(1.6))
    assert ends(2048) == (1.0, pytest.approx(2.0))


def test_what_was_measured_elsewhere_is_refused() -> None:
    found = calibrated(job_of("FSDP"), 1.1 * time_of_setup("FSDP").expected_s)
    with pytest.raises(InputError, match="says nothing of a100"):
        time_of(job_of("FSDP", "a100-80gb"), site=Site(calibration=found))
    with pytest.raises(InputError, match="see whether the setup"):
        calibrated(job_of("FSDP"), 1000.0)


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "machines.yaml"
    given = Calibration(
        gpu="h100-sxm-80gb",
        compute=1.25,
        links=2.0,
        offload=0.8,
        date="2026-11-26",
        setup="0123456789abcdef",
        own=1.03,
    )
    path.write_text(calibration_text(given, date=given.date))
    assert read_calibration(path) == given
    for text, error in {
        "compute: 1.1": "gpu: missing", "gpu: h100\nnvlink: 2": "nvlink: there is no such key",
        "gpu: h100\nhost: fast": "expected how many times", "gpu: h100\nhost: 1000": "must be from",
    }.items():  # fmt: skip
        path.write_text(text)
        with pytest.raises((ConfigError, InputError), match=error):
            read_calibration(path)


def test_what_widens_a_range_is_named() -> None:
    short = time_of_setup("one GPU, short")
    assert any("(host)" in note for note in short.notes)
    named = time_of_setup("one GPU, short", Site(host=1.0))
    assert not any("(host)" in note for note in named.notes)
    assert named.high_s < short.high_s
    unmeasured = time_of(job_of("split", "b200"))
    assert any("no step on this card" in note for note in unmeasured.notes)


def test_a_node_that_was_timed(run: Any, tmp_path: Path) -> None:
    """A part is as much slower as all of its measurements together; and every command reads what was written."""
    timed = [
        Timed(Part.COMPUTE, "products of a layer", 0.9, 0.6),
        Timed(Part.COMPUTE, "passes over a layer's tensors", 0.3, 0.4),
        Timed(Part.HOST, "asking for a small model's kernels", 0.0126, 0.0063),
    ]
    found = calibration_of(timed, gpu="h100-sxm-80gb", driver="580.95", torch="2.13.0+cu130")
    assert (found.compute, found.host, found.links) == (pytest.approx(1.2), 2.0, 1.0)
    assert lines_of(timed)[0].endswith("x 1.50 (compute)")
    usual, scaled = (cases_for(job_of("FSDP"), Site(calibration=each)) for each in (None, found))
    assert (scaled.low.links, scaled.high.links) == (
        usual.low.links,
        usual.high.links,
    )  # it had no links to time
    path = tmp_path / "node.yaml"
    path.write_text(calibration_text(found, date="2026-11-26"))
    assert read_calibration(path) == replace(found, date="2026-11-26")
    asked = (
        "estimate",
        "gpt2",
        "--gpus",
        "1",
        "--engine",
        "ddp",
        "--time",
        "--calibration",
        str(path),
    )
    assert "compute x 1.20, host x 2.00" in run(*asked, "--gpu", "h100").stdout.replace("\n", " ")
    refused = run(*asked, "--gpu", "a100-80gb")
    assert refused.exit_code == 3
    assert "was measured on h100-sxm-80gb, and says nothing of a100-sxm4-80gb" in refused.stderr
    with pytest.raises(InputError, match="see whether the GPU is busy"):
        calibration_of([Timed(Part.HOST, "", 1.0, 0.001)], gpu="h100-sxm-80gb")


def test_what_a_node_is_timed_by() -> None:
    """Figures of the step's own formulas: of large things, bytes over rates."""
    card = memplan.load_gpu("h100")
    rates, network = rates_of(card), network_of(card, gpus_per_node=8)
    assert product_said(8192, 8192, 8192, rates) == pytest.approx(2 * 8192**3 / 700e12, rel=0.05)
    assert moved_said(10**9, rates) == pytest.approx(1e9 / rates.bytes_per_s, rel=0.01)
    assert copied_said(10**9, network) == 1e9 / network.to_host
    assert adam_said(10**9, network) == 8 * 28e9 / network.host_memory
    ring = collective_said(ExchangeKind.REDUCE_SCATTER, 10**9, 8, network)
    assert ring == pytest.approx(0.875e9 / network.within_node, rel=0.02)
    summed = collective_said(ExchangeKind.ALL_REDUCE, 10**9, 8, network)  # by NVLink's switches
    assert summed == pytest.approx(1e9 / (network.summed_share * network.within_node), rel=0.02)
