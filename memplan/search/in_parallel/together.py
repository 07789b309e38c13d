"""A few large pieces of work at once, in copies of this process, where there are cores for them.

A terminal user waits for one answer, of some dozens of estimates. ``memplan.search.in_parallel.processes`` are for thousands: to
start them takes longer than all of this. What takes less than a second is done here: copies
record again what this process has recorded, and a table of ten setups takes a third more of all cores'
time so, for a tenth of the waiting. What is left after a second is shared: the process forks; each copy
takes the next piece that nobody has taken, and hands over what it found when nothing is left. Where a
process cannot be copied, or one core is all there is, everything is done here.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

ResultT = TypeVar("ResultT")

MAX_COPIES = 3
"""Beside this process: to copy it takes a few milliseconds each time."""
ALONE_S = 1.0
"""CPU seconds that this process works before it is copied."""
_MOST_PIECES = 256
"""What a byte can name."""

num_cores = 1
"""How many may be used. The command line says how many: a library does not copy its user's process."""


def all_of(
    work: Callable[[int], ResultT], count: int, *, shared: Sequence[object] = ()
) -> list[ResultT]:
    """``work(0)`` to ``work(count - 1)``; ``shared`` are objects that results hold, the same in all.

    An error is raised here, whoever meets it.

    >>> all_of(lambda number: number * number, 4)
    [0, 1, 4, 9]
    """
    found: list[ResultT] = []
    may_copy = num_cores > 1 and hasattr(os, "fork")
    begun_s = time.process_time()
    for number in range(count):
        left = count - number
        if may_copy and 1 < left <= _MOST_PIECES and time.process_time() - begun_s >= ALONE_S:
            from memplan.search.in_parallel.copies import Together  # which short work does without

            copies = min(num_cores - 1, MAX_COPIES, left - 1)
            return found + Together(lambda each: work(len(found) + each), left, shared).run(copies)
        found.append(work(number))
    return found
