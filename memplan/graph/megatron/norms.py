"""Norms as one kernel: apex's, and TransformerEngine's own."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.megatron.context import MegatronContext
from memplan.model.norms import NormKind, NormSpec

LAYER_NORMS = frozenset({NormKind.LAYER, NormKind.LAYER_ONE_PLUS})


def is_layer_norm(spec: NormSpec) -> bool:
    """Whether it subtracts the mean: it keeps two statistics a row then, and has a bias."""
    return spec.kind in LAYER_NORMS


def norm_weights(c: MegatronContext, spec: NormSpec, name: str, width: int) -> list[Parameter]:
    """Weight and bias, whole on every rank."""
    t = c.tape
    found = [t.parameter(f"{name}.weight", width)]
    if is_layer_norm(spec):
        found.append(t.parameter(f"{name}.bias", width))
    return found


def norm(c: MegatronContext, x: Tensor, spec: NormSpec, name: str, width: int) -> Tensor:
    """Keeps its input, and in fp32 a row's root, of a layer norm also its mean."""
    t = c.tape
    weights = norm_weights(c, spec, name, width)
    rows = x.numel // width
    out = t.tensor(x.numel, x.dtype)
    statistics = [t.tensor(rows, DType.FP32) for _ in weights]
    kind = OperationKind.LAYER_NORM if is_layer_norm(spec) else OperationKind.RMS_NORM
    t.record(
        kind, (x, *weights), (out, *statistics), saves=(x, *statistics, weights[0]),
        gradients=(Gradient.FRESH,) * (1 + len(weights)), in_python=True,
    )  # fmt: skip
    return out
