"""Plan the GPU memory of a training run: will it fit, where do the bytes go, what should change?

The names below are found when they are first asked for, so that ``import memplan`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "MemplanError": "memplan.errors",
    "TrainingSetup": "memplan.training.setup",
    "load_gpu": "memplan.sources.catalog",
    "load_model": "memplan.sources.models",
}
"""Public name -> the module that defines it."""

__all__ = ["MemplanError", "TrainingSetup", "__version__", "load_gpu", "load_model"]


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        msg = f"module 'memplan' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
