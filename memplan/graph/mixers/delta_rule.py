"""The gated delta rule, chunk by chunk, as transformers 5.23 trains it without other packages.

``torch_chunk_gated_delta_rule`` widens queries, keys and values to fp32, pads them to whole chunks,
solves a triangular system for each chunk and then walks over the chunks with one state for each head
(Qwen3-Next, Qwen3.5). Nearly all that it makes is kept for backward.
"""

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.mixers.convolution import causal_convolution, turned
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import written
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.mixers import DeltaRuleSpec
from memplan.model.networks import Activation
from memplan.model.parameters import WeightRole

CHUNK = 64
"""Tokens of a chunk: the default of ``torch_chunk_gated_delta_rule``."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the rule on whole chunks."""

    heads: int
    """Value heads of all sequences."""
    tokens: int
    """Of one sequence."""
    chunks: int
    keys: int
    """Width of a key's head."""
    values: int
    """Width of a value's head."""
    strided: bool
    """Tokens come before heads in memory: fp32 states are not copied on their way, and padding by
    nothing keeps the order; so products copy them."""
    batch: int

    @property
    def rows(self) -> int:
        """Padded tokens of all heads."""
        return self.heads * self.chunks * CHUNK

    @property
    def pairs(self) -> int:
        """Pairs of tokens within chunks."""
        return self.rows * CHUNK


def delta_rule(t: Tape, x: Tensor, spec: DeltaRuleSpec, context: StackContext) -> Tensor:
    """Projections, a short convolution, the rule, a gated norm, the output projection."""
    batch, tokens = context.batch, context.batch * context.seq_len
    keys = spec.num_key_heads * spec.key_head_dim
    values = spec.num_value_heads * spec.value_head_dim
    channels = 2 * keys + values
    project = _fused_projections if spec.fused else _separate_projections
    mixed, gate, rate, decay, frame = project(t, x, spec, context)
    convolved = causal_convolution(
        t, mixed, "linear_attn.conv1d", channels, spec.kernel_size, batch=batch
    )
    states = activation(t, convolved, spec.activation)
    t.touch(mixed)
    query, key, value = t.split(states, tokens * keys, tokens * keys, tokens * values)
    rate = t.elementwise(OperationKind.SIGMOID, rate)
    fading = _decay(t, decay, spec)
    out = _chunked_rule(t, (query, key, value), rate, fading, spec, context)
    out = gated_norm(t, out, gate, "linear_attn.norm", spec.value_head_dim)
    out = linear(t, out, "linear_attn.out_proj", values, context.hidden_size)
    t.touch(x, states, rate, fading, *frame)
    return out


Projections = tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]
"""What the convolution reads, the norm's gate, rates, decays, and what the frame holds."""


def _separate_projections(
    t: Tape, x: Tensor, spec: DeltaRuleSpec, context: StackContext
) -> Projections:
    """Qwen3.5's four linear layers."""
    hidden, heads = context.hidden_size, spec.num_value_heads
    values = heads * spec.value_head_dim
    channels = 2 * spec.num_key_heads * spec.key_head_dim + values
    mixed = linear(t, x, "linear_attn.in_proj_qkv", hidden, channels)
    gate = linear(t, x, "linear_attn.in_proj_z", hidden, values)
    rate = linear(t, x, "linear_attn.in_proj_b", hidden, heads)
    decay = linear(t, x, "linear_attn.in_proj_a", hidden, heads)
    return turned(t, mixed, context.batch), gate, rate, decay, (gate, rate, decay)


def _fused_projections(
    t: Tape, x: Tensor, spec: DeltaRuleSpec, context: StackContext
) -> Projections:
    """Qwen3-Next's two, whose parts lie key head by key head and are copied out."""
    hidden, heads = context.hidden_size, spec.num_value_heads
    tokens = context.batch * context.seq_len
    keys, values = spec.num_key_heads * spec.key_head_dim, heads * spec.value_head_dim
    wide = linear(t, x, "linear_attn.in_proj_qkvz", hidden, 2 * (keys + values))
    narrow = linear(t, x, "linear_attn.in_proj_ba", hidden, 2 * heads)
    sizes = (tokens * keys, tokens * keys, tokens * values, tokens * values)
    query, key, value, gate = t.split(wide, *sizes)
    rate, decay = t.split(narrow, tokens * heads, tokens * heads)
    value, gate = t.contiguous(value), t.contiguous(gate)
    rate, decay = t.contiguous(rate), t.contiguous(decay)
    query, key = t.contiguous(query), t.contiguous(key)
    mixed = t.concatenate(query, key, value)
    frame = (wide, narrow, gate, rate, decay)
    t.touch(query, key, value)
    return mixed, gate, rate, decay, frame


def _decay(t: Tape, states: Tensor, spec: DeltaRuleSpec) -> Tensor:
    """``-exp(A_log) * softplus(a + dt_bias)`` in fp32."""
    heads = spec.num_value_heads
    bias = t.parameter("linear_attn.dt_bias", heads)
    scale = t.parameter("linear_attn.A_log", heads)
    factor = t.elementwise(OperationKind.EXP, t.cast(scale, DType.FP32))
    factor = t.scale(factor, OperationKind.NEG)
    full = t.cast(states, DType.FP32)
    shifted = t.tensor(full.numel, DType.FP32)
    t.record(
        OperationKind.ADD, (full, bias), (shifted,), gradients=(Gradient.ALIAS, Gradient.FRESH)
    )
    return t.mul(t.elementwise(OperationKind.SOFTPLUS, shifted), factor)


def _chunked_rule(
    t: Tape,
    states: tuple[Tensor, Tensor, Tensor],
    rate: Tensor,
    decay: Tensor,
    spec: DeltaRuleSpec,
    context: StackContext,
) -> Tensor:
    """The rule itself; the result is in the queries' dtype."""
    sizes = Sizes(
        heads=context.batch * spec.num_value_heads,
        tokens=context.seq_len,
        chunks=-(-context.seq_len // CHUNK),
        keys=spec.key_head_dim,
        values=spec.value_head_dim,
        strided=states[0].dtype is DType.FP32 and context.seq_len % CHUNK == 0,
        batch=context.batch,
    )
    dtype = states[0].dtype
    query, key, value, rate = _widened(t, states, rate, spec)
    query, key, value, rate, decay = _padded(t, (query, key, value, rate, decay), sizes)
    value_part = t.mul(value, rate)
    key_part = t.mul(key, rate)
    total, pairwise = _pairwise_decay(t, decay, sizes)
    system = _within_chunks(t, _copied_back(t, key_part), key, pairwise, sizes)
    scores = _within_chunks(t, query, key, pairwise, sizes)
    faded = t.mul(_copied_back(t, key_part), t.elementwise(OperationKind.EXP, total))
    new_values = _solved(t, system, _copied_back(t, value_part))
    old_keys = _solved(t, system, faded)
    state = zeros(t, sizes.heads * sizes.keys * sizes.values)
    out = zeros(t, new_values.numel)
    query = t.mul(query, t.elementwise(OperationKind.EXP, total))
    key = t.mul(key, _remaining(t, total))
    last = t.slice(total, sizes.heads * sizes.chunks)
    fading = t.elementwise(OperationKind.EXP, last)
    parts = (new_values, old_keys, query, key, scores, fading)
    out, frame = _over_chunks(t, parts, state, out, sizes)
    result = _in_rows(t, out, sizes, dtype)
    frame += (value, rate, decay, value_part, key_part, total, pairwise, system, faded)
    t.touch(*parts, *frame)
    return result


def _widened(
    t: Tape, states: tuple[Tensor, Tensor, Tensor], rate: Tensor, spec: DeltaRuleSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fp32 copies, queries and keys repeated for every value head, normalized and scaled."""
    query, key, value = states
    repeats = spec.num_value_heads // spec.num_key_heads
    if repeats > 1:
        query, key = _repeated(t, query, repeats), _repeated(t, key, repeats)
    full = [t.cast(each, DType.FP32) for each in (query, key, value, rate)]
    t.touch(query, key)
    query, key = (_unit_length(t, each, spec.key_head_dim) for each in full[:2])
    return t.scale(query), key, full[2], full[3]


def _repeated(t: Tape, x: Tensor, repeats: int) -> Tensor:
    """A copy of each head for the value heads that share it; backward sums them."""
    out = t.tensor(x.numel * repeats, x.dtype)
    t.record(OperationKind.REPEAT_INTERLEAVE, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def _unit_length(t: Tape, x: Tensor, width: int) -> Tensor:
    """``l2norm``: times the reciprocal root of the sum of its squares."""
    squares = t.mul(x, x)
    total = t.tensor(x.numel // width, x.dtype)
    t.record(OperationKind.SUM, (squares,), (total,), gradients=(Gradient.ALIAS,))
    return t.mul(x, t.elementwise(OperationKind.RSQRT, t.shift(total)))


def _padded(t: Tape, parts: tuple[Tensor, ...], sizes: Sizes) -> list[Tensor]:
    """Copies with whole chunks, made even where nothing is missing."""
    padded = sizes.chunks * CHUNK
    made = []
    for number, part in enumerate(parts):
        out = t.tensor(part.numel // sizes.tokens * padded, part.dtype)
        t.record(OperationKind.PAD, (part,), (out,), gradients=(Gradient.FRESH,))
        made.append(out)
        if number == len(STATES) - 1:
            t.touch(*parts[: len(STATES)])
    t.touch(*parts[len(STATES) :])
    return made


STATES = ("queries", "keys", "values")
"""What is padded first, and renamed before the rest."""


def _copied_back(t: Tape, x: Tensor) -> Tensor:
    """A view in chunks; its gradient, column by column in memory, is copied back into rows."""
    out = t.view(x, x.numel)
    t.record(OperationKind.VIEW, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def _pairwise_decay(t: Tape, decay: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Running sums within chunks, and the decay between the two tokens of every pair."""
    mask = later_tokens(t)
    total = running_sums(t, decay)
    return total, decay_of_pairs(t, total, mask, sizes.pairs)


def later_tokens(t: Tape) -> Tensor:
    """The mask of a chunk's pairs whose second token comes later."""
    ones = t.tensor(CHUNK * CHUNK, DType.BOOL)
    t.record(OperationKind.ONES, (), (ones,))
    mask = t.tensor(CHUNK * CHUNK, DType.BOOL)
    t.record(OperationKind.TRIU, (ones,), (mask,))
    return mask


def running_sums(t: Tape, decay: Tensor) -> Tensor:
    """``cumsum`` within chunks, whose backward turns the gradient round and back."""
    total = t.tensor(decay.numel, DType.FP32)
    t.record(
        OperationKind.CUMSUM,
        (decay,),
        (total,),
        gradients=(Gradient.FRESH,),
        backward_scratch_bytes=2 * total.storage.num_bytes,
    )
    return total


def decay_of_pairs(t: Tape, total: Tensor, mask: Tensor, numel: int) -> Tensor:
    """The exponential of two tokens' difference, for every pair that the mask leaves."""
    between = t.tensor(numel, DType.FP32)
    t.record(
        OperationKind.SUB,
        (total, total),
        (between,),
        gradients=(Gradient.FRESH, between.storage.num_bytes),
    )
    masked = masked_pairs(t, between, mask)
    t.touch(between)
    return t.elementwise(OperationKind.EXP, masked)


def masked_pairs(t: Tape, x: Tensor, mask: Tensor) -> Tensor:
    """``masked_fill``, which keeps the mask."""
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.MASKED_FILL, (x, mask), (out,), saves=(mask,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def _within_chunks(t: Tape, left: Tensor, right: Tensor, pairwise: Tensor, sizes: Sizes) -> Tensor:
    """Products of all pairs of a chunk, each with its decay."""
    if sizes.strided:
        left, right = t.contiguous(left), t.contiguous(right)
    return t.mul(batched_matmul(t, left, right, sizes.pairs, sizes.keys), pairwise)


def _solved(t: Tape, system: Tensor, right: Tensor) -> Tensor:
    """``linalg.solve_triangular``: keeps the system and its solution."""
    out = t.tensor(right.numel, right.dtype)
    t.record(
        OperationKind.SOLVE_TRIANGULAR, (right, system), (out,), saves=(system, out),
        gradients=(Gradient.FRESH, Gradient.FRESH),
        backward_scratch_bytes=system.storage.num_bytes, flops=out.numel * CHUNK,
    )  # fmt: skip
    return out


def _remaining(t: Tape, total: Tensor) -> Tensor:
    """The decay from each token to the end of its chunk."""
    left = t.tensor(total.numel, DType.FP32)
    t.record(OperationKind.SUB, (total,), (left,), gradients=(Gradient.FRESH,))
    return t.elementwise(OperationKind.EXP, left)


def zeros(t: Tape, numel: int, dtype: DType = DType.FP32) -> Tensor:
    """The rule's first state, or what its outputs are written into."""
    out = t.tensor(numel, dtype)
    t.record(OperationKind.ZEROS, (), (out,))
    return out


def _over_chunks(
    t: Tape, parts: tuple[Tensor, ...], state: Tensor, out: Tensor, sizes: Sizes
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Chunk by chunk: what the state predicts is taken off, read, and what is new is added.

    Returns the output, and what the loop's variables still hold.
    """
    heads, chunks = sizes.heads, sizes.chunks
    frame: tuple[Tensor, ...] = ()
    for number in range(chunks):
        new_values, old_keys, query, key, scores, fading = (
            t.slice(part, part.numel // chunks) for part in parts
        )
        size = new_values.numel
        if sizes.strided and sizes.batch > 1:
            query, key = t.contiguous(query), t.contiguous(key)
        predicted = batched_matmul(t, old_keys, state, size, sizes.keys)
        fresh = t.tensor(size, DType.FP32)
        t.record(
            OperationKind.SUB,
            (new_values, predicted),
            (fresh,),
            gradients=(Gradient.ALIAS, Gradient.FRESH),
        )
        t.touch(predicted)
        earlier = batched_matmul(t, query, state, size, sizes.keys)
        t.touch(*frame)
        within = batched_matmul(t, scores, fresh, size, CHUNK)
        out = written(t, out, t.add(earlier, within))
        t.touch(within)
        if number == chunks - 1:
            fading, key = without_gradient(fading), without_gradient(key)
            state, fresh = without_gradient(state), without_gradient(fresh)
        kept = t.mul(state, fading)
        added = batched_matmul(t, key, fresh, heads * sizes.keys * sizes.values, CHUNK)
        following = t.add(kept, added)
        t.touch(kept, added, state)
        state = following
        frame = (fresh, earlier)
    return out, frame


def without_gradient(x: Tensor) -> Tensor:
    """What makes the last state, which nothing reads: its graph is gone before the loop is."""
    return Tensor(x.numel, x.dtype, x.storage)


def _in_rows(t: Tape, out: Tensor, sizes: Sizes, dtype: DType) -> Tensor:
    """Without the padding, token by token, in the dtype of the queries."""
    joined = t.contiguous(out)
    cut = t.slice(joined, sizes.heads * sizes.tokens * sizes.values)
    return t.contiguous(cut) if dtype is DType.FP32 else t.cast(cut, dtype)


def gated_norm(t: Tape, x: Tensor, gate: Tensor, name: str, width: int) -> Tensor:
    """``Qwen3NextRMSNormGated``: Llama's norm, times an fp32 SiLU of the gate, cast back."""
    weight = t.parameter(f"{name}.weight", width, role=WeightRole.NORM)
    full = t.cast(x, DType.FP32)
    variance = t.mean(t.square(full), width)
    normal = t.mul(full, t.elementwise(OperationKind.RSQRT, t.shift(variance)))
    weighted = t.mul(weight, t.cast(normal, x.dtype))
    t.touch(normal)
    curve = activation(t, t.cast(gate, DType.FP32), Activation.SILU)
    product = t.mul(weighted, curve)
    out = t.cast(product, x.dtype)
    t.touch(x, variance, product)
    return out
