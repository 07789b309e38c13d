"""Zamba and Zamba 2: mixers, and before some of them a block whose weights other layers run too.

The block reads hidden states and embeddings side by side. Its weights are the first such layer's; what
later ones have of their own are a projection of its result and, in Zamba 2, adapters.

(transformers 5.23: models/zamba, models/zamba2)
"""

from collections.abc import Sequence
from itertools import count, pairwise
from typing import NamedTuple

from memplan.classes.llama import (
    DecoderLayer,
    GatedMLP,
    GateUpMLP,
    Heads,
    LlamaAttention,
    Window,
)
from memplan.classes.recurrent.convolution import CausalConv1d
from memplan.classes.recurrent.hybrids import LEGACY_KINDS, UnturnedModel, periodic
from memplan.classes.recurrent.mamba import MambaMixer, Mixer
from memplan.classes.recurrent.mamba2 import Mamba2Mixer, Sizes
from memplan.classes.recurrent.sizes import expanded, time_step_rank
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import ActivationModule, Linear, RMSNorm
from memplan.graph.modules.contractions import multiplied
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.masks import position_ids
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import Tables, concatenate
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.networks import Activation
from memplan.model.parameters import WeightRole

HYBRID, LINEAR = "hybrid", "linear_attention"


class ZambaKind(NamedTuple):
    """Whether a layer runs a block first."""

    turn: int = -1
    """How many layers with a block came before; -1: it has none."""
    window: Window = None
    turned: bool = False


def zamba_kinds(names: Sequence[str]) -> list[ZambaKind]:
    """The layers of these names.

    >>> [kind.turn for kind in zamba_kinds(["hybrid", "linear_attention", "hybrid"])]
    [0, -1, 1]
    """
    turns = count()
    return [ZambaKind(next(turns) if name == HYBRID else -1) for name in names]


def named_kinds(config: ConfigReader) -> list[str]:
    """``layers_block_type``, by present names."""
    found = [LEGACY_KINDS.get(each, each) for each in config.texts("layers_block_type")]
    for each in found:
        config.choice("layers_block_type", each, (HYBRID, LINEAR))
    return found


class ZambaMambaMixer(MambaMixer):
    """In heads: what they scan is projected and scanned for each head by itself."""

    is_given_names = True
    is_one_function = False

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("hidden_size")
        self.inner, heads = (
            expanded(config, "mamba_expand", hidden),
            config.integer("n_mamba_heads"),
        )
        width = config.divide("mamba_expand", self.inner, "n_mamba_heads", heads)
        self.heads, self.state = heads, config.integer("mamba_d_state")
        self.rank, bias = (
            time_step_rank(config, "mamba_dt_rank", hidden),
            config.flag("mamba_proj_bias"),
        )
        self.activation = read_activation(config, "hidden_mamba_act")
        self.conv1d = CausalConv1d(
            self.inner, config.integer("mamba_d_conv"), bias=config.flag("mamba_conv_bias")
        )
        self.in_proj = Linear(hidden, 2 * self.inner, bias=bias)
        self.x_proj_weight = Weight(heads, self.rank + 2 * self.state, width)
        self.dt_proj_weight = Weight(heads, width, self.rank)
        self.dt_proj_bias = Weight(heads, width, role=WeightRole.OTHER)
        # Made of fp32 numbers, which neither class nor checkpoint ever casts.
        self.A_log = Weight(heads, width, self.state, dtype=DType.FP32)
        self.D = Weight(heads, width)
        self.out_proj = Linear(self.inner, hidden, bias=bias)

    def forward(self, x: Handle) -> Handle:
        (batch, length, _), dtype, heads = x.shape, x.dtype, self.heads
        projected_states = self.in_proj(x).transpose(1, 2)
        states, gate = projected_states.view(batch, -1, 2, length).split(1, 1, dim=2)
        states = states.view(batch, -1, length).contiguous()
        gate = gate.reshape(batch, heads, -1, length).transpose(0, 1)
        self.read_apart(self.conv1d, called=False)
        states = self.conv1d(states, self.activation)
        states = states.reshape(batch, heads, -1, length).transpose(0, 1)
        ssm_parameters = self.by_heads(self.x_proj_weight, states).transpose(-1, -2)
        time_step, keys, queries = ssm_parameters.split(self.rank, self.state, self.state)
        time_step = self.by_heads(self.dt_proj_weight, time_step.transpose(-1, -2))
        time_proj_bias = self.operand(self.dt_proj_bias).float()
        rate = -self.operand(self.A_log).float().unary(OperationKind.EXP)
        scan_outputs = []
        for _ in range(heads):
            read = (each.select(0) for each in (states, time_step, rate, keys, queries))
            own, ahead, fading, written, asked = read
            made = self.scan(
                own, ahead, fading, written.transpose(1, 2), asked.transpose(1, 2),
                self.operand(self.D).select(0).float(), gate.select(0), time_proj_bias.select(0),
            )  # fmt: skip
            scan_outputs.append(made)
        scan_output = concatenate(*scan_outputs, dim=1)
        return self.out_proj(scan_output.transpose(1, 2).to(dtype))

    def by_heads(self, weight: Weight, x: Handle) -> Handle:
        """``weight[:, None] @ x``: of each head and sequence."""
        factor, run, batch = self.operand(weight), self.run, x.shape[1]
        if run.autocast is not None:
            x, factor = x.to(run.autocast), factor.to(run.autocast)
        heads, rows, columns = factor.shape
        shape = heads, batch, rows, x.shape[-1]
        factor = factor.unsqueeze(1)
        if batch > 1:
            factor = spread_out(factor, batch)
        left = factor.view(-1, rows, columns)
        made = multiplied(left, x.reshape(-1, columns, x.shape[-1]))
        return made.view(*shape)


def spread_out(x: Handle, times: int) -> Handle:
    """``x.expand(-1, times, -1, -1).reshape(...)``: a copy."""
    heads, _, *rest = x.shape
    made = empty(x.run, (heads, times, *rest), x.dtype)
    x.run.record(OperationKind.EXPAND, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
    return x.leads_to(made, in_rows(x.shape))


class ZambaAttention(LlamaAttention):
    """Queries, keys and values of states and embeddings."""

    def __init__(self, config: ConfigReader, turn: int) -> None:
        self.turn_number = turn
        heads = config.integer("num_attention_heads")
        self.num_heads = heads
        self.num_kv_heads = config.integer("num_key_value_heads", default=heads)
        config.divide("num_attention_heads", heads, "num_key_value_heads", self.num_kv_heads)
        self.width = self.input_width(config)
        self.head_dim = self.own_head_dim(config)
        self.attention_dropout = config.number("attention_dropout")
        self.add_projections(config)

    def input_width(self, config: ConfigReader) -> int:
        hidden = config.integer("hidden_size")
        width = config.integer("attention_hidden_size", default=2 * hidden)
        if width != 2 * hidden:
            key, problem = (
                "attention_hidden_size",
                f"{width} is not twice the hidden_size ({hidden})",
            )
            raise config.fail(key, problem)
        return width

    def own_head_dim(self, config: ConfigReader) -> int:
        return config.integer("attention_head_dim", default=self.width // self.num_heads)

    def add_projections(self, config: ConfigReader) -> None:
        width, heads, matched = self.width, self.num_heads, WeightRole.QUERY_KEY
        self.q_proj = Linear(width, heads * self.head_dim, role=matched)
        self.k_proj = Linear(width, self.num_kv_heads * self.head_dim, role=matched)
        self.v_proj = Linear(width, self.num_kv_heads * self.head_dim)
        role = WeightRole.ATTENTION_OUTPUT
        self.o_proj = Linear(heads * self.head_dim, config.integer("hidden_size"), role=role)


class AdapterList(Module):
    """``nn.ModuleList`` of two linear layers for each layer that runs the block, of which one has this turn."""

    def __init__(self, turn: int, *sizes: int) -> None:
        self.turn_number = str(turn)
        setattr(self, self.turn_number, Sequential(*sizes))

    def forward(self, x: Handle) -> Handle:
        made: Handle = self.children[self.turn_number](x)
        return made


class Sequential(Module):
    """Linear layers one after another."""

    def __init__(self, *sizes: int) -> None:
        for number, (before, after) in enumerate(pairwise(sizes)):
            setattr(self, str(number), Linear(before, after))

    def forward(self, x: Handle) -> Handle:
        for each in self.children.values():
            x = each(x)
        return x


class Zamba2Attention(ZambaAttention):
    """Its heads may know positions; what all layers share each adapts for itself."""

    def __init__(self, config: ConfigReader, turn: int) -> None:
        super().__init__(config, turn)
        self.turned = config.flag("use_mem_rope")
        self.adapts = config.flag("use_shared_attention_adapter")
        if not self.adapts:
            return
        if self.num_kv_heads != self.num_heads:
            key, problem = "num_key_value_heads", "the adapters of keys are as wide as queries"
            raise config.fail(key, problem)
        sizes = self.width, config.integer("adapter_rank"), self.width
        for name in "qkv":
            setattr(self, f"linear_{name}_adapter_list", AdapterList(turn, *sizes))

    def input_width(self, config: ConfigReader) -> int:
        return 2 * config.integer("hidden_size")

    def own_head_dim(self, config: ConfigReader) -> int:
        return config.divide("hidden_size", self.width, "num_attention_heads", self.num_heads)

    def projected(self, x: Handle) -> Heads:
        batch, length, _ = x.shape
        query = self.q_proj(x)
        key = self.k_proj(x)
        value = self.v_proj(x)
        if self.adapts:
            query = query + self.children["linear_q_adapter_list"](x)
            key = key + self.children["linear_k_adapter_list"](x)
            value = value + self.children["linear_v_adapter_list"](x)
        query = query.view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = key.view(batch, length, -1, self.head_dim).transpose(1, 2)
        value = value.view(batch, length, -1, self.head_dim).transpose(1, 2)
        return query, key, value


class ZambaMLP(GatedMLP):
    def __init__(self, config: ConfigReader, turn: int) -> None:  # noqa: ARG002
        super().__init__(config)


class Zamba2MLP(GateUpMLP):
    def __init__(self, config: ConfigReader, turn: int) -> None:
        hidden, bias = config.integer("hidden_size"), config.flag("add_bias_linear")
        inner = config.integer("intermediate_size", default=4 * hidden)
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.act_fn = ActivationModule(read_activation(config, "hidden_act"))
        rank = config.integer("adapter_rank")
        self.gate_up_proj_adapter_list = AdapterList(turn, hidden, rank, 2 * inner)

    def forward(self, x: Handle) -> Handle:
        gate_up_state = self.gate_up_proj(x)
        gate_up_state = gate_up_state + self.gate_up_proj_adapter_list(x)
        width = gate_up_state.shape[-1] // 2
        halves = gate_up_state.split(width, width)
        del gate_up_state
        x = self.act_fn(halves[0]) * halves[1]
        return self.down_proj(x)


class SharedBlock(Module):
    """A norm, attention, another norm and the network; no sums between them."""

    attention_class: type[ZambaAttention] = ZambaAttention
    mlp_class: type[ZambaMLP | Zamba2MLP] = ZambaMLP

    def __init__(self, config: ConfigReader, turn: int) -> None:
        self.self_attn = self.attention_class(config, turn)
        self.feed_forward = self.mlp_class(config, turn)
        self.input_layernorm = RMSNorm(self.self_attn.width)
        self.pre_ff_layernorm = RMSNorm(config.integer("hidden_size"))

    def forward(self, x: Handle, original: Handle, tables: Tables, mask: Handle | None) -> Handle:
        x = concatenate(x, original)
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, tables, mask)
        x = self.pre_ff_layernorm(x)
        x = self.feed_forward(x)
        return x


class Zamba2SharedBlock(SharedBlock):
    attention_class = Zamba2Attention
    mlp_class = Zamba2MLP


def share(module: Module, first: Module) -> None:
    """Tie the weights of a block to those of the first one."""
    for name, weight in first.weights.items():
        setattr(module, name, weight)
    for name, each in first.children.items():
        if name in module.children:
            share(module.children[name], each)


class ZambaMambaDecoderLayer(DecoderLayer):
    placement = NormPlacement.SINGLE

    def __init__(self, config: ConfigReader, mixer: Mixer) -> None:
        self.mamba = mixer
        self.input_layernorm = RMSNorm(config.integer("hidden_size"))

    def forward(
        self,
        x: Handle,
        original: Handle,
        tables: Tables,  # noqa: ARG002
        mask: Handle | None,
        added: Handle | None = None,
    ) -> Handle:
        for each in (original, mask):  # which a checkpoint keeps, read or not
            if each is not None:
                self.run.be_handed(each.record)
        residual = x
        x = x if added is None else x + added
        x = self.input_layernorm(x)
        x = self.mamba(x)
        x = residual + x
        return x


class ZambaHybridLayer(DecoderLayer):
    placement = NormPlacement.SINGLE
    shared = "shared_transf"
    """What it calls its block."""

    def __init__(self, config: ConfigReader, block: SharedBlock, mixer: Mixer) -> None:
        hidden = config.integer("hidden_size")
        setattr(self, self.shared, block)
        self.linear = Linear(hidden, hidden)
        self.mamba_decoder = ZambaMambaDecoderLayer(config, mixer)

    def forward(self, x: Handle, original: Handle, tables: Tables, mask: Handle | None) -> Handle:
        run = self.run
        transformer_hidden_states = self.children[self.shared](x, original, tables, mask)
        transformer_hidden_states = self.linear(transformer_hidden_states)
        if run.segment.checkpointed:
            # The mixer's module is checkpointed by itself, inside this layer, which keeps what it is given.
            run.segment.kept_outputs |= {transformer_hidden_states.record.storage}
        return self.mamba_decoder(x, original, tables, mask, transformer_hidden_states)


class Zamba2HybridLayer(ZambaHybridLayer):
    shared = "shared_transformer"

    def __init__(self, config: ConfigReader, block: SharedBlock, mixer: Mixer) -> None:
        super().__init__(config, block, mixer)
        self.children[self.shared] = self.children.pop(self.shared)  # it is declared last


class ZambaModel(UnturnedModel):
    last = "final_layernorm"
    adds_router_loss = False
    block_class: type[SharedBlock] = SharedBlock
    hybrid_class: type[ZambaHybridLayer] = ZambaHybridLayer

    def __init__(self, config: ConfigReader) -> None:
        self.blocks: dict[int, SharedBlock] = {}
        super().__init__(config)

    def kinds(self, config: ConfigReader) -> Sequence[ZambaKind]:  # type: ignore[override]
        return zamba_kinds(self.names(config))

    def names(self, config: ConfigReader) -> list[str]:
        found = named_kinds(config)
        if found:
            return found
        runs_block = periodic(config, "attn_layer_period", "attn_layer_offset")
        later = range(config.layers("num_hidden_layers") - 3)
        return [LINEAR, LINEAR, HYBRID, *(HYBRID if runs_block(at) else LINEAR for at in later)]

    def layer_class(self, config: ConfigReader, kind: ZambaKind) -> DecoderLayer:  # type: ignore[override]
        mixer = self.mixer(config)
        if kind.turn < 0:
            return ZambaMambaDecoderLayer(config, mixer)
        mixer.shares = True
        block = self.block_class(config, kind.turn)
        number = kind.turn % self.num_blocks(config)
        if number in self.blocks:
            share(block, self.blocks[number])
        self.blocks.setdefault(number, block)
        return self.hybrid_class(config, block, mixer)

    def num_blocks(self, config: ConfigReader) -> int:  # noqa: ARG002
        return 1

    def mixer(self, config: ConfigReader) -> Mixer:
        return ZambaMambaMixer(config)

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        embeds, *_ = self.joined(embeds)
        x = embeds
        original_hidden_states = embeds.clone()
        positions = position_ids(self.run, batch, length)
        mask = self.masks(batch, length)[None]
        tables = self.tables(x, positions)[None]
        for layer in self.layer_list:
            x = layer(x, original_hidden_states, tables, mask, unread=positions)
        x = self.children[self.last](x)
        return x


class Zamba2MambaMixer(Mamba2Mixer):
    is_given_names = True

    def read_sizes(self, config: ConfigReader) -> Sizes:
        hidden = config.integer("hidden_size")
        return Sizes(
            inner=expanded(config, "mamba_expand", hidden), heads=config.integer("n_mamba_heads"),
            groups=config.integer("mamba_ngroups"), state=config.integer("mamba_d_state"),
            kernel=config.integer("mamba_d_conv"), chunk=config.integer("chunk_size"),
            activation=Activation.SILU, bias=config.flag("add_bias_linear"), convolution_bias=True,
        )  # fmt: skip


ZAMBA2_NAMES = (
    *(LINEAR,), *(*(LINEAR,) * 5, HYBRID) * 7, *(*(LINEAR,) * 4, HYBRID),
    *(*(LINEAR,) * 3, HYBRID), *(LINEAR,) * 2,
)  # fmt: skip
"""What ``Zamba2Config`` fills in, whatever the number of layers."""


class Zamba2Model(ZambaModel):
    block_class = Zamba2SharedBlock
    hybrid_class = Zamba2HybridLayer

    def __init__(self, config: ConfigReader) -> None:
        self.turned = config.flag("use_mem_rope")
        super().__init__(config)

    def names(self, config: ConfigReader) -> list[str]:
        return named_kinds(config) or list(ZAMBA2_NAMES)

    def num_blocks(self, config: ConfigReader) -> int:
        return config.integer("num_mem_blocks")

    def mixer(self, config: ConfigReader) -> Mixer:
        return Zamba2MambaMixer(config)

    def add_rotary(self, config: ConfigReader) -> None:
        if self.turned:
            width = 2 * config.integer("hidden_size") // config.integer("num_attention_heads")
            self.rotary_emb = self.rotary_class(width)

    def tables(self, x: Handle, positions: Handle) -> dict[Window, Tables]:
        if not self.turned:
            return super().tables(x, positions)
        return {None: self.rotary_emb(x, positions)}
