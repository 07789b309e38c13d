"""Products with split weights, and the collectives around them and inside them.

Megatron-core 0.16.1, core/tensor_parallel/layers.py (``ColumnParallelLinear``, ``RowParallelLinear``,
``LinearWithGradAccumulationAndAsyncCommunication``) and mappings.py.
"""

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.megatron.context import MegatronContext
from memplan.training.splitting.exchange import NO_SENDS, ExchangeKind, Group, Send, Sends

ONE_OF_TWO = 0.5
"""Of a product's backward pass, the gradient of its input, or that of its weight."""


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


def multiplied(
    c: MegatronContext,
    x: Tensor,
    weight: Parameter,
    numel: int,
    *,
    flops: int,
    bias: Parameter | None = None,
    forward_scratch_bytes: tuple[int, ...] = (),
    backward_scratch_bytes: tuple[int, ...] = (),
    sends: Sends = NO_SENDS,
) -> Tensor:
    """A product that keeps what it is given; its weight's gradient may be written where the main one lies."""
    t = c.tape
    out = t.tensor(numel, c.dtype)
    inputs: tuple[Tensor, ...] = (x, weight)
    gradients: tuple[int, ...] = (Gradient.FRESH, c.weight_gradient)
    if bias is not None:
        inputs, gradients = (*inputs, bias), (*gradients, Gradient.FRESH)
    t.record(
        OperationKind.LINEAR, inputs, (out,), saves=(x, weight), gradients=gradients,
        forward_scratch_bytes=forward_scratch_bytes, backward_scratch_bytes=backward_scratch_bytes,
        flops=flops, in_python=True, sends=sends,
    )  # fmt: skip
    return out


def column_sends(c: MegatronContext, width: int) -> Sends:
    """What a product with columns sends: the tokens' rows, and in backward their gradients.

    Backward each runs beside one of its two products.
    """
    if c.degree == 1:
        return NO_SENDS
    size = c.tokens * width * c.dtype.num_bytes
    if not c.sequence:
        return Sends(backward=(Send(ExchangeKind.ALL_REDUCE, size, Group.SPLIT, ONE_OF_TWO),))
    gathers, scatters = (
        Send(kind, size, Group.SPLIT, ONE_OF_TWO)
        for kind in (ExchangeKind.ALL_GATHER, ExchangeKind.REDUCE_SCATTER)
    )
    return Sends((gathers._replace(beside=c.beside_products),), (gathers, scatters))


def row_sends(c: MegatronContext, width: int) -> Sends:
    """What a product with rows sends: partial results, which are added up."""
    if c.degree == 1:
        return NO_SENDS
    size, beside = c.tokens * width * c.dtype.num_bytes, c.beside_products
    if not c.sequence:
        return Sends(forward=(Send(ExchangeKind.ALL_REDUCE, size, Group.SPLIT),))
    return Sends(
        forward=(Send(ExchangeKind.REDUCE_SCATTER, size, Group.SPLIT, beside),),
        backward=(Send(ExchangeKind.ALL_GATHER, size, Group.SPLIT, beside * ONE_OF_TWO),),
    )


def column_linear(
    c: MegatronContext, x: Tensor, weight: Parameter, bias: Parameter | None = None
) -> Tensor:
    """A product with this rank's columns, of all tokens.

    With sequence parallelism the input is gathered into the global buffer, in backward again; its
    gradient is made whole, and added up into a share. A ``bias`` is added here.
    """
    out_features, in_features = weight.shape
    numel = c.tokens * out_features
    backward: tuple[int, ...] = ()
    if c.sequence:
        c.use_global_buffer(c.tokens * in_features)
        backward = (x.storage.num_bytes * c.degree, RESULT)
    whole = allocated_bytes(numel, c.dtype)
    return multiplied(
        c, x, weight, numel, bias=bias, flops=2 * c.tokens * in_features * out_features,
        forward_scratch_bytes=(whole, RESULT) if bias is not None else (),
        backward_scratch_bytes=backward, sends=column_sends(c, in_features),
    )  # fmt: skip


def row_linear(c: MegatronContext, x: Tensor, weight: Parameter) -> Tensor:
    """A product with this rank's rows, the ranks' results added up: whole, or each its share."""
    out_features, in_features = weight.shape
    numel = c.tokens * out_features
    return added_up(
        c, multiplied(c, x, weight, numel, flops=2 * c.tokens * in_features * out_features)
    )


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
