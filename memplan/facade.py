"""The library's face: the core's functions, with names resolved to what they name."""

import os
from collections.abc import Mapping

from memplan.estimator import Estimate
from memplan.estimator import estimate as estimate_memory
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.training.setup import TrainingSetup

Model = str | os.PathLike[str] | Mapping[str, object] | ModelSpec
"""What names a model: a built-in name, a hub id, a path, a config dict or a spec."""


def estimate(
    model: Model, setup: TrainingSetup | None = None, *, gpu: str | GpuSpec | None = None
) -> Estimate:
    """Estimate the memory of a training run.

    ``gpu`` is a name of the catalog or a ``GpuSpec``; without one there is no verdict. Raises a
    ``MemplanError`` for what cannot be read or trained.

    >>> import memplan
    >>> setup = memplan.TrainingSetup(precision="bf16", seq_len=2048, checkpointing="full")
    >>> answer = memplan.estimate("llama-3.2-1b", setup, gpu="h100")
    >>> answer.num_params, answer.peak_phase, answer.verdict.value
    (1235814400, 'backward', 'fits')
    """
    from memplan.sources.catalog import load_gpu
    from memplan.sources.models import load_model

    spec = load_model(model)
    card = load_gpu(gpu) if isinstance(gpu, str) else gpu
    return estimate_memory(spec, setup or TrainingSetup(), card)
