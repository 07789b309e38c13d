"""How stacks deal layers to a pipeline's stages where a file does not name each stage's."""


def dealt_layers(
    num_layers: int, num_stages: int, *, first: int = 0, last: int = 0
) -> tuple[int, ...] | None:
    """Layers of each stage, what is left over to the first ones; None where all have as many.

    ``first`` and ``last`` are layers that the embedding and the head count as (torchtitan,
    distributed/pipeline_parallel.py, ``generate_llm_fqn_per_model_part``; NeMo AutoModel,
    components/distributed/pipelining/functional.py).

    >>> dealt_layers(94, 44)[:8], dealt_layers(32, 4, first=1, last=1), dealt_layers(32, 4)
    ((3, 3, 3, 3, 3, 3, 2, 2), (8, 9, 8, 7), None)
    """
    each, rest = divmod(num_layers + first + last, num_stages)
    counts = [each + (number < rest) for number in range(num_stages)]
    counts[0] -= first
    counts[-1] -= last
    return None if len(set(counts)) == 1 else tuple(counts)
