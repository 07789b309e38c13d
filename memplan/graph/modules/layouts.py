"""How gradients lie: whether what arrives at a view is seen as another view, or has to be copied.

Each tensor behind a view is a node; each operation, view or permutation between two is an edge with a rule
from the strides of the result's gradient to those of its input's. Once a segment's operations are all
there the edges are walked from behind.
"""

from collections.abc import Callable
from math import prod

from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient, Operation
from memplan.graph.modules.strides import Shape, is_contiguous, row_strides, view_strides

Rule = Callable[[Shape], Shape | None]
"""From the strides of a result's gradient to those of its input's; None: it is copied into rows."""


def unchanged(lies: Shape) -> Shape:
    """The rule of what is done element by element."""
    return lies


def always(strides: Shape) -> Rule:
    """The rule of what makes a gradient that lies so, whatever it is given."""
    return lambda _: strides


def in_rows(shape: Shape) -> Rule:
    """The rule of what makes a gradient of this shape anew."""
    return always(row_strides(shape))


def are_alike(shape: Shape, one: Shape, other: Shape) -> bool:
    """Whether strides of a shape mean the same: those of dimensions of one say nothing."""
    return all(size == 1 or a == b for size, a, b in zip(shape, one, other, strict=True))


class Node:
    """A tensor as autograd sees it: it outlives every name that held it."""

    __slots__ = ("flat", "lies", "shape")

    def __init__(self, shape: Shape, lies: Shape, *, flat: bool) -> None:
        self.shape = shape
        self.lies = lies
        """The strides of the tensor, which those of its gradient are where nothing says otherwise."""
        self.flat = flat
        """A linear layer made it, which flattens its gradient to rows of one dimension."""

    def takes(self, lies: Shape | None) -> Shape | None:
        """A gradient's strides, where what made the tensor needs no copy of it."""
        if lies is None or not self.flat:
            return lies
        rows = prod(self.shape[:-1]), self.shape[-1]
        return lies if view_strides(self.shape, lies, rows) is not None else None


@dataclass(frozen=True, slots=True)
class Settled:
    """An operation whose gradient is handed on as it is, or copied first, by how it lies."""

    operation: Operation
    gradient: Gradient
    """What it is where nothing is copied."""
    expects: Shape | None = None
    """The strides that it takes; None: any that the edge's rule has an answer for."""
    otherwise: Callable[[Operation], None] | None = None
    """What becomes of it where what arrives does not lie as expected: it is no view."""


@dataclass(frozen=True, slots=True)
class Straightened:
    """An operation whose backward pass copies a gradient first that does not lie in rows."""

    copies: Callable[[], None]
    """Say so of the operation."""
    seen: Shape | None = None
    """The shape as which it has to be seen without a copy; None: its own, in rows."""

    def suits(self, shape: Shape, lies: Shape) -> bool:
        """Whether a gradient is taken as it is."""
        if self.seen is None:
            return is_contiguous(shape, lies)
        return view_strides(shape, lies, self.seen) is not None


Settles = Settled | Straightened | None


class Layouts:
    """The graph of views of one segment."""

    __slots__ = ("_edges",)

    def __init__(self) -> None:
        self._edges: list[tuple[Settles, Node, Node, Rule]] = []

    def add(self, given: Node, made: Node, rule: Rule, settles: Settles = None) -> None:
        """Note an edge; with ``settles`` it is that operation's, whose gradient is a view or a copy, or is copied first."""
        self._edges.append((settles, given, made, rule))

    def settle(self) -> list[Operation]:
        """Decide of each view whether its gradient is one too, and begin anew.

        Returns the views that are: neither pass allocates anything for them.
        """
        mere: list[Operation] = []
        arrived: dict[Node, Shape] = {}
        for settles, given, made, rule in reversed(self._edges):
            lies = arrived.get(made) or made.lies
            found = given.takes(rule(lies))
            arrived.setdefault(given, found or row_strides(given.shape))
            if isinstance(settles, Straightened):
                if not settles.suits(made.shape, lies):
                    settles.copies()
                continue
            if settles is None:
                continue
            operation, expected = settles.operation, settles.expects
            if settles.otherwise is not None:
                if operation.gradients and not are_alike(made.shape, lies, expected or lies):
                    settles.otherwise(operation)
                continue
            is_kept = found is not None and expected in (None, lies)
            if operation.gradients:
                first = settles.gradient if is_kept else Gradient.FRESH
                if first is Gradient.SEEN and found is not None and found[-1] != 1:
                    first = Gradient.COLUMNS
                operation.gradients = (first, *operation.gradients[1:])
            if operation.kind is OperationKind.VIEW and (is_kept or not operation.gradients):
                mere.append(operation)
        self._edges.clear()
        return mere
