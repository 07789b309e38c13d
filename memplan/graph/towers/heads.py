"""Attention of classes that do not attend as others do."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.operations.elementwise import add_in_place, dropout, softmax
from memplan.graph.operations.products import matmul_weight
from memplan.graph.towers.state import Flow
from memplan.model.towers.layers import BiasedHeads, LayerBody


def biased_attention(t: Tape, x: Tensor, body: LayerBody, heads: BiasedHeads, flow: Flow) -> Tensor:
    """``WavLMAttention``: what it returns beside its result lives until the layer returns."""
    name, spec, size = body.names.attention, body.attention, body.size
    bias, summed = _gated_bias(t, x, body, heads, flow)
    rows = x.numel // size
    pairs = bias.numel
    addends = _joined_biases(t, name, size)
    projected = [
        _across(t, x, t.parameter(f"{name}.{part}.weight"), addend)
        for part, addend in zip(("q_proj", "k_proj", "v_proj"), addends, strict=True)
    ]
    query, key, value = projected
    scaled = t.scale(query)
    scores = _scores(t, bias, scaled, key, spec.head_dim)
    weights = softmax(t, scores)
    t.touch(scores)
    dropped = dropout(t, weights, spec.dropout)
    out = batched_matmul(t, dropped, value, rows * size, pairs // rows // spec.num_heads)
    joined = t.contiguous(out)
    t.touch(out)
    output = f"{name}.{body.names.output}"
    result = matmul_weight(
        t, joined, t.parameter(f"{output}.weight"), t.parameter(f"{output}.bias")
    )
    mean = t.tensor(pairs // spec.num_heads, dropped.dtype)
    t.record(OperationKind.MEAN, (dropped,), (mean,), gradients=(Gradient.FRESH,))
    t.touch(query, key, value, scaled, joined, addends[0])
    t.touch(summed, bias)
    t.linger(mean)
    return result


def _gated_bias(
    t: Tape, x: Tensor, body: LayerBody, heads: BiasedHeads, flow: Flow
) -> tuple[Tensor, Tensor]:
    """Two gates for each head and position, out of a small linear layer on its share of ``x``.

    Beside the bias what the gates are made of, whose name stays until the function returns.
    """
    spec = body.attention
    weight, addend = t.parameter(f"{heads.gate}.weight"), t.parameter(f"{heads.gate}.bias")
    small = _across(t, x, weight, t.cast_weight(addend))
    places = x.numel // body.size * spec.num_heads
    dtype = x.dtype if t.autocast is None else DType.FP32
    summed = t.tensor(2 * places, dtype)
    t.record(OperationKind.SUM, (small,), (summed,), gradients=(Gradient.FRESH,))
    t.touch(small)
    both = t.elementwise(OperationKind.SIGMOID, summed)
    first, second = t.split(both, places, places)
    inner = t.shift(t.mul(second, t.parameter(heads.factor)))
    gate = t.shift(t.mul(first, inner))
    assert flow.distances is not None
    bias = t.mul(gate, flow.distances)
    t.touch(gate)
    return bias, summed


def _across(t: Tape, x: Tensor, weight: Parameter, addend: Tensor) -> Tensor:
    """A linear layer on what lies across: cast, copied into rows, multiplied, its bias added to that."""
    addend = addend if t.autocast is None else t.cast(addend, t.autocast)
    t.cast_weight(weight)
    read = x if t.autocast is None else t.cast(x, t.autocast)
    rows = t.contiguous(read)
    product = matmul_weight(t, rows, weight)
    if read is not x:
        t.touch(read)
    return t.add(product, addend) if t.decomposed else add_in_place(t, product, addend)


def _joined_biases(t: Tape, name: str, size: int) -> list[Tensor]:
    """The projections' biases, joined and cut again, as one function takes them."""
    biases = [t.parameter(f"{name}.{part}.bias") for part in ("q_proj", "k_proj", "v_proj")]
    return t.split(t.concatenate(*biases), size, size, size)


def _scores(t: Tape, bias: Tensor, query: Tensor, key: Tensor, head_dim: int) -> Tensor:
    """``baddbmm``: products and what is added to them in one."""
    added = bias if t.autocast is None else t.cast(bias, t.autocast)
    out = t.tensor(bias.numel, query.dtype)
    t.record(
        OperationKind.BADDBMM, (added, query, key), (out,), saves=(query, key),
        gradients=(Gradient.ALIAS, Gradient.FRESH, Gradient.FRESH),
        flops=2 * out.numel * head_dim,
    )  # fmt: skip
    return out
