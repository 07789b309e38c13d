"""What memplan remembers, emptied."""

import sys
from collections.abc import Callable
from types import ModuleType

_CLEARING: dict[ModuleType, list[Callable[[], None]]] = {}
"""Of each module what empties its caches: to look through all names takes longer than to empty them."""


def forget_everything() -> None:
    """As in a process that was asked nothing yet."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "memplan":
            if module not in _CLEARING:
                _CLEARING[module] = _clearing(module)
            for clear in _CLEARING[module]:
                clear()


def _clearing(module: ModuleType) -> list[Callable[[], None]]:
    found = (getattr(each, "cache_clear", None) for each in vars(module).values())
    return [clear for clear in found if callable(clear)]
