"""What models of one stack and of two have in common: runs of layers, the output matrix, modules."""

from itertools import pairwise

from memplan.graph.core.options import TapeOptions
from memplan.training.layer_choice import CheckpointedLayers

WHOLE_MODEL = "whole model"
"""The module of the task's class."""
BASE_MODEL = "base model"
"""The one inside it that every task shares."""


def cut_layers(options: TapeOptions, num_layers: int) -> list[tuple[int, int, bool, bool]]:
    """Stretches of a tower's layers, from and up to, and whether each is checkpointed and frozen."""
    recomputed = checkpointed_layers(options.checkpointed_layers, num_layers)
    cuts = {0, num_layers}
    for first, last in (*recomputed.ranges, *options.freeze.layer_ranges):
        cuts |= {first, last + 1}
    edges = sorted(cut for cut in cuts if 0 <= cut <= num_layers)
    return [
        (low, high, low in recomputed, options.freeze.freezes_layer(low))
        for low, high in pairwise(edges)
    ]


def checkpointed_layers(layers: float | CheckpointedLayers, num_layers: int) -> CheckpointedLayers:
    """Which of a stack's layers are recomputed; a share is of the first ones."""
    if isinstance(layers, CheckpointedLayers):
        return layers
    return CheckpointedLayers.first(round(layers * num_layers))


def _between(cuts: set[int], low: int, high: int) -> list[int]:
    return [cut for cut in cuts if low < cut < high]
