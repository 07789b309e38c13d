"""One vector of each picture."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.paths import attend
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.state import Flow
from memplan.model.attention import AttentionSpec
from memplan.model.towers.compared.pooling import (
    AttentionPoolerBody,
    PoolerBody,
    PoolingBody,
    SquaresBody,
)


def pooler(t: Tape, x: Tensor, body: PoolerBody, flow: Flow) -> Tensor:
    """The first token's vector, normed."""
    first = t.slice(x, flow.items * body.size)
    return layer_norm(t, first, body.norm, body.size, strided=first.numel < x.numel)


def squares(t: Tape, x: Tensor, body: SquaresBody, flow: Flow) -> Tensor:
    """``Gemma4VisionPooler``, and what ``Gemma4VisionModel`` makes of its result."""
    dtype, size = x.dtype, body.size
    places = flow.patches // body.side**2
    padding = t.tensor(flow.items * flow.patches, DType.BOOL)
    t.record(OperationKind.EQ, (), (padding,))
    filled = t.tensor(x.numel, dtype)
    t.record(
        OperationKind.WHERE, (x, padding), (filled,), saves=(padding,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    whole = t.tensor(flow.items * flow.patches * places, DType.INT64)
    t.record(OperationKind.EYE, (), (whole,))
    counted = t.tensor(whole.numel, DType.FP32)
    t.record(OperationKind.TO, (whole,), (counted,))
    shares = t.scale(counted, OperationKind.DIV)
    given = t.cast(filled, DType.FP32)
    if t.autocast is not None:
        shares, given = t.cast(shares, t.autocast), t.cast(given, t.autocast)
    pooled_rows = t.tensor(flow.items * places * size, given.dtype)
    t.record(
        OperationKind.MATMUL, (shares, given), (pooled_rows,), saves=(shares,),
        gradients=(Gradient.NONE, Gradient.FRESH),
        flops=2 * shares.numel * size,
    )  # fmt: skip
    full = t.scale(t.cast(t.cast(pooled_rows, dtype), DType.FP32))
    rows = flow.items * body.tokens
    numbers = t.tensor(2 * rows, DType.INT64)
    t.record(OperationKind.ARANGE, (), (numbers,))
    out = t.tensor(rows * size, DType.FP32)
    t.record(
        OperationKind.INDEX, (full, numbers), (out,), saves=(numbers,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    if body.standardized:
        out = t.shift(out)
        factors = t.tensor(size, DType.FP32)
        t.record(OperationKind.TO, (), (factors,))
        out = t.mul(out, factors)
    return t.cast(out, dtype)


def attention_pooler(t: Tape, x: Tensor, body: AttentionPoolerBody, flow: Flow) -> Tensor:
    """``SiglipMultiheadAttentionPoolingHead``: ``torch.nn.MultiheadAttention`` of one query."""
    size, items = body.size, flow.items
    name = f"{body.module}.attention"
    probe = t.parameter(f"{body.module}.probe")
    spread = t.tensor(items * size, probe.dtype)
    t.record(OperationKind.REPEAT, (probe,), (spread,), gradients=(Gradient.FRESH,))
    weight, bias = t.parameter(f"{name}.in_proj_weight"), t.parameter(f"{name}.in_proj_bias")
    factor, addend = t.cast_weight(weight), t.cast_weight(bias)
    read = x if t.autocast is None else t.cast(x, t.autocast)
    asked = spread if t.autocast is None else t.cast(spread, t.autocast)
    tokens = x.numel // size
    query = t.tensor(items * size, asked.dtype)
    keys = t.tensor(tokens * 2 * size, read.dtype)
    for source, out, rows in ((asked, query, items), (read, keys, tokens)):
        t.record(
            OperationKind.LINEAR, (source, factor, addend), (out,), saves=(source, factor),
            gradients=(Gradient.FRESH, Gradient.FRESH, Gradient.SUMMED),
            flops=2 * rows * size * out.numel // rows,
        )  # fmt: skip
    split = t.contiguous(keys)
    # Each half is selected: its gradient is a zero-filled tensor of both.
    key, value = t.slice(split, tokens * size), t.slice(split, tokens * size)
    spec = AttentionSpec(
        num_heads=body.num_heads, num_kv_heads=body.num_heads, head_dim=size // body.num_heads,
        causal=False,
    )  # fmt: skip
    out = attend(t, query, key, value, Shape(items, 1, tokens // items, spec), None)
    out = linear(t, out, f"{name}.out_proj", size, size, bias=True)
    middle = layer_norm(t, out, f"{body.module}.layernorm", size)
    raised = linear(t, middle, f"{body.module}.mlp.fc1", size, body.inner_size, bias=True)
    active = activation(t, raised, body.activation)
    fed = linear(t, active, f"{body.module}.mlp.fc2", body.inner_size, size, bias=True)
    return t.slice(t.add(out, fed), items * size)


def write_pooling(t: Tape, x: Tensor, body: PoolingBody, flow: Flow) -> Tensor:
    """The operations of any body of ``memplan.model.towers.compared.pooling``."""
    match body:
        case SquaresBody():
            return squares(t, x, body, flow)
        case PoolerBody():
            return pooler(t, x, body, flow)
        case AttentionPoolerBody():
            return attention_pooler(t, x, body, flow)
