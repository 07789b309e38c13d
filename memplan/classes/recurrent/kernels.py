"""Mamba's scans in the kernels of mamba-ssm and causal-conv1d, where both packages are installed.

transformers 5.23 calls them in place of its own functions (``use_kernel_func_from_hub_with_fallback``).
Convolution, scan, norm and output projection are one ``autograd.Function``, which keeps its inputs, what
the scan gave, and a few small tensors, and makes the rest again in backward (mamba_ssm 2.3.2,
ops/triton/ssd_combined.py, ``MambaSplitConv1dScanCombinedFn``; ops/selective_scan_interface.py,
``MambaInnerFn``).
"""

from memplan.classes.recurrent.convolution import CausalConv1d
from memplan.classes.recurrent.mamba import MambaMixer, hold_ones
from memplan.classes.recurrent.mamba2 import Mamba2Mixer
from memplan.classes.recurrent.mamba2 import Sizes as MixerSizes
from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.temporaries import Temporaries
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.modules.basic import Linear
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.module import Module, become, with_methods
from memplan.model.networks import Activation
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

    spec: MixerSizes
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


def replace_scans(model: Module) -> None:
    """Put the packages' functions in the place of transformers'.

    A mixer is one function, but where norms of its own stand between convolution and scan.
    """
    for _, module in list(model.modules()):
        if isinstance(module, Mamba2Mixer):
            become(module, with_methods(SplitMamba2Mixer, type(module)))
        elif isinstance(module, MambaMixer) and module.is_one_function:
            become(module, with_methods(InnerMambaMixer, type(module)))
        elif isinstance(module, MambaMixer):
            object.__setattr__(module, "scan", selective_scan_fn)
            become(module.conv1d, KernelConv1d)


class SplitMamba2Mixer(Mamba2Mixer):
    """``mamba_split_conv1d_scan_combined`` behind the input projection."""

    def forward(self, x: Handle) -> Handle:
        run, (batch, length, hidden), spec = self.run, x.shape, self.sizes
        x = self.projected(x)
        width = x.shape[-1]
        rate = -self.operand(self.A_log).float().unary(OperationKind.EXP)
        sizes = Sizes(spec, batch, length, x.dtype, run.num_multiprocessors)
        inputs: list[Tensor] = [x.record, *weights_of(self.conv1d), self.parameter(self.dt_bias)]
        inputs += [rate.record, self.parameter(self.D)]
        made = [run.tensor(batch * length * spec.inner, x.dtype)]
        if self.norm is not None:
            inputs.append(self.norm.parameter(self.norm.weight))
            made.append(run.tensor(batch * length * spec.groups, DType.FP32))
        outputs, kept = output_projection(self.out_proj)
        out = empty(run, (batch, length, hidden), x.dtype)
        inputs += outputs
        run.record(
            OperationKind.STATE_SPACE_SCAN, inputs, (*made, *kept, out.record),
            saves=(*inputs[:-len(outputs)], *made, *(kept or outputs)),
            gradients=(Gradient.FRESH,) * len(inputs), in_python=True,
            forward_scratch_bytes=_forward(sizes, width),
            backward_scratch_bytes=_backward(sizes, width),
            flops=scan_flops(spec, batch * length) + 2 * made[0].numel * hidden,
        )  # fmt: skip
        return out


def scan_flops(spec: MixerSizes, tokens: int) -> int:
    """Pairs of each chunk, and every token into and out of the states."""
    scores = 2 * tokens * spec.chunk * (spec.groups * spec.state + spec.inner)
    return scores + 4 * tokens * spec.inner * spec.state


def weights_of(module: Module) -> list[Parameter]:
    """All that it owns."""
    return [module.parameter(each) for each in module.weights.values()]


def output_projection(module: Linear) -> tuple[list[Parameter], list[Tensor]]:
    """The weights, and their copies in autocast's dtype, which no cache holds."""
    weights, dtype = weights_of(module), module.run.autocast
    copies = [] if dtype is None else [module.run.tensor(each.numel, dtype) for each in weights]
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


class InnerMambaMixer(MambaMixer):
    """``mamba_inner_fn`` behind the input projection, whose result it copies channel by channel."""

    def forward(self, x: Handle) -> Handle:
        run, (batch, length, hidden), inner = self.run, x.shape, self.inner
        projected, tokens = self.in_proj(x), batch * length
        rate = -self.operand(self.A_log).float().unary(OperationKind.EXP)
        dtype, state, rank = projected.dtype, self.state, self.rank
        convolution = weights_of(self.conv1d)
        weights = [each.parameter(each.weight) for each in (self.x_proj, self.dt_proj)]
        copies = (
            [] if run.autocast is None else [run.tensor(w.numel, run.autocast) for w in weights]
        )
        outputs, more = output_projection(self.out_proj)
        skip = self.operand(self.D).float()
        bias = self.dt_proj.operand(self.dt_proj.bias).float()
        states = batch * inner * ceil_div(length, SCAN_CHUNK) * 2 * state
        sizes = 2 * inner, rank + 2 * state, state, state
        kept = [run.tensor(tokens * each, dtype) for each in sizes]
        kept += [run.tensor(states, DType.FP32), run.tensor(tokens * inner, dtype), *copies, *more]
        out = empty(run, x.shape, dtype)
        fixed = [rate.record, skip.record, bias.record]
        saved = [*convolution, *(copies or weights), *(more or outputs), *fixed, *kept]
        inputs = [projected.record, *convolution, *weights, *outputs, *fixed]
        wide = allocated_bytes(tokens * inner, dtype)
        hold_ones(self)
        run.record(
            OperationKind.STATE_SPACE_SCAN, inputs, (*kept, out.record), saves=saved,
            gradients=(Gradient.FRESH,) * len(inputs), in_python=True,
            forward_scratch_bytes=_inner_forward(wide), backward_scratch_bytes=_inner_backward(wide),
            flops=2 * tokens * inner * (2 * rank + 5 * state + hidden),
        )  # fmt: skip
        return out


class KernelConv1d(CausalConv1d):
    """``causal_conv1d_fn`` with its activation: keeps what it is given."""

    def forward(self, x: Handle, activation: Activation | None = None) -> Handle:  # noqa: ARG002
        run, weights, made = self.run, weights_of(self), empty(self.run, x.shape, x.dtype)
        run.record(
            OperationKind.CONVOLUTION, (x.record, *weights), (made.record,),
            saves=(x.record, *weights), gradients=(Gradient.FRESH,) * (1 + len(weights)),
            in_python=True, flops=2 * x.numel * self.kernel,
        )  # fmt: skip
        return made


def selective_scan_fn(*given: Handle) -> Handle:
    """``selective_scan_fn``: keeps all it is given, in rows of tokens, and what it gives."""
    states, step, rate, keys, queries, skip, gate, bias = given
    run, (batch, inner, length), state = states.run, states.shape, rate.shape[-1]
    keys, queries, gate = keys.contiguous(), queries.contiguous(), gate.contiguous()
    kept = batch * inner * ceil_div(length, SCAN_CHUNK) * 2 * state
    out, gated = empty(run, states.shape, states.dtype), empty(run, states.shape, states.dtype)
    held = run.tensor(kept, DType.FP32)
    inputs = [each.record for each in (states, step, rate, keys, queries, skip, gate, bias)]
    run.record(
        OperationKind.STATE_SPACE_SCAN, inputs, (gated.record, out.record, held),
        saves=(*inputs, out.record, held), gradients=(Gradient.FRESH,) * len(inputs), in_python=True,
        flops=2 * states.numel * 3 * state,
    )  # fmt: skip
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
