"""The table of optimizers, and that it can say what later rows will have to."""

from math import prod

import pytest

from memplan.dtypes import DType
from memplan.training.optimizers import (
    OPTIMIZERS,
    Optimizer,
    OptimizerStates,
    StateTensor,
    no_tensors,
    one_alike,
)


@pytest.mark.parametrize(
    ("optimizer", "num_states", "num_step_copies", "has_step_counter"),
    [
        pytest.param(Optimizer.ADAMW_FUSED, 2, 0, True, id="adamw-fused"),
        pytest.param(Optimizer.ADAMW_FOREACH, 2, 1, False, id="adamw-foreach"),
        pytest.param(Optimizer.SGD, 0, 0, False, id="sgd"),
        pytest.param(Optimizer.SGD_MOMENTUM, 1, 0, False, id="sgd-momentum"),
    ],
)
def test_what_each_optimizer_keeps(
    optimizer: Optimizer, num_states: int, num_step_copies: int, has_step_counter: bool
) -> None:
    row = OPTIMIZERS[optimizer]
    assert (row.num_states, row.num_step_copies) == (num_states, num_step_copies)
    assert row.has_step_counter is has_step_counter
    counter = [(1, DType.FP32)] if has_step_counter else []
    assert list(row.states((7, 3), DType.FP32)) == counter + [(21, DType.FP32)] * num_states


def test_every_optimizer_has_a_row() -> None:
    assert set(OPTIMIZERS) == set(Optimizer)


def factored(shape: tuple[int, ...], dtype: DType) -> tuple[StateTensor, ...]:
    """Adafactor without momentum: a row and a column of a matrix, a vector's second moment whole."""
    if len(shape) < 2:
        return one_alike(shape, dtype)
    return (prod(shape[:-1]), dtype), (prod(shape) // shape[-2], dtype)


def matrices_only(shape: tuple[int, ...], dtype: DType) -> tuple[StateTensor, ...]:
    """Muon: momentum of matrices."""
    return one_alike(shape, dtype) if len(shape) == 2 else no_tensors(shape, dtype)


def test_states_may_depend_on_the_shape() -> None:
    row = OptimizerStates(states=factored)
    assert row.states((64, 32), DType.FP32) == ((64, DType.FP32), (32, DType.FP32))
    assert row.states((8, 64, 32), DType.FP32) == ((512, DType.FP32), (256, DType.FP32))
    assert row.states((64 * 32,), DType.FP32) == ((2048, DType.FP32),), "a flat shard is a vector"
    assert row.num_states == 0, "none is as large as the parameter"


def test_an_optimizer_may_step_matrices_only() -> None:
    row = OptimizerStates(states=matrices_only)
    assert row.states((4, 4), DType.BF16) == ((16, DType.BF16),)
    assert row.states((4,), DType.BF16) == ()
