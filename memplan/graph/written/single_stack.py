"""A model of no stack that is no class yet, on the tape: towers by themselves, or parts that are merely counted."""

from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.stacks import counted_parts, new_tape
from memplan.model.spec import ModelSpec


def record_single_stack(model: ModelSpec, options: TapeOptions) -> Tape:
    """Write the training step of a model of tables on a new tape."""
    t = new_tape(model, options)
    parts, tied = counted_parts(model), model.head.tied
    # What a base model inside reads may not be known though its task's class is.
    if not model.activations_left_out and all(block.body is not None for block in parts):
        from memplan.graph.towers.flow import record_flow  # only for towers by themselves

        record_flow(t, parts, tied=tied)
        return t
    from memplan.graph.counted import record_tables  # only for parts that are merely counted

    record_tables(t, parts, tied=tied)
    return t
