"""Context, NCCL and fragmentation as figures of their own, and all GPUs together."""

from typing import Any

import pytest

import memplan
from memplan.memory.runtime import context_range, nccl_range, overhead_range
from memplan.units import GIB


def answer(**fields: Any) -> memplan.Estimate:
    return memplan.estimate("gpt2", memplan.TrainingSetup(seq_len=128, **fields), gpu="h100")


@pytest.mark.parametrize(
    "fields", [{}, {"num_gpus": 8, "zero_stage": 3}, {"num_gpus": 16, "engine": "fsdp"}]
)
def test_the_parts_add_up(fields: dict[str, Any]) -> None:
    found = answer(**fields)
    row = found.to_dict()
    context, nccl = found.context_bytes, found.nccl_bytes
    assert context.low + nccl.low == found.overhead_bytes.low
    assert context.high + nccl.high == found.overhead_bytes.high
    assert row["context_bytes"] == context.high
    assert row["nccl_bytes"] == nccl.high
    assert bool(nccl.high) is (found.setup.num_gpus > 1)
    assert found.all_gpus_bytes.high == found.setup.num_gpus * found.total_bytes.high
    assert row["all_gpus_high_bytes"] == found.all_gpus_bytes.high
    requested = found.run.peaks.requested_bytes
    assert found.fragmentation_bytes == found.required_bytes - requested > 0
    assert row["fragmentation_bytes"] == found.fragmentation_bytes


def test_exchanges_from_each_to_each_have_buffers_of_their_own() -> None:
    """NVIDIA/nccl issue 1685: 3.05 GiB behind the first all_to_all of eight H100s."""
    plain, spread = nccl_range(2), nccl_range(2, num_all_to_all=1)
    assert spread.low == plain.low
    assert spread.high - plain.high == pytest.approx(3.05 * GIB, abs=1)
    by_heads = answer(num_gpus=8, engine="deepspeed", context_parallel=2)
    ring = answer(num_gpus=8, engine="fsdp", context_parallel=2)
    assert by_heads.nccl_bytes.high - ring.nccl_bytes.high == pytest.approx(3.05 * GIB, abs=1)
    whole = overhead_range((9, 0), num_communicators=2, num_all_to_all=1)
    assert whole.high == context_range((9, 0)).high + spread.high
