"""Gradients of a norm's weights over many narrow rows, as PyTorch's CUDA build asked for blocks on an A100."""

import pytest

from memplan.dtypes import DType
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import scratch_changes
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import allocated_bytes
from memplan.graph.operations.norms import layer_norm_kernel

A100 = {"multiprocessors": 108, "threads_per_multiprocessor": 2048}
FP32, BF16 = DType.FP32, DType.BF16


def beside_results(rows: int, width: int, dtype: DType) -> list[int]:
    """What a layer norm's backward pass takes beside its three results, in order [bytes]."""
    tape = Tape(TapeOptions(compute=dtype, weights=dtype, **A100))
    tape.begin("norm")
    x = tape.tensor(rows * width, dtype, requires_grad=True)
    weights = (tape.parameter("norm.weight", width), tape.parameter("norm.bias", width))
    layer_norm_kernel(tape, x, width, weights)
    *_, last = scratch_changes(tape.segment.operations[-1].backward_scratch)
    return [size for _, size in last]


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "partial", "sums"),
    [
        (65537, 64, FP32, 524544, (278528, 4)),
        (70000, 64, BF16, 280064, (294912, 4)),
        (70000, 768, BF16, 2096640, (8650752, 24)),
        (70000, 1727, FP32, 4186248, ()),
        (334848, 64, FP32, 2678784, (1343488, 4)),
    ],
)
def test_in_two_passes(
    rows: int, width: int, dtype: DType, partial: int, sums: tuple[int, ...]
) -> None:
    """First a block of sums for each weight, then each of them is added up with a buffer and semaphores."""
    size, *launch = (allocated_bytes(each, DType.INT8) for each in (partial, *sums))
    once = [*launch, *(-each for each in reversed(launch))]
    assert beside_results(rows, width, dtype) == [size, size, *once, *once, -size, -size]


@pytest.mark.parametrize(("rows", "width"), [(65536, 64), (70000, 1728)])
def test_at_once(rows: int, width: int) -> None:
    assert beside_results(rows, width, FP32) == []


def test_a_card_of_more_multiprocessors_has_another_limit() -> None:
    more = {**A100, "multiprocessors": 132}
    tape = Tape(TapeOptions(compute=FP32, **more))
    tape.begin("norm")
    x = tape.tensor(70000 * 1728, FP32, requires_grad=True)
    layer_norm_kernel(tape, x, 1728, (tape.parameter("norm.weight", 1728),))
    assert any(tape.segment.operations[-1].backward_scratch)
    assert tape.asked_multiprocessors
