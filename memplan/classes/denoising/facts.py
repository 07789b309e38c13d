"""What others read of a diffusion transformer that is written as a class."""

from memplan.classes.blueprint import blueprint_from
from memplan.classes.denoising.base import Denoiser
from memplan.errors import ConfigError
from memplan.families.request import ReadRequest, checkpoint_dtype
from memplan.model.config import ConfigReader
from memplan.model.denoisers import DenoiserSpec
from memplan.model.heads import HeadSpec
from memplan.model.spec import ModelSpec, Task


def read_denoiser(base: Denoiser, reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """The facts of a model that learns to take noise away, and the class itself.

    Raises ``ConfigError`` for another task.
    """
    task = request.task
    if task is not None and task not in base.tasks:
        msg = (
            f"{reader.source}: {request.model_type} learns to take noise away, and has no task "
            f"{task.value!r}: leave `task` out"
        )
        raise ConfigError(msg)
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=Task.OTHER,
        vocab_size=0,
        hidden_size=base.size,
        context_length=base.prompt,
        stacks=(),
        head=HeadSpec(tied=False),
        checkpoint_dtype=checkpoint_dtype(reader),
        denoiser=DenoiserSpec(grid=base.grid, num_layers=base.num_layers),
        blueprint=blueprint_from(reader, request.model_type),
        source=reader.source,
    )
