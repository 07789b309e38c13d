"""What others read of a model of pictures or sound that is written as a class."""

from memplan.classes.blueprint import blueprint_from
from memplan.classes.sensed.base import SensedModel
from memplan.families.classes import BARE
from memplan.families.request import ReadRequest, checkpoint_dtype, task_named
from memplan.fast_dataclass import replace
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.spec import ModelSpec, Task


def read_sensed(base: SensedModel, reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """The facts of such a model, and the class itself.

    Raises ``ConfigError`` for a config that no such class can be made from.
    """
    kind, family = type(base), request.model_type
    ending = kind.ending(reader, family, request.task)
    task = Task.BASE if ending == BARE else task_named(ending, family) or Task.OTHER
    model = ModelSpec(
        name=request.name,
        family=family,
        task=task,
        vocab_size=base.vocab,
        hidden_size=base.width,
        context_length=base.context_length(reader),
        stacks=(),
        head=HeadSpec(tied=base.tied),
        num_labels=request.labels(reader),
        checkpoint_dtype=checkpoint_dtype(reader),
        recomputes=base.recomputes,
        eager_attention_only=base.eager_only,
        blueprint=blueprint_from(reader, family),
        source=reader.source,
    )
    named = kind.named_task(reader, model)
    named(reader, model, kind)  # it refuses what its head cannot be made from
    left_out = named.is_counted or base.left_out(ending)
    return replace(
        model, **base.senses(named),
        activations_left_out=f"activations of {family}{base.counted_as}" * left_out,
    )  # fmt: skip
