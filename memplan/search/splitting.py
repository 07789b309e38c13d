"""A setup with its model split further: what is advised where sharding states is not enough."""

from collections.abc import Iterator
from contextlib import suppress

from memplan.errors import SetupError
from memplan.fast_dataclass import replace
from memplan.search.planning.degrees import LEAST_CONTEXT_TOKENS, MICRO_BATCHES_OF_A_STAGE
from memplan.training.choices_of_kernels.kernels import LossKernel
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup


def split_further(setup: TrainingSetup, sharded: TrainingSetup) -> Iterator[TrainingSetup]:
    """Ways to split a model over the GPUs that there are, the usual ones first.

    Long sequences are shared by ranks first (from 8k tokens on), then layers are split inside a node,
    then both; Megatron's engine keeps to itself and takes stages last. ``sharded`` is the setup under an
    engine that splits models and shards what is left.
    """
    own = setup.chosen_engine is Engine.MEGATRON
    base = setup if own else sharded
    contexts = _shared(base)
    tensors = _doublings(base.tensor_parallel, base.gpus_per_node)
    most = max(tensors, default=1)
    for context in contexts:
        yield from _with(base, context=context)
    for tensor in tensors:
        yield from _with(base, tensor=tensor)
    for context in contexts:
        for tensor in tensors:
            yield from _with(base, tensor=tensor, context=context)
    if own:
        for stages in _doublings(base.pipeline_parallel, base.num_gpus // most):
            yield from _with(base, tensor=most, stages=stages)


def _shared(setup: TrainingSetup) -> list[int]:
    """Ranks that may share a sequence, more than do."""
    most = (setup.seq_len or 1) // LEAST_CONTEXT_TOKENS
    return _doublings(setup.context_parallel, min(most, setup.gpus_per_node))


def _doublings(degree: int, most: int) -> list[int]:
    """Degrees above one, up to another.

    >>> _doublings(2, 8)
    [4, 8]
    """
    found = []
    while degree * 2 <= most:
        degree *= 2
        found.append(degree)
    return found


def _with(
    setup: TrainingSetup, *, tensor: int = 1, context: int = 1, stages: int = 1
) -> Iterator[TrainingSetup]:
    """The setup with these degrees where they are above its own, or nothing where they cannot be."""
    fields: dict[str, object] = {}
    if tensor > 1:
        plain = setup.chosen_kernels.loss is LossKernel.EAGER
        fields |= {"tensor_parallel": tensor, "sequence_parallel": True, "loss_parallel": plain}
    if context > 1:
        fields["context_parallel"] = context
    if stages > 1:
        steps = max(setup.gradient_accumulation_steps, MICRO_BATCHES_OF_A_STAGE * stages)
        fields |= {"pipeline_parallel": stages, "gradient_accumulation_steps": steps}
    with suppress(SetupError):
        yield replace(setup, **fields)  # type: ignore[arg-type]
