"""CPU memory of one rank: the model while it is loaded, and whatever is offloaded.

Legend: W bytes of a weight, P elements of this rank's part (stage 3: of its shards), n the largest
parameter, all in elements.
"""

from collections.abc import Sequence

from memplan.memory.account import HostMemory

MASTER_BYTES = 4
"""An fp32 element: master weights, gradients and each of the optimizer's states on the CPU."""


def replicated_host(
    *,
    model_bytes: int,
    weight_bytes: int,
    part_numel: int,
    largest_numel: int,
    num_states: int,
    kept_gradients_bytes: int,
    pinned: bool,
) -> HostMemory:
    """Stages 1 and 2 with the optimizer on the CPU (stage_1_and_2.py, ``__init__``).

    Master weights, fp32 gradients, the optimizer's states, a 16-bit staging copy of the part and a
    staging buffer of the largest parameter. While they are set up, page-locking keeps a second copy
    of the staging buffer and of the gradients. ``kept_gradients_bytes``: what stage 2 accumulates
    over micro-steps.
    """
    staging = weight_bytes * (part_numel + largest_numel)
    ready = 2 * MASTER_BYTES * part_numel + staging
    copies = (MASTER_BYTES + weight_bytes) * part_numel if pinned else 0
    states = num_states * MASTER_BYTES * part_numel
    return HostMemory(
        held_bytes=ready + states + kept_gradients_bytes,
        load_bytes=max(model_bytes, ready + copies),
    )


def sharded_host(
    *,
    model_bytes: int,
    weight_bytes: int,
    gradient_bytes: int,
    groups: Sequence[int],
    num_states: int,
    offloads_param: bool,
    pinned: bool,
) -> HostMemory:
    """Stage 3 with the optimizer on the CPU (stage3.py, ``_setup_for_real_optimizer``).

    ``groups``: elements of this rank's shards in each sub-group. ``model_bytes``: the whole model,
    while it is on the CPU and shards with it; 0 with zero.Init. A zero-filled gradient buffer of the
    largest group is there while the groups' own gradients are made, each of them page-locked
    through a copy.
    """
    total = sum(groups)
    shards = weight_bytes * total if offloads_param else 0
    base = shards + MASTER_BYTES * total
    peak = base
    made = 0
    for group in groups:
        made += MASTER_BYTES * group
        copy = MASTER_BYTES * group if pinned else 0
        peak = max(peak, base + MASTER_BYTES * max(groups) + made + copy)
    accumulated = gradient_bytes * total
    ready = base + MASTER_BYTES * total + accumulated
    peak = max(peak, ready + (accumulated if pinned else 0))
    return HostMemory(
        held_bytes=ready + num_states * MASTER_BYTES * total,
        load_bytes=max(model_bytes, peak),
    )
