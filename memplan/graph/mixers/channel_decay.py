"""The delta rule with a decay for each channel, as transformers 5.23 trains it without other packages.

``chunk_kimi_delta_attention`` (Kimi Linear) widens everything to fp32, head by head, and pads it to
whole chunks. Decays differ from channel to channel, so every pair of a chunk's tokens has a product of
its own in each channel: no batched product, but tensors of pairs times channels, nearly all kept.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.mixers.convolution import causal_convolution, turned
from memplan.graph.mixers.delta_rule import (
    CHUNK,
    Sizes,
    decay_of_pairs,
    later_tokens,
    masked_pairs,
    running_sums,
    without_gradient,
    zeros,
)
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import written
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.mixers import ChannelDecaySpec
from memplan.model.parameters import WeightRole


def channel_decay(t: Tape, x: Tensor, spec: ChannelDecaySpec, context: StackContext) -> Tensor:
    """Projections, a short convolution, the rule, a gated norm, the output projection."""
    hidden, width = context.hidden_size, spec.num_heads * spec.head_dim
    parts = [linear(t, x, f"self_attn.{name}_proj", hidden, width) for name in "qkv"]
    mixed = turned(t, t.concatenate(*parts), context.batch)
    t.touch(*parts)
    convolved = causal_convolution(
        t, mixed, "self_attn.conv1d", 3 * width, spec.kernel_size, batch=context.batch
    )
    states = activation(t, convolved, spec.activation)
    t.touch(mixed)
    query, key, value = t.split(states, *(states.numel // 3,) * 3)
    decay = _decay(t, x, spec, context)
    rate = linear(t, x, "self_attn.b_proj", hidden, spec.num_heads)
    rate = t.elementwise(OperationKind.SIGMOID, rate)
    out = _rule(t, (query, key, value), rate, decay, spec, context)
    gate = linear(t, x, "self_attn.g_a_proj", hidden, spec.head_dim)
    gate = linear(t, gate, "self_attn.g_b_proj", spec.head_dim, width)
    normed = _gated_norm(t, out, gate, spec.head_dim)
    result = linear(t, normed, "self_attn.o_proj", width, hidden)
    t.touch(x, states, rate, decay, out, gate)
    return result


def _decay(t: Tape, x: Tensor, spec: ChannelDecaySpec, context: StackContext) -> Tensor:
    """``KimiLinearForgetGate``: a softplus written out, times each head's rate, in fp32."""
    width = spec.num_heads * spec.head_dim
    bias = t.parameter("self_attn.forget_gate.dt_bias", width)
    scale = t.parameter("self_attn.forget_gate.A_log", 1, 1, spec.num_heads, 1)
    narrow = linear(t, x, "self_attn.forget_gate.f_a_proj", context.hidden_size, spec.head_dim)
    wide = linear(t, narrow, "self_attn.forget_gate.f_b_proj", spec.head_dim, width)
    full, addend = t.cast(wide, DType.FP32), t.cast(bias, DType.FP32)
    shifted = t.add(full, addend)
    log_rate = t.cast(scale, DType.FP32)
    factor = t.elementwise(OperationKind.EXP, log_rate)
    large = t.tensor(shifted.numel, DType.BOOL)
    t.record(OperationKind.GT, (shifted,), (large,))
    grown = t.shift(t.elementwise(OperationKind.EXP, shifted))
    soft = t.elementwise(OperationKind.LOG, grown)
    chosen = t.tensor(shifted.numel, DType.FP32)
    t.record(
        OperationKind.WHERE, (large, shifted, soft), (chosen,), saves=(large,),
        gradients=(Gradient.NONE, Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    out = t.mul(t.scale(factor, OperationKind.NEG), chosen)
    t.touch(wide, shifted, log_rate)
    return out


def _rule(
    t: Tape,
    states: tuple[Tensor, Tensor, Tensor],
    rate: Tensor,
    decay: Tensor,
    spec: ChannelDecaySpec,
    context: StackContext,
) -> Tensor:
    """The rule itself; the result is in the queries' dtype."""
    sizes = Sizes(
        heads=context.batch * spec.num_heads,
        tokens=context.seq_len,
        chunks=-(-context.seq_len // CHUNK),
        keys=spec.head_dim,
        values=spec.head_dim,
        strided=False,
        batch=context.batch,
    )
    dtype = states[0].dtype
    query, key, value, rate, decay = (_widened(t, each) for each in (*states, rate, decay))
    query, key = _unit_length(t, query, sizes.keys), _unit_length(t, key, sizes.keys)
    query = t.scale(_padded(t, query, sizes))
    key, value = _padded(t, key, sizes), _padded(t, value, sizes)
    decay, rate = _padded(t, decay, sizes), _padded(t, rate, sizes)
    value_part, key_part = t.mul(value, rate), t.mul(key, rate)
    total = running_sums(t, decay)
    not_earlier, later = later_tokens(t), later_tokens(t)
    numel = sizes.pairs * sizes.keys
    pairwise = decay_of_pairs(t, total, later, numel)
    products = _products_of_pairs(t, key_part, key, numel)
    summed = _summed(t, products, pairwise, sizes.keys)
    system = t.scale(masked_pairs(t, summed, not_earlier), OperationKind.NEG)
    inverse = _with_diagonal(t, _row_by_row(t, system, sizes))
    new_values = batched_matmul(t, inverse, value_part, value.numel, CHUNK)
    faded = t.mul(key_part, t.elementwise(OperationKind.EXP, total))
    old_keys = batched_matmul(t, inverse, faded, key.numel, CHUNK)
    # In autocast's dtype, as the values are once a product has made them.
    state = zeros(t, sizes.heads * sizes.keys * sizes.values, new_values.dtype)
    out = zeros(t, new_values.numel, new_values.dtype)
    parts = (query, key, new_values, total, pairwise, old_keys)
    out, frame = _over_chunks(t, parts, state, out, sizes)
    if sizes.tokens % CHUNK:
        out = t.slice(out, sizes.heads * sizes.tokens * sizes.values)
    result = t.cast(t.contiguous(out), dtype)
    t.touch(out, rate, value_part, key_part, not_earlier, later, inverse, *parts, *frame)
    return result


def _widened(t: Tape, x: Tensor) -> Tensor:
    """Head by head, then in fp32."""
    turned_heads = t.contiguous(x)
    full = t.cast(turned_heads, DType.FP32)
    t.touch(turned_heads)
    return full


def _unit_length(t: Tape, x: Tensor, width: int) -> Tensor:
    """``l2norm``: divided by the root of the sum of its squares."""
    squares = t.mul(x, x)
    total = t.tensor(x.numel // width, x.dtype)
    t.record(OperationKind.SUM, (squares,), (total,), gradients=(Gradient.ALIAS,))
    length = t.elementwise(OperationKind.SQRT, t.shift(total))
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.DIV, (x, length), (out,), saves=(x, length),
        gradients=(Gradient.FRESH, out.storage.num_bytes),
    )  # fmt: skip
    return out


def _padded(t: Tape, x: Tensor, sizes: Sizes) -> Tensor:
    """A copy with whole chunks, made even where nothing is missing."""
    out = t.tensor(x.numel // sizes.tokens * sizes.chunks * CHUNK, x.dtype)
    t.record(OperationKind.PAD, (x,), (out,), gradients=(Gradient.FRESH,))
    t.touch(x)
    return out


def _products_of_pairs(t: Tape, left: Tensor, right: Tensor, numel: int) -> Tensor:
    """Every two tokens' product, channel by channel."""
    product = t.tensor(numel, DType.FP32)
    whole = product.storage.num_bytes
    t.record(
        OperationKind.MUL, (left, right), (product,), saves=(right, left), gradients=(whole, whole)
    )
    return product


def _summed(t: Tape, products: Tensor, pairwise: Tensor, width: int) -> Tensor:
    """Each product with its decay, summed over the channels."""
    faded = t.mul(products, pairwise)
    out = t.tensor(products.numel // width, DType.FP32)
    t.record(OperationKind.SUM, (faded,), (out,), gradients=(Gradient.ALIAS,))
    return out


def _row_by_row(t: Tape, system: Tensor, sizes: Sizes) -> Tensor:
    """Forward substitution in place: each row, and all rows before it, are copied and kept."""
    many = sizes.heads * sizes.chunks
    for number in range(1, CHUNK):
        row = _copied(t, t.slice(system, many * CHUNK), many * number)
        before = _copied(t, t.slice(system, many * number * CHUNK), many * number**2)
        product = t.mul(row, before)
        summed = t.tensor(row.numel, DType.FP32)
        t.record(OperationKind.SUM, (product,), (summed,), gradients=(Gradient.ALIAS,))
        t.touch(product)
        system = written(t, system, t.add(row, summed))
    return system


def _copied(t: Tape, x: Tensor, numel: int) -> Tensor:
    return t.contiguous(t.slice(x, numel))


def _with_diagonal(t: Tape, x: Tensor) -> Tensor:
    """Ones are added on the diagonal."""
    ones = t.tensor(CHUNK * CHUNK, DType.FP32)
    t.record(OperationKind.EYE, (), (ones,))
    out = t.tensor(x.numel, x.dtype)
    t.record(OperationKind.ADD, (x, ones), (out,), gradients=(Gradient.ALIAS, Gradient.NONE))
    return out


def _over_chunks(
    t: Tape, parts: tuple[Tensor, ...], state: Tensor, out: Tensor, sizes: Sizes
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Chunk by chunk: what the state predicts is taken off, read, and what is new is added.

    Returns the output, and what the loop's variables still hold.
    """
    heads, chunks, width = sizes.heads, sizes.chunks, sizes.keys
    mask = later_tokens(t)
    frame: tuple[Tensor, ...] = ()
    for number in range(chunks):
        query, key, new_values, total = (t.slice(part, part.numel // chunks) for part in parts[:4])
        size = new_values.numel
        read = t.mul(query, t.elementwise(OperationKind.EXP, total))
        earlier = batched_matmul(t, read, state, size, width)
        products = _products_of_pairs(t, query, key, heads * CHUNK * CHUNK * width)
        # Sliced behind the products: backward makes the decays' whole gradient before theirs.
        pairwise = t.slice(parts[4], parts[4].numel // chunks)
        scores = masked_pairs(t, _summed(t, products, pairwise, width), mask)
        old_keys = t.slice(parts[5], parts[5].numel // chunks)
        predicted = batched_matmul(t, old_keys, state, size, width)
        fresh = t.tensor(size, new_values.dtype)
        t.record(
            OperationKind.SUB,
            (new_values, predicted),
            (fresh,),
            gradients=(Gradient.ALIAS, Gradient.FRESH),
        )
        t.touch(*frame)
        within = batched_matmul(t, scores, fresh, size, CHUNK)
        added = t.add(earlier, within)
        t.touch(within)
        out = written(t, out, added)
        if number == chunks - 1:
            key, total = without_gradient(key), without_gradient(total)
            state, fresh = without_gradient(state), without_gradient(fresh)
        last = t.slice(total, heads * width)
        kept = t.mul(state, t.elementwise(OperationKind.EXP, last))
        left = t.tensor(total.numel, DType.FP32)
        t.record(
            OperationKind.SUB, (t.slice(total, heads * width), total), (left,),
            gradients=(Gradient.SUMMED, Gradient.FRESH),
        )  # fmt: skip
        remaining = t.elementwise(OperationKind.EXP, left)
        t.touch(left)
        grown = batched_matmul(t, t.mul(key, remaining), fresh, state.numel, CHUNK)
        following = t.add(kept, grown)
        t.touch(kept, grown, state)
        state = following
        frame = (fresh, earlier, scores, predicted, mask)
    return out, frame


def _gated_norm(t: Tape, x: Tensor, gate: Tensor, width: int) -> Tensor:
    """``KimiLinearRMSNormGated``: all in fp32, the weight too, times the gate's sigmoid."""
    weight = t.parameter("self_attn.o_norm.weight", width, role=WeightRole.NORM)
    full = t.cast(x, DType.FP32)
    variance = t.mean(t.square(full), width)
    normal = t.mul(full, t.elementwise(OperationKind.RSQRT, t.shift(variance)))
    weighted = t.mul(t.cast(weight, DType.FP32), normal)
    curve = t.elementwise(OperationKind.SIGMOID, t.cast(gate, DType.FP32))
    product = t.mul(weighted, curve)
    out = t.cast(product, x.dtype)
    t.touch(x, variance, product)
    return out
