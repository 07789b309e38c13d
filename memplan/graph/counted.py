"""A part of a layer that is counted but not written down: weights, no activations of its own."""

from memplan.graph.segments import Gradient
from memplan.graph.tape import Tape
from memplan.graph.tensors import ExpertShare, Parameter, Tensor
from memplan.model.mixers import CountedSpec
from memplan.model.parameters import ParameterShape


def counted_part(t: Tape, x: Tensor, spec: CountedSpec, hidden_size: int) -> Tensor:
    """Read hidden states and give new ones; what happens in between is left out.

    Its FLOPs are those of its matrices, each of which every token passes once.
    """
    weights = [_declared(t, each) for each in spec.parameters]
    out = t.tensor(x.numel, x.dtype)
    tokens = x.numel // hidden_size
    matrices = sum(weight.active_numel for weight in weights if len(weight.shape) > 1)
    t.record(
        "counted", (x, *weights), (out,), gradients=(Gradient.FRESH,) * (1 + len(weights)),
        flops=2 * tokens * matrices,
    )  # fmt: skip
    return out


def _declared(t: Tape, each: ParameterShape) -> Parameter:
    experts = None
    if each.num_experts:
        experts = ExpertShare(each.num_experts, each.num_active, each.num_matrices)
    return t.parameter(
        f"{each.module}.{each.name}", *each.shape, module=each.module, experts=experts
    )
