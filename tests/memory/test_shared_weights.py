"""What the sum of a shared weight's gradients takes: measured on PyTorch's own CUDA build."""

import pytest

from memplan.dtypes import DType
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.products import matmul_weight
from memplan.memory.step import StepWalk
from tests.plain_step import plain_step

WIDTH, ROWS = 2048, 16


def peak_over_forward(tape: Tape) -> float:
    """The backward peak above what the forward pass left, in fp32 copies of the weight."""
    step = plain_step(StepWalk(tape).run())
    raised = step.backward_peak.total_bytes - step.after_forward.total_bytes
    return raised / (WIDTH * WIDTH * DType.FP32.num_bytes)


@pytest.mark.parametrize(
    ("autocast", "uses", "measured"),
    [
        pytest.param(None, 1, 1.016, id="fp32, once"),
        pytest.param(None, 2, 3.0, id="fp32, twice"),
        pytest.param(None, 3, 2.992, id="fp32, three times"),
        pytest.param(None, 4, 2.992, id="fp32, four times"),
        pytest.param(DType.BF16, 1, 1.004, id="autocast, once"),
        pytest.param(DType.BF16, 2, 1.004, id="autocast, twice"),
        pytest.param(DType.BF16, 3, 1.496, id="autocast, three times"),
        pytest.param(DType.BF16, 4, 1.496, id="autocast, four times"),
    ],
)
def test_a_linear_layer_used_again(autocast: DType | None, uses: int, measured: float) -> None:
    """The first sum is a third tensor; what is added after that goes into it."""
    tape = Tape(TapeOptions(autocast=autocast))
    tape.begin("layers")
    weight = tape.parameter("weight", WIDTH, WIDTH)
    x = tape.tensor(ROWS * WIDTH, DType.FP32, requires_grad=True)
    for _ in range(uses):
        x = matmul_weight(tape, x, weight)
    tape.end(x)
    assert peak_over_forward(tape) == pytest.approx(measured, abs=0.03)


@pytest.mark.parametrize(
    ("lookups", "head", "measured"),
    [
        pytest.param(1, False, 1.0, id="an embedding"),
        pytest.param(2, False, 2.0, id="looked up twice: summed in place"),
        pytest.param(1, True, 3.0, id="tied head"),
        pytest.param(2, True, 3.0, id="tied head, looked up twice"),
    ],
)
def test_a_tied_embedding(lookups: int, head: bool, measured: float) -> None:
    tape = Tape(TapeOptions())
    tape.begin("model")
    weight = tape.parameter("weight", WIDTH, WIDTH)
    x = embedding_lookup(tape, weight, ROWS)
    for _ in range(lookups - 1):
        x = tape.add(x, embedding_lookup(tape, weight, ROWS))
    if head:
        x = matmul_weight(tape, x, weight)
    tape.end(x)
    assert peak_over_forward(tape) == pytest.approx(measured, abs=0.03)
