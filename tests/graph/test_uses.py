"""Who makes and who reads a tensor of a segment, which decides what gradients are added up in place."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.run import _Uses

SOURCE, SUM, VIEW, END = "source", "sum", "view", "end"


class Counted(list[Any]):
    """A list that counts how often it is gone through."""

    turns = 0

    def __iter__(self) -> Iterator[Any]:
        self.turns += 1
        return super().__iter__()


def operation(kind: OperationKind, inputs: tuple[str, ...], output: str) -> Any:
    """What is looked at of an operation, with tensors that are names."""
    return SimpleNamespace(kind=kind, inputs=inputs, outputs=(output,))


def uses(*more: Any, maker: OperationKind = OperationKind.ADD) -> tuple[Any, Any]:
    """Of a segment that makes a tensor, views it and reads the view, and does more; and the view."""
    view = operation(OperationKind.VIEW, (SUM,), VIEW)
    made = operation(maker, (SOURCE, "other"), SUM)
    read = operation(OperationKind.CLONE, (VIEW,), END)
    segment: Any = SimpleNamespace(operations=[made, view, read, *more], input=SOURCE)
    return _Uses(segment), view


@pytest.mark.parametrize(
    ("read_too", "maker", "is_added"),
    [
        (None, OperationKind.ADD, False),
        (VIEW, OperationKind.ADD, True),
        (SUM, OperationKind.ADD, True),
        (SOURCE, OperationKind.ADD, True),
        (SOURCE, OperationKind.MUL, False),
        (END, OperationKind.ADD, False),
    ],
)
def test_what_else_reads_a_view_adds_gradients_up(
    read_too: str | None, maker: OperationKind, is_added: bool
) -> None:
    more = [] if read_too is None else [operation(OperationKind.CLONE, (read_too,), "more")]
    found, view = uses(*more, maker=maker)
    assert found.is_added_to(view) == is_added


@pytest.mark.parametrize(
    ("maker", "read_too", "is_added"),
    [
        (OperationKind.ADD, SOURCE, True),
        (OperationKind.CLONE, SOURCE, True),
        (OperationKind.MUL, SOURCE, False),
        (OperationKind.ADD, SUM, False),
    ],
)
def test_what_is_handed_on_behind_a_view_is_added_up_where_others_read_it(
    maker: OperationKind, read_too: str, is_added: bool
) -> None:
    found, view = uses(operation(OperationKind.CLONE, (read_too,), "more"), maker=maker)
    assert found.is_added_behind(view) == is_added


def test_a_view_of_what_an_earlier_segment_made_may_be_added_to() -> None:
    view = operation(OperationKind.VIEW, (SOURCE,), VIEW)
    segment: Any = SimpleNamespace(operations=[view], input=SOURCE)
    assert _Uses(segment).is_added_to(view)


def test_a_segment_is_gone_through_once_for_all_its_views() -> None:
    views = [operation(OperationKind.VIEW, (f"made {n}",), f"seen {n}") for n in range(50)]
    made = [operation(OperationKind.ADD, ("x", "y"), f"made {n}") for n in range(50)]
    operations = Counted([*made, *views])
    segment: Any = SimpleNamespace(operations=operations, input="x")
    found = _Uses(segment)
    assert all(found.is_added_to(each) and found.is_added_behind(each) for each in views)
    assert operations.turns == 1
