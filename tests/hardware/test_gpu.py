"""What a GpuSpec derives from its figures."""

from dataclasses import FrozenInstanceError

import pytest

from memplan.errors import InputError
from memplan.hardware.gpu import GpuSpec, Vendor, gpu_from_memory
from memplan.units import GIB, MIB


def _gpu(**figures: object) -> GpuSpec:
    given = {"gpu_id": "x", "name": "X", "memory_nominal_gb": 80, "has_bf16": True} | figures
    return GpuSpec(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("figures", "capacity_bytes", "note"),
    [
        pytest.param(
            {"torch_total_bytes": 81082 * MIB, "driver_total_bytes": 81559 * MIB},
            81082 * MIB,
            "",
            id="torch's figure counts",
        ),
        pytest.param(
            {"driver_total_bytes": 24576 * MIB},
            24576 * MIB * 99 // 100,
            "the driver's 24576 MiB less 1 %, torch's is unknown",
            id="driver less 1 %",
        ),
        pytest.param(
            {"memory_nominal_gb": 96},
            96 * GIB * 985 // 1000,
            "98.5 % of the nominal 96 GiB, no reading is known",
            id="share of the nominal memory",
        ),
    ],
)
def test_capacity(figures: dict[str, object], capacity_bytes: int, note: str) -> None:
    gpu = _gpu(**figures)
    assert gpu.capacity_bytes == capacity_bytes
    assert isinstance(gpu.capacity_bytes, int)
    assert gpu.capacity_note == note


@pytest.mark.parametrize(
    ("compute_capability", "vendor", "supported"),
    [
        pytest.param((7, 0), Vendor.NVIDIA, False, id="V100"),
        pytest.param((7, 5), Vendor.NVIDIA, False, id="T4"),
        pytest.param((8, 0), Vendor.NVIDIA, True, id="A100"),
        pytest.param((8, 9), Vendor.NVIDIA, True, id="L4"),
        pytest.param((12, 1), Vendor.NVIDIA, True, id="GB10"),
        pytest.param(None, Vendor.AMD, True, id="MI300X"),
        pytest.param(None, Vendor.UNKNOWN, True, id="known by its memory"),
    ],
)
def test_flash_attention(
    compute_capability: tuple[int, int] | None, vendor: Vendor, supported: bool
) -> None:
    gpu = _gpu(compute_capability=compute_capability, vendor=vendor)
    assert gpu.supports_flash_attention is supported


def test_gpu_from_memory_takes_the_figure_as_given() -> None:
    gpu = gpu_from_memory(46 * GIB)
    assert gpu.capacity_bytes == 46 * GIB
    assert gpu.capacity_note == ""
    assert gpu.gpu_id == "custom-46gib"
    assert gpu.name == "unlisted GPU, 46.00 GiB"
    assert gpu.has_bf16
    assert gpu.supports_flash_attention
    assert "assumed" in gpu.notes


def test_gpu_from_memory_names_differ_with_the_memory() -> None:
    assert gpu_from_memory(24 * 10**9).gpu_id == "custom-22.35gib"


@pytest.mark.parametrize("total_bytes", [-1, 0, 1000, 2**50])
def test_gpu_from_memory_refuses_what_no_device_has(total_bytes: int) -> None:
    with pytest.raises(InputError, match=f"cannot have {total_bytes} bytes"):
        gpu_from_memory(total_bytes)


def test_a_gpu_cannot_be_changed() -> None:
    gpu = _gpu()
    with pytest.raises(FrozenInstanceError):
        gpu.name = "Y"  # type: ignore[misc]


def test_a_gpu_can_be_a_key() -> None:
    assert len({_gpu(), _gpu(), _gpu(name="Y")}) == 2
