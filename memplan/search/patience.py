"""The garbage collector's patience while setups are estimated.

An estimate makes a million objects that go without the collector, which all the same looks through what is alive
again and again: a third of a sweep's time.
"""

import gc
from _thread import allocate_lock  # all of threading takes longer than a short command has

PATIENCE = 10_000_000
"""Objects made between two runs of the collector. An estimate leaves some hundred in cycles
(``tests/estimator/test_estimation.py``)."""


class PatientCollector:
    """Lets the collector wait inside a ``with``, in however many threads there are; then it is as it was.

    >>> with PATIENT:
    ...     gc.get_threshold()[0] >= PATIENCE
    True
    """

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._depth = 0
        self._before = gc.get_threshold()

    def __enter__(self) -> None:
        """The collector waits from the first one on that asks for it; one that is switched off stays so."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._before = gc.get_threshold()
                if 0 < self._before[0] < PATIENCE:
                    gc.set_threshold(PATIENCE, *self._before[1:])

    def __exit__(self, *_: object) -> None:
        """It goes on as before when the last one has gone."""
        with self._lock:
            self._depth -= 1
            if not self._depth:
                gc.set_threshold(*self._before)


PATIENT = PatientCollector()
"""The process's own."""
