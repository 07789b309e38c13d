"""Mamba's second mixer, chunk by chunk, as transformers 5.23 trains it without other packages.

``mamba2_chunk_scan`` widens everything to fp32 and pads it to whole chunks; within a chunk tokens are
paired as attention pairs them, and one state for each head goes from chunk to chunk. All types with
this mixer share the function (Mamba-2, Bamba, Granite 4, Falcon-H1, Nemotron-H, Zamba 2).
"""

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.contraction import Turned, contraction, turned_back
from memplan.graph.mixers.convolution import causal_convolution
from memplan.graph.mixers.rates import decay_rate
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation
from memplan.graph.operations.products import linear
from memplan.graph.segments import RESULT, Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor, allocated_bytes
from memplan.model.mixers import GatedNorm, Mamba2Spec
from memplan.model.networks import Activation
from memplan.model.parameters import WeightRole
from memplan.training.kernels import ScanKernel
from memplan.units import ceil_div


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the scan on whole chunks."""

    batch: int
    tokens: int
    """Of one sequence."""
    chunk: int
    """Tokens of a chunk."""
    heads: int
    width: int
    """Of a head."""
    state: int

    @property
    def chunks(self) -> int:
        """Chunks of one sequence, the last one filled up."""
        return ceil_div(self.tokens, self.chunk)

    @property
    def blocks(self) -> int:
        """Chunks of all sequences and heads."""
        return self.batch * self.chunks * self.heads

    @property
    def rows(self) -> int:
        """Padded tokens of all heads."""
        return self.blocks * self.chunk

    @property
    def pairs(self) -> int:
        """Pairs of tokens within chunks."""
        return self.rows * self.chunk

    @property
    def states(self) -> int:
        """Elements of the states that chunks leave."""
        return self.blocks * self.width * self.state

    @property
    def apart(self) -> bool:
        """Heads do not follow one another where products want them to."""
        return self.batch * self.chunks > 1


def mamba2_mixer(t: Tape, x: Tensor, spec: Mamba2Spec, context: StackContext) -> Tensor:
    """Projection, short convolution, the scan, a gated norm, the output projection."""
    if t.kernels.scan is ScanKernel.PACKAGE:
        from memplan.graph.mixers.scan_kernels import mamba2_in_kernels  # only where installed

        return mamba2_in_kernels(t, x, spec, context)
    batch, tokens = context.batch, context.batch * context.seq_len
    inner, groups = spec.inner, spec.groups * spec.state
    channels = inner + 2 * groups
    given = x
    if spec.scaled:
        x = t.scale(x)
    width = inner + channels + spec.heads
    projected = linear(t, x, "mamba.in_proj", context.hidden_size, width, bias=spec.bias)
    if spec.scaled:
        projected = _scaled(t, projected, width)
    rate = decay_rate(t, spec.heads)
    gate, mixed, step = t.split(projected, tokens * inner, tokens * channels, tokens * spec.heads)
    convolved = causal_convolution(
        t, mixed, "mamba.conv1d", channels, spec.kernel, batch=batch, bias=spec.convolution_bias
    )
    states = t.cast(activation(t, convolved, spec.activation), mixed.dtype)
    parts = t.split(states, tokens * inner, tokens * groups, tokens * groups)
    sizes = Sizes(
        batch=batch, tokens=context.seq_len, chunk=spec.chunk, heads=spec.heads,
        width=inner // spec.heads, state=spec.state,
    )  # fmt: skip
    out = _scan(t, (parts[0], parts[1], parts[2]), step, rate, spec, sizes)
    gated = _gated(t, out, gate, spec)
    narrow = t.cast(gated, given.dtype)
    result = linear(t, narrow, "mamba.out_proj", inner, context.hidden_size, bias=spec.output_bias)
    t.touch(projected, rate, states, gated, out, x, given)
    return result


def _scaled(t: Tape, projected: Tensor, width: int) -> Tensor:
    """Times a buffer with a factor for each column (Falcon-H1's ``mup_vector``)."""
    factors = t.buffer(width, t.options.weights)
    out = t.mul(projected, factors)
    t.touch(projected)
    return out


def _scan(
    t: Tape,
    parts: tuple[Tensor, Tensor, Tensor],
    step: Tensor,
    rate: Tensor,
    spec: Mamba2Spec,
    sizes: Sizes,
) -> Tensor:
    """``mamba2_chunk_scan``: an fp32 result without the padding."""
    step = _time_step(t, step, spec)
    hidden = t.cast(parts[0], DType.FP32)
    keys, queries = (_for_heads(t, part, spec) for part in parts[1:])
    skipped = _pad(t, hidden, sizes)
    share = t.parameter("mamba.D", spec.heads)
    share.by_column = False  # of a head all that is summed up lies together
    residual = t.mul(share, skipped)
    entering = t.mul(hidden, t.cast(step, DType.FP32))
    t.touch(hidden)
    decay = t.mul(rate, t.cast(step, DType.FP32))
    padded = []
    for each in (entering, decay, keys, queries):
        whole = _pad(t, each, sizes)
        padded.append(whole if each is decay else _in_chunks(t, whole, sizes))
    t.touch(entering, decay, keys, queries)
    hidden, fading, keys, queries = padded
    total = _running_sum(t, fading, turned=True)
    pairwise = t.elementwise(OperationKind.EXP, _segment_sum(t, fading, sizes.chunk))
    out, frame = _chunked(t, hidden, keys, queries, total, pairwise, sizes)
    summed = t.add(out, residual)
    t.touch(out)
    t.touch(*padded, step, residual, total, pairwise, *frame)
    kept = sizes.batch * sizes.tokens * sizes.heads * sizes.width
    return summed if kept == summed.numel else t.slice(summed, kept)


def _chunked(
    t: Tape,
    hidden: Tensor,
    keys: Tensor,
    queries: Tensor,
    total: Tensor,
    pairwise: Tensor,
    sizes: Sizes,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Within chunks and between them; returns their sum and what variables hold to the end.

    What the convolution gave lies channel by channel still, and so do the states: a single chunk of it is
    read as it is (ATen/native/PadNd.cpp keeps ``suggest_memory_format``).
    """
    apart, cut = sizes.apart, sizes.chunks > 1
    outputs = sizes.rows * sizes.width
    scores = contraction(t, queries, keys, sizes.pairs, sizes.state, Turned(apart, apart))
    weights = t.mul(scores, pairwise)
    within = contraction(t, weights, hidden, outputs, sizes.chunk, Turned(second=cut, result=apart))
    left = t.tensor(total.numel, DType.FP32)
    last = t.slice(total, total.numel // sizes.chunk)
    t.record(OperationKind.SUB, (last, total), (left,), gradients=(Gradient.SUMMED, Gradient.FRESH))
    remaining = t.elementwise(OperationKind.EXP, left)
    faded = t.mul(keys, remaining)
    added = contraction(
        t, faded, hidden, sizes.states, sizes.chunk, Turned(apart, cut, cut, swapped=True)
    )
    carried, between = _carried(t, added, total, sizes)
    decay = t.elementwise(OperationKind.EXP, total)
    earlier = contraction(t, queries, carried, outputs, sizes.state, Turned(apart, cut, apart))
    before = t.mul(earlier, decay)
    joined = t.add(within, before)
    out = t.contiguous(joined)
    t.touch(joined)
    frame = (scores, weights, within, remaining, faded, *between, carried, decay, earlier, before)
    return out, frame


def _carried(
    t: Tape, added: Tensor, total: Tensor, sizes: Sizes
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The state that each chunk begins with, and what variables hold of its making."""
    chunks, heads = sizes.chunks, sizes.batch * sizes.heads
    first = t.tensor(sizes.states // chunks, added.dtype)
    t.record(OperationKind.ZEROS, (), (first,))
    states = t.concatenate(first, added)
    t.touch(added)
    last = t.slice(total, sizes.batch * chunks * sizes.heads)
    ends = t.tensor(heads * (chunks + 1), DType.FP32)
    t.record(OperationKind.PAD, (last,), (ends,), gradients=(Gradient.FRESH,))
    decay = t.elementwise(OperationKind.EXP, _segment_sum(t, ends, chunks + 1))
    several = sizes.batch > 1
    new = contraction(
        t, decay, states, states.numel, chunks + 1, Turned(second=several, result=several)
    )
    t.touch(states)
    return t.slice(new, sizes.states), (first, decay)


def _time_step(t: Tape, step: Tensor, spec: Mamba2Spec) -> Tensor:
    """The softplus of the projected step and a bias, within limits."""
    bias = t.parameter("mamba.dt_bias", spec.heads)
    narrow = t.cast(bias, step.dtype)
    shifted = t.tensor(step.numel, step.dtype)
    t.record(
        OperationKind.ADD, (step, narrow), (shifted,), gradients=(Gradient.ALIAS, Gradient.FRESH)
    )
    t.touch(narrow)
    full = shifted if t.autocast is None else t.cast(shifted, DType.FP32)
    curve = t.elementwise(OperationKind.SOFTPLUS, full)
    t.touch(shifted)
    out = t.tensor(curve.numel, curve.dtype)
    inside = allocated_bytes(curve.numel, DType.BOOL)
    t.record(
        OperationKind.CLAMP, (curve,), (out,), saves=(curve,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(inside, inside, RESULT),
    )  # fmt: skip
    return out


def _for_heads(t: Tape, part: Tensor, spec: Mamba2Spec) -> Tensor:
    """An fp32 copy for each head of a group's keys or queries."""
    full = t.cast(part, DType.FP32)
    out = t.tensor(full.numel // spec.groups * spec.heads, DType.FP32)
    t.record(OperationKind.REPEAT_INTERLEAVE, (full,), (out,), gradients=(Gradient.FRESH,))
    return out


def _pad(t: Tape, x: Tensor, sizes: Sizes) -> Tensor:
    """A copy with whole chunks, made even where nothing is missing."""
    out = t.tensor(x.numel // sizes.tokens * sizes.chunks * sizes.chunk, x.dtype)
    t.record(OperationKind.PAD, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def _in_chunks(t: Tape, x: Tensor, sizes: Sizes) -> Tensor:
    """A view in chunks; the gradient, head by head in memory, is copied back into tokens."""
    return turned_back(t, x) if sizes.chunks > 1 else x


def _running_sum(t: Tape, x: Tensor, *, turned: bool = False) -> Tensor:
    """Along the last dimension; what is seen in another order is copied for the kernel."""
    out = t.tensor(x.numel, x.dtype)
    size, turned = out.storage.num_bytes, turned and not t.decomposed
    t.record(
        OperationKind.CUMSUM, (x,), (out,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=(RESULT, size) if turned else (),
        backward_scratch_bytes=(size, size, *((size, ~2) if turned else ()), RESULT),
    )  # fmt: skip
    return out


def _segment_sum(t: Tape, x: Tensor, length: int) -> Tensor:
    """Sums of every stretch of ``length`` tokens: a running sum, masked before and after.

    The caller's variable is its result alone.
    """
    below, mask = _triangle(t, length)
    seen = t.reshaped(x)
    expanded = t.view(seen, x.numel * length)
    t.record(OperationKind.VIEW, (seen,), (expanded,), gradients=(Gradient.SUMMED,))
    spread = t.tensor(expanded.numel, x.dtype)
    t.record(
        OperationKind.MASKED_FILL, (expanded, mask), (spread,), saves=(mask,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    sums = _running_sum(t, spread)
    within, mask = _triangle(t, length)
    t.touch(below)
    out = t.tensor(sums.numel, x.dtype)
    t.record(
        OperationKind.MASKED_FILL, (sums, mask), (out,), saves=(mask,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    t.touch(sums, spread, within)
    return out


def _triangle(t: Tape, length: int) -> tuple[Tensor, Tensor]:
    """A mask of the pairs below the diagonal, and its opposite."""
    ones, below = t.tensor(length * length, DType.BOOL), t.tensor(length * length, DType.BOOL)
    t.record(OperationKind.ONES, (), (ones,))
    t.record(OperationKind.TRIL, (ones,), (below,))
    above = t.tensor(length * length, DType.BOOL)
    t.record(OperationKind.BITWISE_NOT, (below,), (above,))
    return below, above


def _gated(t: Tape, x: Tensor, gate: Tensor, spec: Mamba2Spec) -> Tensor:
    """Times a SiLU of the gate, before or behind a norm in groups, or without one.

    (``MambaRMSNormGated``, ``FalconH1RMSNormGated``)
    """
    if spec.gate is GatedNorm.NONE:
        return t.mul(x, activation(t, gate, Activation.SILU))
    if spec.gate is GatedNorm.FIRST:
        gated = t.mul(x, activation(t, t.cast(gate, DType.FP32), Activation.SILU))
        return _group_norm(t, gated, spec)
    normed = _group_norm(t, x, spec)
    out = t.mul(normed, activation(t, t.cast(gate, DType.FP32), Activation.SILU))
    t.touch(normed)
    return out


def _group_norm(t: Tape, x: Tensor, spec: Mamba2Spec) -> Tensor:
    weight = t.parameter("mamba.norm.weight", spec.inner, role=WeightRole.NORM)
    variance = t.mean(t.square(x), spec.inner // spec.groups)
    root = t.elementwise(OperationKind.RSQRT, t.shift(variance))
    out = t.mul(weight, t.mul(x, root))
    t.touch(variance)
    return out
