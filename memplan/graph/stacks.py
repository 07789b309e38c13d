"""What models of one stack and of two have in common: runs of layers, the output matrix, modules."""

from itertools import pairwise

from memplan.fast_dataclass import replace
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.model.parameters import ParameterBlock
from memplan.model.spec import ModelSpec, Task
from memplan.training.choices_of_kernels.kernels import AttentionKernel
from memplan.training.layer_choice import CheckpointedLayers

WHOLE_MODEL = "whole model"
"""The module of the task's class."""
BASE_MODEL = "base model"
"""The one inside it that every task shares."""


def new_tape(model: ModelSpec, options: TapeOptions) -> Tape:
    """An empty tape for a model of transformers, whose class may have eager attention alone."""
    t = Tape(options, source=model.source)
    if model.eager_attention_only and t.kernels.attention is AttentionKernel.SDPA:
        t.kernels = replace(t.kernels, attention=AttentionKernel.EAGER)
    return t


def counted_parts(model: ModelSpec) -> tuple[ParameterBlock, ...]:
    """What is merely counted of the class that the task asks for."""
    if model.task is Task.BASE and model.base_tables is not None:
        return model.base_tables
    return model.tables


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
