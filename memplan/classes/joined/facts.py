"""What others read of a language model that sees."""

from collections.abc import Callable

from memplan.classes.base import Base
from memplan.classes.blueprint import blueprint_from
from memplan.classes.joined.base import JoinedModel, base_task
from memplan.families.request import ReadRequest, checkpoint_dtype
from memplan.fast_dataclass import replace
from memplan.model.config import ConfigReader
from memplan.model.joining import TowerJoin
from memplan.model.spec import ModelSpec

FactsOf = Callable[[Base, ConfigReader, ReadRequest], ModelSpec]


def read_joined(
    base: JoinedModel, reader: ConfigReader, request: ReadRequest, facts_of: FactsOf
) -> ModelSpec:
    """The facts of its text model, which ``facts_of`` reads, and what it sees.

    Raises ``ConfigError`` for a config that no such class can be made from.
    """
    part = base.part
    inner = replace(request, model_type=part.model_type, task=base_task(request.task))
    text = facts_of(base.words, part.reader, inner)
    tied = base.ties_head(reader, text.head.tied)
    head = replace(
        text.head,
        tied=tied,
        num_rows=0 if tied else base.output_rows(reader),
        loss_upcast=text.head.loss_upcast and not base.plain_logits,
    )
    says_dtype = reader.raw("dtype", "torch_dtype") is not None
    model = replace(
        text,
        family=request.model_type,
        head=head,
        picture=replace(base.picture, stacks=base.owners()),
        sound=base.sound,
        join=TowerJoin(joining=base.joining),
        checkpoint_dtype=checkpoint_dtype(reader if says_dtype else part.reader),
        blueprint=blueprint_from(reader, request.model_type),
    )
    return base.told(model, request.task)
