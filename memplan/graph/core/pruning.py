"""What of a segment leads to nothing: its operations keep nothing, and its weights have no gradient."""

from memplan.graph.core.segments import Segment
from memplan.graph.core.tensors import Parameter, Storage


def prune(segment: Segment) -> set[Storage]:
    """Let go of what none of the segment's output is made from, once the segment is over.

    Returns what the graph of the rest keeps.
    """
    assert segment.output is not None
    needed = {segment.output}
    idle: set[Parameter] = set()
    used: set[Parameter] = set()
    last = len(segment.operations) - 1
    made: set[Storage] = set()
    for operation in reversed(segment.operations):
        weights = {each for each in operation.inputs if isinstance(each, Parameter)}
        if needed.isdisjoint(operation.outputs):
            idle |= weights
            made.update(operation.saved)
            operation.forget()
        else:
            needed.update(operation.inputs)
            used |= weights
    if not segment.checkpointed:
        for storage in made:
            if storage.segment == segment.index:
                storage.last_read = last
    for weight in idle - used:
        weight.unused = True
    return made
