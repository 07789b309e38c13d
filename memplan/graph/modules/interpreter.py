"""Whether the interpreter lets a value go when the last name for it does, as CPython does."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from memplan.errors import InterpreterError

_EXPECTED = ["replaced", "temporary", "argument", "local"]

PATIENCE_S = 3600.0
"""How long other threads wait while a model is recorded, which takes milliseconds."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """No other thread runs meanwhile, unless it has waited since before.

    A profiler's thread that looks at this one's frames (``sys._current_frames``, as Dask's does) holds on to all
    that they name until it has looked, and tensors would live longer than their names.
    """
    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
        time.sleep(0)  # those that wait already have their turn, and wait anew
    before = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class _Probe:
    """A value that notes when it goes."""

    __slots__ = ("_name", "_seen")

    def __init__(self, name: str, seen: list[str]) -> None:
        self._name, self._seen = name, seen

    def __del__(self) -> None:
        self._seen.append(self._name)

    def __add__(self, other: str) -> "_Probe":
        return _Probe(other, self._seen)


def order_of_release() -> list[str]:
    """Names of values in the order in which this interpreter lets them go.

    >>> order_of_release()
    ['replaced', 'temporary', 'argument', 'local']
    """
    seen: list[str] = []

    def renamed(x: _Probe) -> _Probe:
        x = x + "local"
        return x  # noqa: RET504  (the name is what is asked about)

    value = _Probe("replaced", seen)
    value = _Probe("temporary", seen)
    value = value + "argument"
    value = renamed(value)
    del value
    return seen


def check_interpreter() -> None:
    """Refuse an interpreter that does not count references as CPython does.

    Raises ``InterpreterError``.
    """
    found = order_of_release()
    if found != _EXPECTED:
        msg = (
            f"{sys.implementation.name} {sys.version.split()[0]} lets values go in another order than CPython "
            f"({', '.join(found) or 'none at once'}), and memplan reads lifetimes of tensors off it: run it under CPython "
            "3.11 or later"
        )
        raise InterpreterError(msg)
