"""What models of one stack and of two have in common: runs of layers, the output matrix, modules."""

from memplan.training.layer_choice import CheckpointedLayers

WHOLE_MODEL = "whole model"
"""The module of the task's class."""
BASE_MODEL = "base model"
"""The one inside it that every task shares."""


def checkpointed_layers(layers: float | CheckpointedLayers, num_layers: int) -> CheckpointedLayers:
    """Which of a stack's layers are recomputed; a share is of the first ones."""
    if isinstance(layers, CheckpointedLayers):
        return layers
    return CheckpointedLayers.first(round(layers * num_layers))
