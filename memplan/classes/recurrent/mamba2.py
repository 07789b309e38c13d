"""Mamba's second mixer: a scan in chunks, with one decay for each head.

``mamba2_chunk_scan`` widens everything to fp32 and pads it to whole chunks; within a chunk tokens are
paired as attention pairs them, and one state for each head goes from chunk to chunk. All types with
this mixer share the function.

(transformers 5.23: models/mamba2)
"""

from typing import NamedTuple

from memplan.classes.llama import DecoderLayer
from memplan.classes.recurrent.chunks import padded, running_sum, segment_sum, whole
from memplan.classes.recurrent.convolution import CausalConv1d
from memplan.classes.recurrent.mamba import MambaBlock, MambaModel, Mixer
from memplan.classes.recurrent.sizes import check_heads, expanded
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import Linear, fp32_under_autocast, scaled
from memplan.graph.modules.contractions import einsum
from memplan.graph.modules.functional import activated, clamped
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import WeightRole


class Sizes(NamedTuple):
    """What a config makes of the mixer."""

    inner: int
    """Width of all heads together."""
    heads: int
    groups: int
    """Of heads that share keys and queries, and of what a norm normalizes at once."""
    state: int
    kernel: int
    """Of the convolution that everything but gate and step passes."""
    chunk: int
    """Tokens that are paired as attention pairs them."""
    activation: Activation
    bias: bool
    convolution_bias: bool

    @property
    def channels(self) -> int:
        """What the convolution reads of each token."""
        return self.inner + 2 * self.groups * self.state


class MambaRMSNormGated(Module):
    def __init__(self, width: int, groups: int) -> None:
        self.groups = groups
        self.weight = Weight(width, role=WeightRole.NORM)

    def forward(self, x: Handle, gate: Handle) -> Handle:
        dtype = x.dtype
        x = x.float()
        x = x * activated(gate.float(), Activation.SILU)
        in_groups = x.view(*x.shape[:-1], self.groups, -1)
        variance = in_groups.pow(2).mean()
        in_groups = in_groups * (variance + 1e-6).rsqrt()
        x = in_groups.view(*x.shape)
        return scaled(self, self.weight, x.to(dtype))


class Mamba2Mixer(Mixer):
    scans = True
    norm: MambaRMSNormGated | None = None

    def __init__(self, config: ConfigReader) -> None:
        sizes = self.sizes = self.read_sizes(config)
        hidden = config.integer("hidden_size")
        self.conv1d = CausalConv1d(sizes.channels, sizes.kernel, bias=sizes.convolution_bias)
        self.in_proj = Linear(hidden, sizes.inner + sizes.channels + sizes.heads, bias=sizes.bias)
        self.dt_bias = Weight(sizes.heads)
        self.A_log = Weight(sizes.heads)
        self.add_norm(config)
        self.D = Weight(sizes.heads)
        self.out_proj = Linear(sizes.inner, hidden, bias=self.output_bias(config))

    def read_sizes(self, config: ConfigReader) -> Sizes:
        heads, inner = (
            config.integer("num_heads"),
            expanded(config, "expand", config.integer("hidden_size")),
        )
        check_heads(config, "num_heads", heads, config.integer("head_dim"), inner)
        return Sizes(
            inner=inner, heads=heads, groups=config.integer("n_groups"),
            state=config.integer("state_size"), kernel=config.integer("conv_kernel"),
            chunk=config.integer("chunk_size"), activation=read_activation(config, "hidden_act"),
            bias=config.flag("use_bias"), convolution_bias=config.flag("use_conv_bias"),
        )  # fmt: skip

    def output_bias(self, config: ConfigReader) -> bool:  # noqa: ARG002
        return self.sizes.bias

    def add_norm(self, config: ConfigReader) -> None:  # noqa: ARG002
        self.norm = MambaRMSNormGated(self.sizes.inner, self.sizes.groups)

    def forward(self, x: Handle) -> Handle:
        sizes, dtype = self.sizes, x.dtype
        batch, length, _ = x.shape
        groups = sizes.groups * sizes.state
        projected_states = self.projected(x)
        rate = -self.operand(self.A_log).float().unary(OperationKind.EXP)
        self.read_apart(self.conv1d, called=False)
        # A package's function would be given these too.
        self.read_apart(*() if self.norm is None else (self.norm,), self.out_proj, called=True)
        gate, states, time_step = projected_states.split(sizes.inner, sizes.channels, sizes.heads)
        states = states.transpose(1, 2)
        states = self.conv1d(states, sizes.activation)
        states = states.transpose(1, 2)
        states, keys, queries = states.split(sizes.inner, groups, groups)
        # Of the two names the first is let go of first.
        scan_output = scan_result = self.scan(
            states.view(batch, length, sizes.heads, -1), time_step, rate,
            keys.view(batch, length, sizes.groups, -1), queries.view(batch, length, sizes.groups, -1),
        )  # fmt: skip
        scan_output = scan_output.reshape(batch, length, -1)
        scan_output = self.gated(scan_output, gate)
        return self.out_proj(scan_output.to(dtype))

    def projected(self, x: Handle) -> Handle:
        return self.in_proj(x)

    def gated(self, x: Handle, gate: Handle) -> Handle:
        assert self.norm is not None
        normed: Handle = self.norm(x, gate)
        return normed

    def scan(
        self, states: Handle, time_step: Handle, rate: Handle, keys: Handle, queries: Handle
    ) -> Handle:
        """``mamba2_chunk_scan``, in fp32."""
        time_step = time_step + self.operand(self.dt_bias).to(time_step.dtype)
        time_step = fp32_under_autocast(time_step).unary(OperationKind.SOFTPLUS)
        time_step = clamped(time_step, bounds=2)
        states = states.float()
        heads, length, chunk = self.sizes.heads, states.shape[1], self.sizes.chunk
        keys = interleaved(keys.float(), heads)
        queries = interleaved(queries.float(), heads)
        filled = whole(length, chunk)
        skip = self.operand(self.D)
        skip.record.by_column = False  # of a head all that is summed up lies together
        residual = skip.unsqueeze(-1) * padded(states, filled)
        states = states * time_step.unsqueeze(-1).float()
        rate = rate * time_step.float()
        states, rate, keys, queries = (
            in_chunks(each, filled, chunk) for each in (states, rate, keys, queries)
        )
        given = [residual, queries, keys, rate.permute(0, 3, 1, 2), states]
        # One function in transformers, which lets go of these before what is found of them.
        del residual, queries, keys, rate, states
        output = chunk_scan(given.pop(), given.pop(), given.pop(), given.pop(), given.pop())
        return output.narrow(length, 1) if filled > length else output


def in_chunks(x: Handle, filled: int, chunk: int) -> Handle:
    """``reshape_into_chunks``."""
    x = padded(x, filled)
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])


def interleaved(x: Handle, heads: int) -> Handle:
    """``x.repeat_interleave(..., dim=2)``."""
    batch, length, _, width = x.shape
    made = empty(x.run, (batch, length, heads, width), x.dtype)
    x.run.record(
        OperationKind.REPEAT_INTERLEAVE, (x.record,), (made.record,), gradients=(Gradient.FRESH,)
    )
    return x.leads_to(made, in_rows(x.shape))


def chunk_scan(
    states: Handle, rate: Handle, keys: Handle, queries: Handle, residual: Handle
) -> Handle:
    """Within chunks and between them, and what passes by."""
    total = running_sum(rate)
    pairwise = segment_sum(rate).unary(OperationKind.EXP)
    scores = einsum("bclhn,bcshn->bclsh", queries, keys)
    weights = scores * pairwise.permute(0, 2, 3, 4, 1)
    within = einsum("bclsh,bcshp->bclhp", weights, states)
    decay_states = remaining(total).unary(OperationKind.EXP)
    faded = keys * decay_states.permute(0, -2, -1, 1).unsqueeze(-1)
    added = einsum("bclhn,bclhp->bchpn", faded, states)
    previous_states = made_by(
        states.run, OperationKind.ZEROS, (added.shape[0], 1, *added.shape[2:]), added.dtype
    )
    added = concatenate(previous_states, added, dim=1)
    decay_chunk = segment_sum(padded(total.select(-1), total.shape[2] + 1, -1))
    decay_chunk = decay_chunk.unary(OperationKind.EXP).transpose(1, 3)
    new_states = einsum("bzch,bzhpn->bchpn", decay_chunk, added)
    added = new_states.narrow(new_states.shape[1] - 1, 1)
    state_decay_out = total.unary(OperationKind.EXP)
    earlier = einsum("bclhn,bchpn->bclhp", queries, added)
    before = earlier * state_decay_out.permute(0, 2, 3, 1).unsqueeze(-1)
    output = (within + before).contiguous()
    output = output.reshape(*residual.shape)
    output = output + residual
    return output


def remaining(total: Handle) -> Handle:
    """``total[..., -1:] - total``."""
    run, last = total.run, total.narrow(1)
    made = empty(run, total.shape, total.dtype)
    run.record(
        OperationKind.SUB, (last.record, total.record), (made.record,),
        gradients=(Gradient.SUMMED, Gradient.FRESH),
    )  # fmt: skip
    return made


class Mamba2Block(MambaBlock):
    def add_mixer(self, config: ConfigReader) -> None:
        self.mixer = Mamba2Mixer(config)


class Mamba2Model(MambaModel):
    layer_class: type[DecoderLayer] = Mamba2Block
