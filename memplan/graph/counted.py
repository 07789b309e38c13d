"""Weights that nothing is computed with, and that adapters stand on all the same."""

from memplan.graph.core.overlay import BASE_LAYER
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter


def idle_linear(t: Tape, weight: Parameter) -> None:
    """Note that a weight is the matrix of a linear layer that no gradient reaches, nor its adapter."""
    weight.unused = weight.of_linear = True
    start = len(t.segment.parameters)
    _adapted(t, weight)
    for each in t.segment.parameters[start:]:
        each.unused = True


def _adapted(t: Tape, weight: Parameter) -> Parameter:
    """With the adapter that stands on its module, where one does."""
    module = weight.module.removesuffix(BASE_LAYER)
    if t.adaptation is not None and module in t.adapted and weight.name.endswith(".weight"):
        t.adaptation.declare(t, weight, module)
    if t.adaptation is not None and t.adapted:
        t.adaptation.declare_on_weight(t, weight)
    return weight
