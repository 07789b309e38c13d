"""Models that are counted whole: what their readers share.

A type whose attention or convolutions are not written down as operations is read into tables of
weights. Its parameters, gradients and optimizer states are exact; its activations are left out,
and the estimate says so.
"""

from collections.abc import Callable

from memplan.families.request import ReadRequest, checkpoint_dtype
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task, Tying

Declare = Callable[[ParameterTable, Task], None]
"""Declares everything that the class for a task owns."""


def counted_model(
    reader: ConfigReader,
    request: ReadRequest,
    declare: Declare,
    *,
    task: Task,
    vocab_size: int,
    hidden_size: int,
    context_length: int,
    tied: bool,
    tying: Tying = Tying.CLEAR,
) -> ModelSpec:
    """A model of tables only: those of the task's class, and those of the base model."""
    tables, base_tables = ParameterTable(), ParameterTable()
    declare(tables, task)
    declare(base_tables, Task.BASE)
    known = all(block.body is not None for block in tables.blocks())
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=task,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        context_length=context_length,
        stacks=(),
        head=HeadSpec(tied=tied),
        num_labels=request.labels(reader),
        tying=tying,
        checkpoint_dtype=checkpoint_dtype(reader),
        tables=tables.blocks(),
        base_tables=base_tables.blocks(),
        activations_left_out="" if known else f"activations of {request.model_type}",
        source=reader.source,
    )
