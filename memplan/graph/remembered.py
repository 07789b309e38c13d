"""What is remembered of tapes, and forgotten together once too much was recorded.

A tape is held from many places: by what records and walks it, by accounts, outlines, times and the latest
answers. Each holds so many of its own; of models whose layers loop over chunks a tape and what is made of it
take a hundred times what others' do, so that all of them together go by how many operations there are.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

    from memplan.graph.core.tape import Tape

T = TypeVar("T")

MOST_OPERATIONS = 120_000
"""Of all tapes that are remembered: more than 1 KB each with their walks and events, as measured. A Llama has
70, Kimi-Linear 16,000: a table of it on three cards, with what would make it fit, records 25. With 400,000 it takes 430 MB
and not 300, and as long."""


class OfTapes:
    """Everything that remembers tapes.

    >>> found = OfTapes(most_operations=2)
    >>> @found.remembered(maxsize=8)
    ... def square(number: int) -> int:
    ...     return number**2
    >>> square(3), square.cache_info().currsize
    (9, 1)
    >>> found.num_operations = 3
    >>> found.make_room()
    >>> square.cache_info().currsize, found.num_operations
    (0, 0)
    """

    def __init__(self, most_operations: int = MOST_OPERATIONS) -> None:
        self.most_operations = most_operations
        self.num_operations = 0
        """Recorded since all was forgotten."""
        self._forget: list[Callable[[], None]] = []

    def remembered(self, maxsize: int) -> "Callable[[Callable[..., T]], _lru_cache_wrapper[T]]":
        """Remember the latest answers of a function whose arguments or answers hold tapes."""

        def remember(function: Callable[..., T]) -> "_lru_cache_wrapper[T]":
            found = lru_cache(maxsize=maxsize)(function)
            self.forget_with(found.cache_clear)
            return found

        return remember

    def forget_with(self, forget: Callable[[], None]) -> None:
        """Have something else that holds tapes emptied with the others."""
        self._forget.append(forget)

    def count(self, tape: "Tape") -> None:
        """Take a new tape into account."""
        self.num_operations += sum(len(each.operations) for each in tape.segments)

    def make_room(self) -> None:
        """Forget all if it is too much: asked before a job is recorded, when nobody is amid one."""
        if self.num_operations > self.most_operations:
            self.num_operations = 0
            for forget in self._forget:
                forget()


OF_TAPES = OfTapes()
"""The process's own."""
