"""Cards whose memory another allocator than CUDA's hands out: a range with its reason, and never an exact figure."""

import pytest

import memplan
from memplan.estimator.estimate import Verdict
from memplan.estimator.job_request import job_request
from memplan.hardware.managers import RULES, MemoryManager
from memplan.sources.cards.catalog import all_gpus, load_gpu
from memplan.sources.gpu_file import card_from_mapping
from memplan.sources.requests import kubernetes, ray, skypilot

SETUP = memplan.TrainingSetup(engine="ddp", micro_batch_size=1, seq_len=256)
OTHERS = [each for each in all_gpus() if not each.manager.is_replayed]


def test_every_maker_has_a_card_and_every_manager_rules() -> None:
    assert {each.vendor.value for each in OTHERS} == {"Intel", "Apple", "Huawei", "Google", "AWS"}
    assert (
        {each.manager for each in OTHERS} == set(RULES) == set(MemoryManager) - {MemoryManager.CUDA}
    )


@pytest.mark.parametrize("gpu", [pytest.param(each, id=each.gpu_id) for each in OTHERS])
def test_the_range_is_from_what_is_certain_to_what_cuda_reserves(gpu: memplan.GpuSpec) -> None:
    found = memplan.estimate("gpt2", SETUP, gpu=gpu)
    compiles = gpu.manager.rules.compiles
    assert found.certain_bytes == found.required_bytes == found.total_bytes.low
    assert found.held_bytes <= found.certain_bytes <= found.worst_bytes
    assert (found.certain_bytes == found.held_bytes) == compiles
    assert found.total_bytes.high == found.reserved_bytes + found.overhead_bytes.high
    assert found.verdict is (Verdict.STATES_FIT if compiles else Verdict.FITS)
    assert any("no more exact" in each for each in found.all_notes)
    assert not found.flushes_every_step


@pytest.mark.parametrize("allocator", ["mps", "xla"])
def test_verdicts_go_by_the_range_at_its_ends(allocator: str) -> None:
    said = {"name": "a card", "memory_gib": 64, "allocator": allocator}
    total = memplan.estimate(
        "gpt2", SETUP, gpu=card_from_mapping(said, source="card.yaml")
    ).total_bytes
    fits = Verdict.STATES_FIT if allocator == "xla" else Verdict.FITS
    between = Verdict.STATES_FIT if allocator == "xla" else Verdict.TIGHT
    for size, verdict in (
        (total.high, fits),
        (total.high - 2**20, between),
        (total.low, between),
        (total.low - 2**20, Verdict.OOM),
    ):
        card = card_from_mapping({**said, "memory_gib": (size + 2**19) / 2**30}, source="card.yaml")
        assert memplan.estimate("gpt2", SETUP, gpu=card).verdict is verdict


def test_metal_and_grouped_heads_on_xpu_multiply_scores_out() -> None:
    """MPS has no backward of its fused kernel; oneDNN's takes no grouped heads where it trains."""
    kernels = {
        (model, gpu): memplan.estimate(model, SETUP, gpu=gpu).attention_kernel
        for model in ("gpt2", "llama-3.2-1b")
        for gpu in ("m4-max", "max1550", "ascend-910b")
    }
    assert kernels == {
        ("gpt2", "m4-max"): "math", ("gpt2", "max1550"): "math", ("gpt2", "ascend-910b"): "flash",
        ("llama-3.2-1b", "m4-max"): "math", ("llama-3.2-1b", "max1550"): "math", ("llama-3.2-1b", "ascend-910b"): "flash",
    }  # fmt: skip
    still = memplan.TrainingSetup(engine="ddp", seq_len=256, dropout=0.0)
    assert memplan.estimate("gpt2", still, gpu="max1550").attention_kernel == "efficient"


@pytest.mark.parametrize(
    ("gpu", "resource"),
    [("gaudi3", "habana.ai/gaudi"), ("max1550", "gpu.intel.com/xe"), ("tpu-v6e", "google.com/tpu"), ("trn2", "aws.amazon.com/neuron"),
     ("ascend-910b", "huawei.com/Ascend910"), ("mi300x", "amd.com/gpu"), ("h100", "nvidia.com/gpu")],
)  # fmt: skip
def test_a_manifest_asks_for_the_maker_s_resource(gpu: str, resource: str) -> None:
    request = job_request(memplan.estimate("gpt2", SETUP, gpu=gpu), None)
    assert f"{resource}: 1" in kubernetes.text(request)


def test_a_mac_is_no_node_of_a_cluster() -> None:
    with pytest.raises(memplan.MemplanError, match="M4 Max, 128 GB is no card of a cluster"):
        kubernetes.text(job_request(memplan.estimate("gpt2", SETUP, gpu="m4-max"), None))


def test_names_that_people_use() -> None:
    said = [
        "Intel(R) Data Center GPU Max 1550",
        "TPU v6 lite",
        "Ascend910B3",
        "Apple M4 Max 128GB",
        "trillium",
    ]
    found = [load_gpu(each).gpu_id for each in said]
    assert found == [
        "max1550-stack-64gb",
        "tpu-v6e-32gb",
        "ascend-910b-64gb",
        "m4-max-128gb",
        "tpu-v6e-32gb",
    ]


@pytest.mark.parametrize(
    ("gpu", "said"),
    [("gaudi3", '"HPU": 1'), ("ascend-910b", '"NPU": 1'), ("tpu-v6e", '"TPU": 1'), ("trn2", '"neuron_cores": 1'), ("max1550", '"GPU": 1')],
)  # fmt: skip
def test_ray_counts_a_card_by_its_own_word(gpu: str, said: str) -> None:
    text = ray.text(job_request(memplan.estimate("gpt2", SETUP, gpu=gpu), None)).replace("'", '"')
    assert said in text
    assert f"use_gpu={said.startswith(chr(34) + 'GPU')}" in text


@pytest.mark.parametrize("gpu", ["tpu-v5e", "trn2", "m4-max"])
def test_what_skypilot_has_no_name_for_is_refused(gpu: str) -> None:
    with pytest.raises(memplan.MemplanError, match="is not written for SkyPilot"):
        skypilot.text(job_request(memplan.estimate("gpt2", SETUP, gpu=gpu), None))
