"""Parts of a layer that are computed again on their own, as Megatron-core does it in two ways.

Megatron-core 0.16.1, core/tensor_parallel/random.py: ``CheckpointFunction`` runs a part again with a backward
pass of its own; ``CheckpointWithoutOutput`` lets go of what a part has made, and fills it again before others
read it.
"""

from memplan.graph.core.segments import Region
from memplan.graph.core.tensors import Tensor
from memplan.graph.megatron.context import MegatronContext


def recompute_since(c: MegatronContext, start: int, given: tuple[Tensor, ...]) -> None:
    """Drop what a part of the layer keeps; what it was given stays (``CheckpointFunction``)."""
    segment = c.tape.segment
    operations = segment.operations[start:]
    result = operations[-1].outputs[0]
    for operation in operations:
        # What it keeps of its result is the second run's, which stays anyway.
        operation.saved = [each for each in operation.saved if each is not result.storage]
    made = {tensor.storage for operation in operations for tensor in operation.outputs}
    kept = {storage for operation in operations for storage in operation.saved}
    segment.regions.append(
        Region(
            start,
            len(segment.operations),
            frozenset(made & kept),
            given=tuple(dict.fromkeys(each.storage for each in given)),
            result=result,
        )
    )


def discard(
    c: MegatronContext,
    start: int,
    stop: int,
    made: tuple[Tensor, ...],
    *,
    given: tuple[Tensor, ...] = (),
) -> None:
    """Let go of what operations have ``made`` that was read by now; they run again as soon as the gradient
    of what was recorded last is there (``CheckpointWithoutOutput``).

    ``given``: what they read that was made among them, and stays.
    """
    segment = c.tape.segment
    c.tape.touch(*made)
    operations = segment.operations[start:stop]
    own = {tensor.storage for operation in operations for tensor in operation.outputs}
    own -= {each.storage for each in given}
    kept = {storage for operation in segment.operations[start:] for storage in operation.saved}
    segment.regions.append(
        Region(
            start,
            len(segment.operations),
            frozenset(own & kept),
            given=tuple(dict.fromkeys(each.storage for each in given)),
            copied=tuple(dict.fromkeys(each.storage for each in made)),
            rerun=stop,
        )
    )
