"""The table of operators: what a row says is what the tape does."""

import pytest

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.operators import FUNCTIONS, JITTED, Kept
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import RESULT
from memplan.graph.core.tape import Tape


def recorded(*, decomposed: bool = False) -> Tape:
    tape = Tape(TapeOptions(decomposed=decomposed))
    tape.begin("one")
    return tape


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_keeps_what_its_row_says(kind: OperationKind) -> None:
    tape = recorded()
    x = tape.tensor(1000, DType.FP32, requires_grad=True)
    out = tape.elementwise(kind, x)
    kept = {Kept.ARGUMENT: [x.storage], Kept.RESULT: [out.storage], Kept.NOTHING: []}
    assert tape.segment.operations[-1].saved == kept[FUNCTIONS[kind].kept]


def test_copies_of_a_formula_come_before_its_result() -> None:
    tape = recorded()
    out = tape.elementwise(OperationKind.RSQRT, tape.tensor(1000, DType.FP32, requires_grad=True))
    size = out.storage.num_bytes
    assert tape.segment.operations[-1].backward_scratch == (size, size, RESULT)


def test_fake_tensors_run_a_formula_in_its_steps() -> None:
    tape = recorded(decomposed=True)
    out = tape.elementwise(OperationKind.SILU, tape.tensor(1000, DType.FP32, requires_grad=True))
    assert sum(tape.segment.operations[-1].backward_scratch) == 5 * out.storage.num_bytes


def test_another_row_is_taken_by_name() -> None:
    tape = recorded()
    x = tape.tensor(1000, DType.FP32, requires_grad=True)
    tape.elementwise(OperationKind.RELU, x, function=JITTED)
    assert tape.segment.operations[-1].saved == [x.storage]


def test_every_row_has_a_source() -> None:
    assert all("[1]_" in row.source or ".py" in row.source for row in FUNCTIONS.values())
