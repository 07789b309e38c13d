"""What others read of a model of sound that is written as a class."""

from memplan.classes.blueprint import blueprint_from
from memplan.classes.sounds.base import SoundModel
from memplan.families.classes import BARE
from memplan.families.request import ReadRequest, checkpoint_dtype, task_named
from memplan.fast_dataclass import replace
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.spec import ModelSpec, Task


def read_sounds(base: SoundModel, reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """The facts of a model of sound, and the class itself.

    Raises ``ConfigError`` for a config that no such class can be made from.
    """
    kind, family = type(base), request.model_type
    ending = kind.ending(reader, family, request.task)
    task = Task.BASE if ending == BARE else task_named(ending, family) or Task.OTHER
    model = ModelSpec(
        name=request.name,
        family=family,
        task=task,
        vocab_size=base.vocab_size,
        hidden_size=base.width,
        context_length=base.context_length(reader),
        stacks=(),
        head=HeadSpec(tied=base.is_tied),
        num_labels=request.labels(reader),
        checkpoint_dtype=checkpoint_dtype(reader),
        eager_attention_only=base.eager_only,
        recomputes=base.recomputes,
        sound=base.sound,
        blueprint=blueprint_from(reader, family),
        source=reader.source,
    )
    made = kind.named_task(reader, model)
    made(reader, model, kind)  # it refuses what its head cannot be made from
    return replace(model, activations_left_out=f"activations of {family}" * made.is_counted)
