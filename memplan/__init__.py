"""Plan the GPU memory of a training run: will it fit, where do the bytes go, what should change?

The names below are found when they are first asked for, so that ``import memplan`` costs nothing.
"""

from importlib import import_module

from memplan.version import __version__

TYPE_CHECKING = False  # what typing's is, whose import takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from memplan.api import admit, compare, estimate, gpus, largest, models, plan, sweep
    from memplan.errors import MemplanError
    from memplan.estimator.estimate import Estimate, Verdict
    from memplan.hardware.gpu import GpuSpec
    from memplan.live import Checked, MemplanCallback, check
    from memplan.model.spec import ModelSpec
    from memplan.search.grid import Grid
    from memplan.search.planning.goal import Goal
    from memplan.sources.gpus import load_gpu
    from memplan.sources.models import load_model
    from memplan.tracing import save_tape, trace
    from memplan.training.adapters import Ia3, Lora, PromptTuning
    from memplan.training.quantization import Quantization
    from memplan.training.setup import TrainingSetup

_HOMES = {
    "Checked": "memplan.live",
    "Estimate": "memplan.estimator.estimate",
    "Goal": "memplan.search.planning.goal",
    "GpuSpec": "memplan.hardware.gpu",
    "Grid": "memplan.search.grid",
    "Ia3": "memplan.training.adapters",
    "Lora": "memplan.training.adapters",
    "MemplanCallback": "memplan.live",
    "MemplanError": "memplan.errors",
    "ModelSpec": "memplan.model.spec",
    "PromptTuning": "memplan.training.adapters",
    "Quantization": "memplan.training.quantization",
    "TrainingSetup": "memplan.training.setup",
    "Verdict": "memplan.estimator.estimate",
    "admit": "memplan.api",
    "check": "memplan.live",
    "compare": "memplan.api",
    "estimate": "memplan.api",
    "gpus": "memplan.api",
    "largest": "memplan.api",
    "load_gpu": "memplan.sources.gpus",
    "load_model": "memplan.sources.models",
    "models": "memplan.api",
    "plan": "memplan.api",
    "save_tape": "memplan.tracing",
    "sweep": "memplan.api",
    "trace": "memplan.tracing",
}
"""Public name -> the module that defines it."""

__all__ = [
    "Checked",
    "Estimate",
    "Goal",
    "GpuSpec",
    "Grid",
    "Ia3",
    "Lora",
    "MemplanCallback",
    "MemplanError",
    "ModelSpec",
    "PromptTuning",
    "Quantization",
    "TrainingSetup",
    "Verdict",
    "__version__",
    "admit",
    "check",
    "compare",
    "estimate",
    "gpus",
    "largest",
    "load_gpu",
    "load_model",
    "models",
    "plan",
    "save_tape",
    "sweep",
    "trace",
]


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        msg = f"module 'memplan' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
