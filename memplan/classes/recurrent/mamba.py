"""Mamba and Falcon-Mamba: a scan over the tokens, one after another.

``mamba_selective_scan`` makes a state of every channel for each token in a Python loop, and three
tensors of channels x tokens x states before it; nearly all is kept for backward, in fp32.

(transformers 5.23: models/mamba, models/falcon_mamba)
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from memplan.classes.llama import Decoder, DecoderLayer, LayerKind, SelfAttention
from memplan.classes.recurrent.convolution import CausalConv1d
from memplan.classes.recurrent.sizes import expanded, time_step_rank
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import (
    Embedding,
    Linear,
    Norm,
    RMSNorm,
    fp32_under_autocast,
)
from memplan.graph.modules.functional import activated, batched_product
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.iteration import Turns
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.operations.products import base_product
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.mixers import MixerSpec
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole

Scanned = tuple[Handle, Handle, Handle]
"""Time steps of every channel, and what tokens write to and read from a state."""


class Mixer(SelfAttention):
    """What mixes tokens in attention's place."""

    block = LayerBlock.MIXER
    scans = False
    """Its scan may be a package's."""
    shares = False
    """Its layer runs the weights of an earlier one."""

    def facts(self) -> MixerSpec:
        return MixerSpec(scans=self.scans, shares=self.shares)


class MambaMixer(Mixer):
    scans = True
    names = "use_bias", "use_conv_bias", "state_size", "conv_kernel", "time_step_rank"
    """What its config calls biases, states, the convolution's kernel, and the width of time steps."""

    is_one_function = True
    """The package has one function for all of the mixer."""

    def __init__(self, config: ConfigReader, inner: int) -> None:
        biased, convolved, state, kernel, rank = self.names
        hidden, bias = config.integer("hidden_size"), config.flag(biased)
        self.inner, self.state = inner, config.integer(state)
        self.rank = time_step_rank(config, rank, hidden)
        self.activation = read_activation(config, "hidden_act")
        self.conv1d = CausalConv1d(inner, config.integer(kernel), bias=config.flag(convolved))
        self.in_proj = Linear(hidden, 2 * inner, bias=bias)
        self.x_proj = Linear(inner, self.rank + 2 * self.state)
        self.dt_proj = Linear(self.rank, inner, bias=True)
        self.A_log = Weight(inner, self.state)
        self.D = Weight(inner)
        self.out_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: Handle) -> Handle:
        dtype = x.dtype
        projected_states = self.in_proj(x).transpose(1, 2)
        rate = -self.operand(self.A_log).float().unary(OperationKind.EXP)
        self.read_apart(self.conv1d, called=False)
        if self.is_one_function:
            self.read_apart(self.x_proj, called=True)
            self.read_apart(self.dt_proj, called=False)
            self.read_apart(self.out_proj, called=True)
        states, gate = projected_states.split(self.inner, self.inner, dim=1)
        states = self.conv1d(states, self.activation)
        states = states.transpose(1, 2)
        time_step, keys, queries = self.normed(
            *self.x_proj(states).split(self.rank, self.state, self.state)
        )
        if not self.is_one_function:
            self.read_apart(self.dt_proj, called=False)
        time_step = self.time_steps(time_step)
        time_proj_bias = self.dt_proj.operand(self.dt_proj.bias).float()
        scan_output = self.scan(
            states.transpose(1, 2), time_step, rate, keys.transpose(1, 2), queries.transpose(1, 2),
            self.operand(self.D).float(), gate, time_proj_bias,
        )  # fmt: skip
        return self.out_proj(scan_output.transpose(1, 2).to(self.run.autocast or dtype))

    def normed(self, time_step: Handle, keys: Handle, queries: Handle) -> Scanned:
        return time_step, keys, queries

    def time_steps(self, x: Handle) -> Handle:
        """``self.dt_proj.weight @ x.transpose(1, 2)``; of a quantized model the module is called (``_is_quantized``)."""
        weight = self.dt_proj.parameter(self.dt_proj.weight)
        if weight.packed is not None:
            made = self.dt_proj(x) - self.dt_proj.operand(self.dt_proj.bias)
            return made.transpose(1, 2)
        made = Handle(
            self.run, base_product(self.run, x.record, weight), (*x.shape[:2], self.inner)
        )
        return made.transpose(1, 2).contiguous()

    def scan(self, *given: Handle) -> Handle:
        return mamba_selective_scan(*given)


def mamba_selective_scan(
    states: Handle,
    time_step: Handle,
    rate: Handle,
    keys: Handle,
    queries: Handle,
    skip: Handle,
    gate: Handle,
    bias: Handle,
) -> Handle:
    """A state of every channel for each token in a Python loop."""
    dtype, length = states.dtype, states.shape[2]
    time_step = time_step + bias.to(time_step.dtype).unsqueeze(-1)
    time_step = fp32_under_autocast(time_step).unary(OperationKind.SOFTPLUS)
    keys = keys.transpose(1, 2)
    queries = queries.transpose(1, 2)
    discrete_a = (rate.unsqueeze(0).unsqueeze(2) * time_step.unsqueeze(3)).unary(OperationKind.EXP)
    discrete_b = time_step.unsqueeze(3) * keys.unsqueeze(1).float()
    entering = discrete_b * states.unsqueeze(3).float()
    shape = *states.shape[:2], rate.shape[-1]
    state = made_by(states.run, OperationKind.ZEROS, shape, dtype)
    turns, scan_outputs = Turns(states.run, length), []
    for turn in turns:
        state = discrete_a.select(2) * state + entering.select(2)
        scan_output = batched_product(state.to(dtype), queries.select(1).unsqueeze(-1))
        turns.collect(scan_output.record, turn)
        scan_outputs.append(scan_output.select(2))
    scan_output = stacked(scan_outputs, states.shape)
    turns.close()
    scan_output = scan_output + states * skip.unsqueeze(0).unsqueeze(-1)
    return scan_output * activated(gate, Activation.SILU)


def stacked(parts: list[Handle], shape: tuple[int, ...]) -> Handle:
    """``torch.stack(parts, dim=-1)``."""
    run, made = parts[0].run, empty(parts[0].run, shape, parts[0].dtype)
    run.record(
        OperationKind.CAT, [each.record for each in parts], (made.record,),
        gradients=(Gradient.ALIAS,) * len(parts),
    )  # fmt: skip
    return made


class FalconMambaWeightlessRMSNorm(Module):
    """It has a buffer of ones, for kernels alone."""

    def __init__(self, width: int) -> None:
        self.width = width

    def forward(self, x: Handle) -> Handle:
        dtype = x.dtype
        x = x.float()
        x = x * (x.pow(2).mean() + 1e-6).rsqrt()
        return x.to(dtype)


class FalconMambaMixer(MambaMixer):
    def __init__(self, config: ConfigReader, inner: int) -> None:
        super().__init__(config, inner)
        self.dt_layernorm = FalconMambaWeightlessRMSNorm(inner)
        self.b_layernorm = FalconMambaWeightlessRMSNorm(self.state)
        self.c_layernorm = FalconMambaWeightlessRMSNorm(self.state)

    def normed(self, time_step: Handle, keys: Handle, queries: Handle) -> Scanned:
        hold_ones(self)
        time_step = self.dt_layernorm(time_step)
        keys = self.b_layernorm(keys)
        queries = self.c_layernorm(queries)
        return time_step, keys, queries


def hold_ones(mixer: Module) -> None:
    """Norms without weights own buffers all the same."""
    for each in mixer.children.values():
        if isinstance(each, FalconMambaWeightlessRMSNorm):
            mixer.run.buffer(each.width, mixer.run.options.weights)


class MambaBlock(DecoderLayer):
    placement = NormPlacement.SINGLE
    mixer_class: type[MambaMixer] = MambaMixer

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:  # noqa: ARG002
        hidden = config.integer("hidden_size")
        self.residual_in_fp32 = config.flag("residual_in_fp32")
        self.norm = RMSNorm(hidden)
        self.add_mixer(config)

    def add_mixer(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        inner = config.optional_integer("intermediate_size") or expanded(config, "expand", hidden)
        self.mixer: Mixer = self.mixer_class(config, inner)

    def forward(self, x: Handle) -> Handle:
        residual = x
        x = self.norm(x.to(self.run.compute))
        if self.residual_in_fp32:
            residual = residual.float()
        x = self.mixer(x)
        x = residual + x
        return x


class FalconMambaBlock(MambaBlock):
    mixer_class = FalconMambaMixer


class MambaModel(Decoder):
    prefix = "backbone"
    table = "embeddings"
    last = "norm_f"
    layer_class: Callable[[ConfigReader, Any], DecoderLayer] = MambaBlock
    norm_class: type[Norm] = RMSNorm

    def __init__(self, config: ConfigReader) -> None:
        hidden, rows = config.integer("hidden_size"), config.integer("vocab_size")
        self.embeddings = Embedding(rows, hidden, role=WeightRole.TOKEN_TABLE)
        kinds = self.kinds(config)
        self.layers = LayerList(
            "decoder.layers", kinds, lambda kind: self.layer_class(config, kind)
        )
        self.norm_f = self.norm_class(hidden)
        self.norm_f.segment = "decoder.norm", ModelPart.NORM

    def kinds(self, config: ConfigReader) -> Sequence[Hashable]:
        return [LayerKind(turned=False)] * config.layers("num_hidden_layers")

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        embeds, *_ = self.joined(embeds)
        x = embeds
        for block in self.layers:
            x = block(x)
        x = self.norm_f(x)
        return x

    def before_head(self, x: Handle) -> Handle:
        return x.to(self.run.compute)

    def adjusted(self, logits: Handle) -> Handle:
        return logits.float()


class FalconMambaModel(MambaModel):
    layer_class = FalconMambaBlock
