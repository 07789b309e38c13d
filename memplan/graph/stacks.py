"""What models of one stack and of two have in common: runs of layers, the output matrix, modules."""

from itertools import pairwise

from memplan.fast_dataclass import dataclass
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.model.layers import LayerSpec, StackSpec
from memplan.training.layer_choice import CheckpointedLayers

WHOLE_MODEL = "whole model"
"""The module of the task's class."""
BASE_MODEL = "base model"
"""The one inside it that every task shares."""


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """Equal layers that are also trained in the same way."""

    count: int
    layer: LayerSpec
    checkpointed: bool
    frozen: bool


def split_runs(t: Tape, stack: StackSpec) -> list[TrainedRun]:
    """The stack's runs, cut where checkpointing or freezing begins or ends.

    A share of checkpointed layers means the first ones, as torchtitan counts them.
    """
    options = t.options
    whole = getattr(options.freeze, stack.name)
    recomputed = checkpointed_layers(options.checkpointed_layers, stack.num_layers)
    cuts = {0, stack.num_layers}
    for first, last in recomputed.ranges:
        cuts |= {first, last + 1}
    for first, last in options.freeze.layer_ranges:
        cuts |= {first, last + 1}
    if options.adaptation is not None:
        cuts |= options.adaptation.cuts(f"{stack.name}.layers")
    if options.trained is not None:
        cuts |= options.trained.cuts(f"{stack.name}.layers")
    parts: list[TrainedRun] = []
    start = 0
    for run in stack.runs:
        inside = sorted(_between(cuts, start, start + run.count))
        for low, high in pairwise([start, *inside, start + run.count]):
            frozen = whole or options.freeze.freezes_layer(low)
            checkpointed = low in recomputed
            parts.append(TrainedRun(high - low, run.layer, checkpointed, frozen))
        start += run.count
    return parts


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
