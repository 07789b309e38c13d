"""Mamba's scans in the kernels of mamba-ssm and causal-conv1d, where both packages are installed.

transformers 5.23 calls them in place of its own functions (``use_kernel_func_from_hub_with_fallback``).
Convolution, scan, norm and output projection are one ``autograd.Function``, which keeps its inputs, what
the scan gave, and a few small tensors, and makes the rest again in backward (mamba_ssm 2.3.2,
ops/triton/ssd_combined.py, ``MambaSplitConv1dScanCombinedFn``; ops/selective_scan_interface.py,
``MambaInnerFn``).
"""

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.mixers.rates import decay_rate
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.products import linear
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.temporaries import Temporaries
from memplan.graph.tensors import Parameter, Tensor, allocated_bytes
from memplan.model.mixers import GatedNorm, Mamba2Spec, MambaSpec
from memplan.model.parameters import WeightRole
from memplan.units import ceil_div

STRIDE = 8
"""The convolution's kernel takes rows of a multiple of so many elements; others are copied for it."""
SCAN_CHUNK = 2048
"""Tokens after which Mamba's first scan keeps a state (csrc/selective_scan/selective_scan.cpp)."""
NORM_WARPS = 4
"""``_layer_norm_bwd``: programs for each multiprocessor, less where a group takes several warps."""
LARGEST_BLOCK_BYTES = 65536
WARP_ELEMENTS = 256
MOST_WARPS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of what a scan makes."""

    spec: Mamba2Spec
    batch: int
    tokens: int
    """Of one sequence."""
    dtype: DType
    multiprocessors: int

    @property
    def chunks(self) -> int:
        """Of one sequence."""
        return ceil_div(self.tokens, self.spec.chunk)

    @property
    def channels(self) -> int:
        """What the convolution reads of each token."""
        return self.spec.inner + 2 * self.spec.groups * self.spec.state

    @property
    def splits(self) -> int:
        """Parts in which programs sum over the heads of a group."""
        shared = self.spec.heads // self.spec.groups
        programs = ceil_div(self.batch * self.chunks * self.spec.heads, self.multiprocessors)
        return ceil_div(shared, max(min(programs, shared), 1))

    def rows(self, width: int, dtype: DType | None = None) -> int:
        """A tensor of so many elements for each token [bytes]."""
        return allocated_bytes(self.batch * self.tokens * width, dtype or self.dtype)

    @property
    def steps(self) -> int:
        """fp32 numbers of each head and padded token [bytes]."""
        return self.pairs(self.spec.heads, 1)

    def pairs(self, count: int, width: int | None = None) -> int:
        """fp32 numbers of each token of a chunk with ``width`` others, ``count`` times [bytes]."""
        width = self.spec.chunk if width is None else width
        return allocated_bytes(
            self.batch * self.chunks * count * self.spec.chunk * width, DType.FP32
        )

    def states(self, dtype: DType) -> int:
        """A state of every head for each chunk [bytes]."""
        numel = self.batch * self.chunks * self.spec.inner * self.spec.state
        return allocated_bytes(numel, dtype)

    @property
    def norm_rows(self) -> int:
        """In which the gated norm's gradient is summed."""
        group = self.spec.inner // self.spec.groups
        block = min(LARGEST_BLOCK_BYTES // self.dtype.num_bytes, 1 << (group - 1).bit_length())
        warps = min(max(block // WARP_ELEMENTS, 1), MOST_WARPS)
        return ceil_div(self.multiprocessors * ceil_div(NORM_WARPS, warps), self.spec.groups)


def mamba2_in_kernels(t: Tape, x: Tensor, spec: Mamba2Spec, context: StackContext) -> Tensor:
    """``mamba_split_conv1d_scan_combined`` behind the input projection."""
    given = x
    if spec.scaled:
        x = t.scale(x)
    channels = spec.inner + 2 * spec.groups * spec.state
    width = spec.inner + channels + spec.heads
    projected = linear(t, x, "mamba.in_proj", context.hidden_size, width, bias=spec.bias)
    t.touch(x, given)
    if spec.scaled:
        plain = projected
        projected = t.mul(projected, t.buffer(width, t.options.weights))
        t.touch(plain)
    rate = decay_rate(t, spec.heads)
    sizes = Sizes(spec, context.batch, context.seq_len, projected.dtype, t.num_multiprocessors)
    inputs: list[Tensor] = [
        projected,
        *_convolution(t, channels, spec.kernel, spec.convolution_bias),
    ]
    inputs += [t.parameter("mamba.dt_bias", spec.heads), rate, t.parameter("mamba.D", spec.heads)]
    made = [t.tensor(context.batch * context.seq_len * spec.inner, projected.dtype)]
    if spec.gate is not GatedNorm.NONE:
        inputs.append(t.parameter("mamba.norm.weight", spec.inner, role=WeightRole.NORM))
        made.append(t.tensor(context.batch * context.seq_len * spec.groups, DType.FP32))
    outputs, kept = _output_projection(t, spec.inner, context.hidden_size, spec.output_bias)
    out = t.tensor(context.batch * context.seq_len * context.hidden_size, projected.dtype)
    inputs += outputs
    t.record(
        OperationKind.STATE_SPACE_SCAN, inputs, (*made, *kept, out),
        saves=(*inputs[:-len(outputs)], *made, *(kept or outputs)),
        gradients=(Gradient.FRESH,) * len(inputs), in_python=True,
        forward_scratch_bytes=_forward(sizes, width), backward_scratch_bytes=_backward(sizes, width),
        flops=_scan_flops(spec, context) + 2 * made[0].numel * context.hidden_size,
    )  # fmt: skip
    t.touch(projected, rate, given)
    return out


def _scan_flops(spec: Mamba2Spec, context: StackContext) -> int:
    """Pairs of each chunk, and every token into and out of the states."""
    tokens = context.batch * context.seq_len
    scores = 2 * tokens * spec.chunk * (spec.groups * spec.state + spec.inner)
    return scores + 4 * tokens * spec.inner * spec.state


def _convolution(t: Tape, channels: int, kernel: int, bias: bool) -> list[Parameter]:
    weights = [t.parameter("mamba.conv1d.weight", channels, 1, kernel)]
    if bias:
        weights.append(t.parameter("mamba.conv1d.bias", channels))
    return weights


def _output_projection(
    t: Tape, inner: int, hidden: int, bias: bool
) -> tuple[list[Parameter], list[Tensor]]:
    """The weights, and their copies in autocast's dtype, which no cache holds."""
    weights = [t.matrix("mamba.out_proj.weight", hidden, inner)]
    if bias:
        weights.append(t.parameter("mamba.out_proj.bias", hidden))
    dtype = t.autocast
    copies = [] if dtype is None else [t.tensor(each.numel, dtype) for each in weights]
    return weights, copies


def _forward(sizes: Sizes, width: int) -> tuple[int, ...]:
    """``MambaSplitConv1dScanCombinedFn.forward``."""
    spec, made = sizes.spec, Temporaries()
    channels = sizes.rows(sizes.channels)
    rows = [made.take(channels)] if width % STRIDE else []
    made.take(channels)
    made.drop(*rows)
    made.take(sizes.steps)
    made.take(sizes.steps)
    states = made.take(sizes.states(DType.FP32))
    made.take(sizes.states(sizes.dtype))
    made.take(allocated_bytes(sizes.batch * spec.inner * spec.state, DType.FP32))
    made.drop(states)
    pairs = made.take(sizes.pairs(spec.groups))
    out = made.take(sizes.rows(spec.inner))
    made.drop(pairs, out)
    made.result()
    made.take(sizes.rows(spec.inner))
    return made.blocks


def _backward(sizes: Sizes, width: int) -> tuple[int, ...]:
    """``MambaSplitConv1dScanCombinedFn.backward``: everything but the scan's result is made again."""
    spec, made = sizes.spec, Temporaries()
    channels, inner = sizes.rows(sizes.channels), sizes.rows(spec.inner)
    made.take(inner)
    rows = [made.take(channels)] if width % STRIDE else []
    made.take(channels)
    made.drop(*rows)
    made.result()
    for size in (channels, inner, inner):
        made.take(size)
    sums = made.take(allocated_bytes(sizes.norm_rows * spec.inner, DType.FP32))
    made.drop(sums)
    scan = [made.take(sizes.rows(spec.heads)), *(made.take(sizes.steps) for _ in range(2))]
    scan.append(made.take(sizes.pairs(spec.groups)))
    full, half = sizes.states(DType.FP32), sizes.states(sizes.dtype)
    states = made.take(full)
    passed = made.take(full)
    made.drop(states)
    changes = made.take(full)
    scan += [made.take(half), made.take(half)]
    made.drop(changes, passed)
    scan += [made.take(sizes.steps) for _ in range(2)]
    for _ in range(2):
        parts = made.take(sizes.rows(sizes.splits * spec.groups * spec.state, DType.FP32))
        scan.append(made.take(sizes.rows(spec.groups * spec.state, DType.FP32)))
        made.drop(parts)
        scan.append(made.take(sizes.steps))
    pairs = made.take(sizes.pairs(sizes.splits * spec.groups))
    scan.append(made.take(sizes.pairs(spec.groups)))
    made.drop(pairs)
    scan += [made.take(sizes.steps) for _ in range(2)]
    made.drop(*scan)
    if width % STRIDE:
        made.take(channels)
        made.take(channels)
    return made.blocks


def mamba_in_kernels(t: Tape, x: Tensor, spec: MambaSpec, context: StackContext) -> Tensor:
    """``mamba_inner_fn`` behind the input projection, whose result it copies channel by channel."""
    inner, hidden, tokens = spec.inner, context.hidden_size, context.batch * context.seq_len
    projected = linear(t, x, "mamba.in_proj", hidden, 2 * inner, bias=spec.bias)
    rate = decay_rate(t, inner, spec.state)
    dtype = projected.dtype
    inputs: list[Tensor] = [projected, *_convolution(t, inner, spec.kernel, spec.convolution_bias)]
    weights = [
        t.matrix("mamba.x_proj.weight", spec.rank + 2 * spec.state, inner),
        t.matrix("mamba.dt_proj.weight", inner, spec.rank),
    ]
    copies = [] if t.autocast is None else [t.tensor(each.numel, t.autocast) for each in weights]
    outputs, more = _output_projection(t, inner, hidden, spec.bias)
    channels = [
        t.cast(t.parameter("mamba.D", inner), DType.FP32),
        t.cast(t.parameter("mamba.dt_proj.bias", inner, role=WeightRole.OTHER), DType.FP32),
    ]
    states = context.batch * inner * ceil_div(context.seq_len, SCAN_CHUNK) * 2 * spec.state
    kept = [
        t.tensor(2 * tokens * inner, dtype),
        t.tensor(tokens * (spec.rank + 2 * spec.state), dtype),
        t.tensor(tokens * spec.state, dtype),
        t.tensor(tokens * spec.state, dtype),
        t.tensor(states, DType.FP32),
        t.tensor(tokens * inner, dtype),
        *copies, *more,
    ]  # fmt: skip
    out = t.tensor(tokens * hidden, dtype)
    saved = [*inputs[1:], *(copies or weights), *(more or outputs), rate, *channels]
    inputs += [*weights, *outputs, rate, *channels]
    wide = allocated_bytes(tokens * inner, dtype)
    for width in () if spec.norm is None or spec.norm.weight else (inner, spec.state, spec.state):
        t.buffer(width, t.options.weights)
    t.record(
        OperationKind.STATE_SPACE_SCAN, inputs, (*kept, out), saves=(*saved, *kept),
        gradients=(Gradient.FRESH,) * len(inputs), in_python=True,
        forward_scratch_bytes=_inner_forward(wide), backward_scratch_bytes=_inner_backward(wide),
        flops=2 * tokens * inner * (2 * spec.rank + 5 * spec.state + hidden),
    )  # fmt: skip
    t.touch(projected, x)
    return out


def convolved_in_kernel(t: Tape, x: Tensor, spec: MambaSpec) -> Tensor:
    """``causal_conv1d_fn`` with its activation: keeps what it is given."""
    weights = _convolution(t, spec.inner, spec.kernel, spec.convolution_bias)
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.CONVOLUTION, (x, *weights), (out,), saves=(x, *weights),
        gradients=(Gradient.FRESH,) * (1 + len(weights)), in_python=True,
        flops=2 * x.numel * spec.kernel,
    )  # fmt: skip
    return out


def scanned_in_kernel(
    t: Tape, given: tuple[Tensor, ...], spec: MambaSpec, context: StackContext, *, in_rows: bool
) -> Tensor:
    """``selective_scan_fn``: keeps all it is given, in rows of tokens, and what it gives."""
    states, step, rate, keys, queries, skip, gate, bias = given
    if not in_rows:
        keys, queries = t.contiguous(keys), t.contiguous(queries)
    gate = t.contiguous(gate)
    kept = context.batch * spec.inner * ceil_div(context.seq_len, SCAN_CHUNK) * 2 * spec.state
    out, gated = t.tensor(states.numel, states.dtype), t.tensor(states.numel, states.dtype)
    held = t.tensor(kept, DType.FP32)
    inputs = (states, step, rate, keys, queries, skip, gate, bias)
    t.record(
        OperationKind.STATE_SPACE_SCAN, inputs, (gated, out, held), saves=(*inputs, out, held),
        gradients=(Gradient.FRESH,) * len(inputs), in_python=True,
        flops=2 * states.numel * 3 * spec.state,
    )  # fmt: skip
    t.touch(*given)
    return gated


def _inner_forward(wide: int) -> tuple[int, ...]:
    """``MambaInnerFn.forward``: the convolution, the steps, and what the gate makes of the scan."""
    made = Temporaries()
    blocks = [made.take(wide) for _ in range(3)]
    made.drop(*blocks[:2])
    made.result()
    return made.blocks


def _inner_backward(wide: int) -> tuple[int, ...]:
    """``MambaInnerFn.backward``: what forward dropped, the gradients of all that, and copies of two."""
    made = Temporaries()
    made.take(wide)
    made.take(wide)
    made.result()
    blocks = [made.take(wide) for _ in range(5)]
    made.drop(blocks[1])
    made.take(wide)
    return made.blocks
