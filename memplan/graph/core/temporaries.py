"""Writing down what a kernel or a formula asks for and gives back on its way."""

from memplan.graph.core.segments import RESULT
from memplan.graph.core.tensors import ALLOCATION_ROUNDING
from memplan.units import round_up


class Temporaries:
    """A script of blocks in the order they come and go, as ``Operation`` keeps one.

    >>> made = Temporaries()
    >>> first = made.take(1000)
    >>> made.result()
    >>> made.drop(first)
    >>> made.blocks
    (1024, 0, -1)
    """

    def __init__(self) -> None:
        self._steps: list[int] = []

    @property
    def blocks(self) -> tuple[int, ...]:
        """The script so far."""
        return tuple(self._steps)

    def take(self, num_bytes: int) -> int:
        """Ask for a block; return its number."""
        self._steps.append(round_up(num_bytes, ALLOCATION_ROUNDING))
        return len(self._steps) - 1

    def drop(self, *blocks: int) -> None:
        """Give blocks back, in this order."""
        self._steps += [~block for block in blocks]

    def result(self) -> None:
        """Here the operation makes its next result: its outputs, or one gradient after the other."""
        self._steps.append(RESULT)
