"""How an operation's weight is split over the ranks of a tensor-parallel group."""

from enum import Enum


class Split(Enum):
    """What of a linear layer one rank has, as the layer's own block declares it."""

    WHOLE = "whole"
    """All of it."""
    COLUMN = "column"
    """Some of its outputs: heads, or a share of a network's width; each rank reads all inputs."""
    ROW = "row"
    """Some of its inputs, those that the rank's columns gave; the ranks' results are added up."""
    VOCABULARY = "vocabulary"
    """Some of the vocabulary's rows: columns, whose results are joined unless the loss is split too."""
