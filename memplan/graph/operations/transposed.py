"""Products with a weight that a class transposes itself: Falcon's ``FalconLinear``.

Autocast keeps no cached copy of such a weight, and the bias is added in a second operation.
"""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.model.parameters import WeightRole


def transposed_linear(
    t: Tape,
    x: Tensor,
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    role: WeightRole = WeightRole.MATRIX,
) -> Tensor:
    """``input @ weight.T``, and what an adapter adds to it."""
    adaptation = t.adaptation if name in t.adapted else None
    if adaptation is not None:
        x = adaptation.before_linear(t, x, in_features, name)
    weight = t.parameter(f"{name}.weight", out_features, in_features, role=role)
    addend = t.parameter(f"{name}.bias", out_features, role=WeightRole.OTHER) if bias else None
    out = _product(t, x, weight, addend)
    return out if adaptation is None else adaptation.beside_linear(t, x, out, weight, addend, name)


def _product(t: Tape, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
    out_features, in_features = weight.shape
    factor: Tensor = weight
    if t.autocast is not None:
        # C++ evaluates the arguments of autocast's wrapper from the last to the first.
        factor = t.cast(weight, t.autocast)
        x = t.cast(x, t.autocast)
    rows = x.numel // in_features
    out = t.tensor(rows * out_features, x.dtype)
    saves = [factor] if x.requires_grad else []
    if weight.requires_grad:
        saves.append(x)
    t.record(
        OperationKind.LINEAR, (x, factor), (out,), saves=saves, gradients=(Gradient.VIEW, Gradient.VIEW),
        flops=2 * rows * in_features * out_features,
    )  # fmt: skip
    return out if bias is None else t.add(out, bias)
