"""Megatron's own linear layers and the collectives around them.

Megatron-core 0.16.1, core/tensor_parallel/layers.py (``ColumnParallelLinear``, ``RowParallelLinear``,
``LinearWithGradAccumulationAndAsyncCommunication``) and mappings.py.
"""

from memplan.graph.megatron.context import MegatronContext
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.segments import RESULT, Gradient
from memplan.graph.tensors import Parameter, Tensor


def weight_of(c: MegatronContext, name: str, out_features: int, in_features: int) -> Parameter:
    """A split matrix: this rank's part, given its own sizes."""
    weight = c.tape.parameter(f"{name}.weight", out_features, in_features)
    weight.ranks = c.degree
    return weight


def bias_of(c: MegatronContext, name: str, size: int, *, ranks: int) -> Parameter:
    """A bias: split over the columns, or the same on all."""
    bias = c.tape.parameter(f"{name}.bias", size)
    bias.ranks = ranks
    return bias


def column_linear(
    c: MegatronContext, x: Tensor, weight: Parameter, bias: Parameter | None = None
) -> Tensor:
    """A product with this rank's columns, of all tokens.

    With sequence parallelism the input is gathered into the global buffer, in backward again; its
    gradient is made whole, and added up into a share. A ``bias`` is added here.
    """
    t = c.tape
    out_features, in_features = weight.shape
    out = t.tensor(c.tokens * out_features, c.dtype)
    own = Gradient.NONE if c.fuses_gradients else Gradient.FRESH
    backward: tuple[int, ...] = ()
    if c.sequence:
        c.use_global_buffer(c.tokens * in_features)
        backward = (x.storage.num_bytes * c.degree, RESULT)
    inputs: tuple[Tensor, ...] = (x, weight)
    gradients: tuple[int, ...] = (Gradient.FRESH, own)
    if bias is not None:
        inputs, gradients = (*inputs, bias), (*gradients, Gradient.FRESH)
    t.record(
        OperationKind.LINEAR, inputs, (out,), saves=(x, weight), gradients=gradients,
        forward_scratch_bytes=(out.storage.num_bytes, RESULT) if bias is not None else (),
        backward_scratch_bytes=backward, flops=2 * c.tokens * in_features * out_features,
        in_python=True,
    )  # fmt: skip
    return out


def row_linear(c: MegatronContext, x: Tensor, weight: Parameter) -> Tensor:
    """A product with this rank's rows, the ranks' results added up: whole, or each its share."""
    t = c.tape
    out_features, in_features = weight.shape
    out = t.tensor(c.tokens * out_features, c.dtype)
    own = Gradient.NONE if c.fuses_gradients else Gradient.FRESH
    t.record(
        OperationKind.LINEAR, (x, weight), (out,), saves=(x, weight),
        gradients=(Gradient.FRESH, own), flops=2 * c.tokens * in_features * out_features,
        in_python=True,
    )  # fmt: skip
    return added_up(c, out)


def added_up(c: MegatronContext, x: Tensor) -> Tensor:
    """Partial results of all tokens: all-reduced where they lie, or scattered into shares."""
    if not c.sequence:
        return all_reduced(c, x)
    t = c.tape
    out = t.tensor(x.numel // c.degree, x.dtype)
    t.record(OperationKind.REDUCE_SCATTER, (x,), (out,), gradients=(Gradient.FRESH,))
    t.touch(x)
    return out


def all_reduced(c: MegatronContext, x: Tensor) -> Tensor:
    """Added up over the ranks where it lies."""
    if c.degree == 1:
        return x
    out = c.tape.view(x, x.numel)
    c.tape.record(OperationKind.ALL_REDUCE, (x,), (out,), gradients=(Gradient.ALIAS,))
    return out
