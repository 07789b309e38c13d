"""Residual streams that are mixed before and behind each part of a layer (DeepSeek-V4).

transformers 5.23, ``DeepseekV4HyperConnection``: weights are a product of all streams side by side, in
fp32; a part is given the streams' weighted sum, and its output is spread over them again. The weights
that mix the streams are divided by the sums of their columns and rows in turns.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import batched_matmul, broadcast
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import softmax
from memplan.graph.operations.norms import norm, norm_unweighted
from memplan.graph.operations.products import matmul_tensor
from memplan.graph.stack_context import StackContext
from memplan.graph.written.layer_parts import feed_forward_of, mix_tokens
from memplan.model.compressed import StreamsSpec
from memplan.model.layers import LayerSpec

NUM_SCALES = 3
"""Numbers that multiply what is projected: for collapsing, expanding and mixing."""


def expand_streams(t: Tape, x: Tensor, spec: StreamsSpec) -> Tensor:
    """Every stream begins as the embeddings."""
    return broadcast(t, x, x.numel * spec.count)


def streams_layer(
    t: Tape, x: Tensor, layer: LayerSpec, spec: StreamsSpec, context: StackContext
) -> Tensor:
    """Attention, then the network, each between the streams' sum and their mixture."""
    hidden = context.hidden_size
    found = _connected(t, x, "attn_hc", spec, hidden)
    normed = norm(t, found[2], layer.norm, "input_layernorm", hidden)
    made = mix_tokens(t, normed, layer.attention, context)
    middle = _mixed(t, x, made, found[0], found[1], spec)
    earlier = found
    found = _connected(t, middle, "ffn_hc", spec, hidden)
    t.touch(*earlier)
    normed = norm(t, found[2], layer.norm, "post_attention_layernorm", hidden)
    made = feed_forward_of(t, normed, layer, context)
    out = _mixed(t, middle, made, found[0], found[1], spec)
    t.touch(*found)
    return out


def _connected(
    t: Tape, x: Tensor, name: str, spec: StreamsSpec, hidden_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights for expanding and for mixing, and the streams' weighted sum."""
    count, width = spec.count, (2 + spec.count) * spec.count
    tokens = x.numel // (count * hidden_size)
    weight = t.parameter(f"{name}.fn", width, count * hidden_size)
    base, scale = t.parameter(f"{name}.base", width), t.parameter(f"{name}.scale", NUM_SCALES)
    logits = _projected(t, x, weight, count * hidden_size)
    sizes = (count, count, count * count)
    parts = t.split(logits, *(tokens * size for size in sizes))
    addends, factors = t.split(base, *sizes), t.split(scale, 1, 1, 1)
    shifted = (t.add(t.mul(parts[0], factors[0]), addends[0]),)
    before = t.shift(t.elementwise(OperationKind.SIGMOID, shifted[0]))
    shifted = (t.add(t.mul(parts[1], factors[1]), addends[1]),)
    behind = t.scale(t.elementwise(OperationKind.SIGMOID, shifted[0]))
    rows = softmax(t, t.add(t.mul(parts[2], factors[2]), addends[2]))
    mixture = _balanced(t, t.shift(rows), spec)
    return behind, mixture, _collapsed(t, before, x, tokens * hidden_size)


def _projected(t: Tape, x: Tensor, weight: Tensor, width: int) -> Tensor:
    """All streams of a token in fp32, normed, times the weight in fp32."""
    normed = norm_unweighted(t, t.cast(x, DType.FP32), width)
    return matmul_tensor(t, normed, t.cast(weight, DType.FP32), width)


def _balanced(t: Tape, x: Tensor, spec: StreamsSpec) -> Tensor:
    """Sinkhorn and Knopp's: columns first, then rows and columns in turns; written down as one.

    Each division keeps what it divides and the sums that it divides by.
    """
    quotient, kept = x, [x]
    for _ in range(2 * spec.iterations - 1):
        quotient = t.tensor(x.numel, x.dtype)
        kept += [t.tensor(x.numel // spec.count, x.dtype), quotient]
    size = quotient.storage.num_bytes
    t.record(
        OperationKind.DIV, (x,), kept[1:], saves=kept[:-1], gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(size, size, size),
    )  # fmt: skip
    return quotient


def _collapsed(t: Tape, weights: Tensor, x: Tensor, numel: int) -> Tensor:
    product = t.mul(weights, x)
    out = t.tensor(numel, product.dtype)
    t.record(OperationKind.SUM, (product,), (out,), gradients=(Gradient.ALIAS,))
    return t.cast(out, x.dtype)


def _mixed(
    t: Tape, x: Tensor, made: Tensor, behind: Tensor, mixture: Tensor, spec: StreamsSpec
) -> Tensor:
    """What a part made, spread over the streams, plus the streams' mixture."""
    weights = t.cast(behind, x.dtype)
    spread = t.tensor(x.numel, x.dtype)
    size = spread.storage.num_bytes
    t.record(
        OperationKind.MUL, (weights, made), (spread,), saves=(made, weights), gradients=(size, size)
    )
    mixed = batched_matmul(t, t.cast(mixture, x.dtype), x, x.numel, spec.count)
    return t.add(spread, mixed)


def collapse_streams(t: Tape, x: Tensor, spec: StreamsSpec, hidden_size: int) -> Tensor:
    """``DeepseekV4HyperHead``: one stream again, before the last norm."""
    width = spec.count * hidden_size
    tokens = x.numel // width
    weight = t.parameter("hc_head.hc_fn", spec.count, width)
    base, scale = t.parameter("hc_head.hc_base", spec.count), t.parameter("hc_head.hc_scale", 1)
    mixes = t.mul(_projected(t, x, weight, width), t.cast(scale, DType.FP32))
    logits = t.add(mixes, t.cast(base, DType.FP32))
    before = t.shift(t.elementwise(OperationKind.SIGMOID, logits))
    return _collapsed(t, before, x, tokens * hidden_size)
