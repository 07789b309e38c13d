"""Linear attention by the gated delta rule, chunk by chunk: Qwen3-Next and Qwen3.5.

``torch_chunk_gated_delta_rule`` widens queries, keys and values to fp32, pads them to whole chunks,
solves a triangular system for each chunk and then walks over the chunks with one state for each head.
Nearly all that it makes is kept for backward.

(transformers 5.23: models/qwen3_next, models/qwen3_5, models/qwen3_5_moe)
"""

from collections.abc import Callable, Sequence
from math import prod

from memplan.classes.gemma import GemmaRMSNorm
from memplan.classes.llama import (
    DecoderLayer,
    GatedMLP,
    Heads,
    LayerKind,
    LlamaAttention,
    head_width,
)
from memplan.classes.mixed.mixtures import MixtureModel, Qwen2MoeSparseMoeBlock
from memplan.classes.recurrent.chunks import padded, running_sum, whole
from memplan.classes.recurrent.convolution import CausalConv1d
from memplan.classes.recurrent.hybrids import HybridLayer, layer_kinds
from memplan.classes.recurrent.mamba import Mixer
from memplan.classes.recurrent.mamba2 import interleaved, remaining
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import allocated_bytes
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import Linear, Norm, scaled
from memplan.graph.modules.contractions import matmul
from memplan.graph.modules.functional import activated, in_rows_again, masked_fill, total
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layouts import always
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import (
    SectionedRotaryEmbedding,
    Tables,
    Turn,
    apply_rotary_to_part,
    concatenate,
    turn_function,
)
from memplan.graph.modules.run import Run
from memplan.graph.modules.strides import Shape, row_strides
from memplan.graph.modules.unread import UnreadGraph
from memplan.graph.operations.elementwise import written
from memplan.model.attention import OutputGate
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import LayerBlock, WeightRole

MOST_IN_TURN = 8
"""Systems of a chunk that cuBLAS is given one by one."""
CHUNK = 64
"""Tokens of a chunk: the default of ``torch_chunk_gated_delta_rule``."""


def l2norm(x: Handle) -> Handle:
    """Times the reciprocal root of the sum of its squares."""
    inv_norm = (total(x * x) + 1e-6).rsqrt()
    return x * inv_norm


def widened(x: Handle) -> Handle:
    """``x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)``."""
    x = x.transpose(1, 2)
    if x.dtype is DType.FP32:
        return x
    made = Handle(x.run, x.run.cast(x.record, DType.FP32), x.shape)
    return x.leads_to(made)


def later_tokens(run: Run) -> Handle:
    """``torch.ones(...).triu(...)`` of a chunk's pairs."""
    ones = made_by(run, OperationKind.ONES, (CHUNK, CHUNK), DType.BOOL)
    return ones.apart(OperationKind.TRIU)


def of_pairs(x: Handle) -> Handle:
    """``x.unsqueeze(4) - x.unsqueeze(3)``."""
    run, shape = x.run, (*x.shape, x.shape[-1])
    made = empty(run, shape, x.dtype)
    run.record(
        OperationKind.SUB, (x.record, x.record), (made.record,),
        gradients=(Gradient.SUMMED, made.record.storage.num_bytes),
    )  # fmt: skip
    return made


def solved(system: Handle, right: Handle) -> Handle:
    """``torch.linalg.solve_triangular``: keeps the system and its solution, both ways column by column."""
    made = empty(right.run, right.shape, right.dtype)
    made.strides = columns(right.shape)
    pointers, whole_bytes = batch_pointers(right), system.record.storage.num_bytes
    # The right side's gradient is solved for; the system's is a product, negated, then its lower half.
    lower = whole_bytes, whole_bytes, ~(1 + 2 * len(pointers)), RESULT
    backward = (RESULT, *pointers, *((~2, ~1) if pointers else ()), *lower)
    right.run.record(
        OperationKind.SOLVE_TRIANGULAR, (right.record, system.record), (made.record,),
        saves=(system.record, made.record), gradients=(Gradient.FRESH, Gradient.FRESH),
        forward_scratch_bytes=(RESULT, *pointers),
        backward_scratch_bytes=backward, flops=made.numel * CHUNK,
    )  # fmt: skip
    return right.leads_to(made, always(made.strides))


def batch_pointers(right: Handle) -> tuple[int, ...]:
    """Addresses of both matrices of every system, for cuBLAS; few large systems it solves in turn.

    (torch 2.13, aten/src/ATen/native/cuda/linalg/BatchLinearAlgebra.cpp, ``triangular_solve_kernel``)
    """
    systems = prod(right.shape[:-2])
    if right.run.decomposed or systems <= MOST_IN_TURN:
        return ()
    return (allocated_bytes(systems, DType.INT64),) * 2


def columns(shape: Shape) -> Shape:
    """Strides of matrices whose columns lie one after another."""
    *rest, column, row = row_strides((*shape[:-2], shape[-1], shape[-2]))
    return *rest, row, column


def difference(left: Handle, right: Handle) -> Handle:
    """``left - right``: the second one's gradient is negated, and cast where it has another format."""
    made = left.run.tensor(left.numel, left.dtype)
    negated = Gradient.FRESH if right.dtype is left.dtype else made.storage.num_bytes
    left.run.record(
        OperationKind.SUB, (left.record, right.record), (made,),
        gradients=(Gradient.ALIAS, negated),
    )  # fmt: skip
    return left.like(made, right)


def apart(x: Handle, dim: int) -> Handle:
    """``x.unsqueeze(dim)``, whose gradient is a view, to which the engine adds nothing in place."""
    shape = list(x.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return x.seen_as(*shape)


def in_chunks(x: Handle) -> Handle:
    """Of (batch, heads, tokens, ...)."""
    return x.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:])


def seen_in_chunks(x: Handle) -> Handle:
    """The same of what others read as it was: its gradient, to which theirs are added, is a view."""
    return x.seen_as(*x.shape[:2], -1, CHUNK, *x.shape[3:])


def write(out: Handle, part: Handle) -> Handle:
    """``out[:, :, i] = part``."""
    made = written(out.run, out.record, part.record)
    return Handle(out.run, made, out.shape, out.strides)


def chunk_gated_delta_rule(
    query: Handle, key: Handle, value: Handle, decay: Handle, beta: Handle
) -> Handle:
    """Within chunks; then over them."""
    dtype, run, heads, length = query.dtype, query.run, value.shape[2], query.shape[1]
    if query.shape[2] != heads:
        query = interleaved(query, heads)
        key = interleaved(key, heads)
    query, key, value, beta, decay = [widened(x) for x in (query, key, value, beta, decay)]
    query = l2norm(query)
    key = l2norm(key)
    query = query * 1.0
    filled = whole(length, CHUNK)
    query, key, value = (padded(x, filled, 2) for x in (query, key, value))
    beta, decay = (padded(x, filled, 2) for x in (beta, decay))
    v_beta = value * apart(beta, -1)
    k_beta = key * apart(beta, -1)
    query, key = seen_in_chunks(query), seen_in_chunks(key)
    k_beta, v_beta = in_chunks(k_beta), in_chunks(v_beta)
    decay = in_chunks(decay)
    strictly_upper_mask = later_tokens(run)
    cum_decay = running_sum(decay)
    pairwise_decay = of_pairs(cum_decay)
    pairwise_decay = masked_fill(pairwise_decay, strictly_upper_mask)
    pairwise_decay = pairwise_decay.unary(OperationKind.EXP)
    ut_system = matmul(k_beta, key.transpose(-1, -2)) * pairwise_decay
    intra_chunk_attn = matmul(query, key.transpose(-1, -2)) * pairwise_decay
    decayed_k_beta = k_beta * cum_decay.unary(OperationKind.EXP).unsqueeze(-1)
    new_values = solved(ut_system, v_beta)
    k_cumdecay = solved(ut_system, decayed_k_beta)
    states = [zeros(run, (*query.shape[:2], query.shape[-1], new_values.shape[-1]))]
    core_attn_out = zeros(run, new_values.shape, new_values.strides)
    query = query * cum_decay.unary(OperationKind.EXP).unsqueeze(-1)
    key = key * remaining(cum_decay).unary(OperationKind.EXP).unsqueeze(-1)
    chunk_decay = cum_decay.select(-1).unary(OperationKind.EXP).unsqueeze(-1).unsqueeze(-1)
    parts = new_values, k_cumdecay, query, key, intra_chunk_attn, chunk_decay
    core_attn_out, _frame = over_chunks(states, core_attn_out, parts, length)
    return in_own_rows(core_attn_out, dtype)


def zeros(run: Run, shape: Shape, strides: Shape | None = None) -> Handle:
    """The rule's first state, or what its outputs are written into."""
    made = made_by(run, OperationKind.ZEROS, shape, DType.FP32)
    made.strides = strides or made.strides
    return made


def over_chunks(
    states: list[Handle], core_attn_out: Handle, parts: tuple[Handle, ...], length: int
) -> tuple[Handle, tuple[Handle, ...]]:
    """Chunk by chunk: what the state predicts is taken off, read, and what is new is added; what has a name to the end
    beside.

    The first state comes in a list, so that no other frame has a name for it."""
    state = states.pop()
    new_values, k_cumdecay, query, key, intra_chunk_attn, chunk_decay = parts
    batch, heads, chunks = query.shape[:3]
    numbers = query.run.turns(chunks)
    number = next(numbers)
    while True:
        v_new = difference(new_values.select(2), matmul(k_cumdecay.select(2), state))
        inter_chunk_attn = matmul(query.select(2), state)
        core_attn_out = write(
            core_attn_out, inter_chunk_attn + matmul(intra_chunk_attn.select(2), v_new)
        )
        if number == chunks - 1:
            break
        state = next_state(state, chunk_decay, key, v_new)
        number = next(numbers)
    with UnreadGraph(query.run) as graph:
        state = next_state(state, chunk_decay, key, v_new)
    del graph, state  # ``last_recurrent_state = None``
    core_attn_out = core_attn_out.reshape(batch, heads, -1, core_attn_out.shape[-1])
    return core_attn_out.narrow(length, 2).transpose(1, 2), (v_new, inter_chunk_attn)


def next_state(state: Handle, chunk_decay: Handle, key: Handle, v_new: Handle) -> Handle:
    """What is left of it, and what is new."""
    return state * chunk_decay.select(2) + matmul(key.select(2).transpose(-1, -2), v_new)


def in_own_rows(x: Handle, dtype: DType) -> Handle:
    """``x.to(dtype, memory_format=torch.contiguous_format)``."""
    if x.dtype is dtype:
        return x.contiguous()
    return x.leads_to(Handle(x.run, x.run.cast(x.record, dtype), x.shape))


class Qwen3NextRMSNormGated(Module):
    def __init__(self, width: int) -> None:
        self.weight = Weight(width, role=WeightRole.NORM)

    def forward(self, x: Handle, gate: Handle) -> Handle:
        dtype = x.dtype
        x = x.float()
        variance = x.pow(2).mean()
        x = x * (variance + 1e-6).rsqrt()
        x = scaled(self, self.weight, x.to(dtype))
        x = x * activated(gate.float(), Activation.SILU)
        return x.to(dtype)


class GatedDeltaNet(Mixer):
    is_given_names = True
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader) -> None:
        self.key_heads = config.integer("linear_num_key_heads")
        self.heads = config.integer("linear_num_value_heads")
        config.divide("linear_num_value_heads", self.heads, "linear_num_key_heads", self.key_heads)
        self.key_width = config.integer("linear_key_head_dim")
        self.width = config.integer("linear_value_head_dim")
        self.activation = read_activation(config, "hidden_act")
        self.keys, self.values = self.key_heads * self.key_width, self.heads * self.width
        channels = 2 * self.keys + self.values
        self.conv1d = CausalConv1d(channels, config.integer("linear_conv_kernel_dim"))
        self.add_rest(config.integer("hidden_size"))

    def add_rest(self, hidden: int) -> None:
        self.dt_bias = Weight(self.heads)
        self.A_log = Weight(self.heads)
        self.norm = Qwen3NextRMSNormGated(self.width)
        self.out_proj = Linear(self.values, hidden)

    def decay(self, a: Handle) -> Handle:
        """``-self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)``."""
        factor = -self.operand(self.A_log).float().unary(OperationKind.EXP)
        return factor * (a.float() + self.operand(self.dt_bias)).unary(OperationKind.SOFTPLUS)

    def in_heads(self, mixed_qkv: Handle) -> Heads:
        """Queries, keys and values in heads, behind the convolution."""
        batch, length, _ = mixed_qkv.shape
        query, key, value = mixed_qkv.split(self.keys, self.keys, self.values)
        query = query.reshape(batch, length, -1, self.key_width)
        key = key.reshape(batch, length, -1, self.key_width)
        value = value.reshape(batch, length, -1, self.width)
        return query, key, value


class Qwen3NextGatedDeltaNet(GatedDeltaNet):
    """Two linear layers make everything, key head by key head."""

    def add_rest(self, hidden: int) -> None:
        self.in_proj_qkvz = Linear(hidden, 2 * (self.keys + self.values))
        self.in_proj_ba = Linear(hidden, 2 * self.heads)
        super().add_rest(hidden)

    def ordered(self, mixed_qkvz: Handle, mixed_ba: Handle) -> tuple[Handle, ...]:
        """``fix_query_key_value_ordering``."""
        batch, length, _ = mixed_qkvz.shape
        several = self.heads // self.key_heads
        mixed_qkvz = mixed_qkvz.view(batch, length, self.key_heads, -1)
        mixed_ba = mixed_ba.view(batch, length, self.key_heads, -1)
        width = several * self.width
        query, key, value, z = mixed_qkvz.split(self.key_width, self.key_width, width, width)
        b, a = mixed_ba.split(several, several)
        value = value.reshape(batch, length, -1, self.width)
        z = z.reshape(batch, length, -1, self.width)
        b = b.reshape(batch, length, self.heads)
        a = a.reshape(batch, length, self.heads)
        return query, key, value, z, b, a

    def forward(self, x: Handle) -> Handle:
        batch, length, _ = x.shape
        projected_states_qkvz = self.in_proj_qkvz(x)
        projected_states_ba = self.in_proj_ba(x)
        query, key, value, z, b, a = self.ordered(projected_states_qkvz, projected_states_ba)
        query, key, value = (each.reshape(batch, length, -1) for each in (query, key, value))
        mixed_qkv = concatenate(query, key, value)
        mixed_qkv = mixed_qkv.transpose(1, 2)
        self.read_apart(self.conv1d, called=False)
        mixed_qkv = self.conv1d(mixed_qkv, self.activation)
        mixed_qkv = mixed_qkv.transpose(1, 2)
        query, key, value = self.in_heads(mixed_qkv)
        beta = b.unary(OperationKind.SIGMOID)
        g = self.decay(a)
        core_attn_out = chunk_gated_delta_rule(query, key, value, g, beta)
        core_attn_out = core_attn_out.reshape(-1, self.width)
        z = z.reshape(-1, self.width)
        core_attn_out = self.norm(core_attn_out, z)
        core_attn_out = core_attn_out.reshape(batch, length, -1)
        return self.out_proj(core_attn_out)


class Qwen35GatedDeltaNet(GatedDeltaNet):
    """Four linear layers."""

    def add_rest(self, hidden: int) -> None:
        super().add_rest(hidden)
        self.in_proj_qkv = Linear(hidden, 2 * self.keys + self.values)
        self.in_proj_z = Linear(hidden, self.values)
        self.in_proj_b = Linear(hidden, self.heads)
        self.in_proj_a = Linear(hidden, self.heads)

    def forward(self, x: Handle) -> Handle:
        batch, length, _ = x.shape
        mixed_qkv = self.in_proj_qkv(x)
        mixed_qkv = mixed_qkv.transpose(1, 2)
        z = self.in_proj_z(x)
        z = z.reshape(batch, length, -1, self.width)
        b = in_rows_again(self.in_proj_b(x))
        a = in_rows_again(self.in_proj_a(x))
        self.read_apart(self.conv1d, called=False)
        mixed_qkv = self.conv1d(mixed_qkv, self.activation)
        mixed_qkv = mixed_qkv.transpose(1, 2)
        query, key, value = self.in_heads(mixed_qkv)
        beta = b.unary(OperationKind.SIGMOID)
        g = self.decay(a)
        core_attn_out = chunk_gated_delta_rule(query, key, value, g, beta)
        core_attn_out = core_attn_out.reshape(-1, self.width)
        z = z.reshape(-1, self.width)
        core_attn_out = self.norm(core_attn_out, z)
        core_attn_out = core_attn_out.reshape(batch, length, -1)
        return self.out_proj(core_attn_out)


class Qwen3NextAttention(LlamaAttention):
    """Its query projection gives a gate too; a part of each head is turned."""

    turn: Turn = staticmethod(apply_rotary_to_part)
    output_gate = OutputGate.QUERIES

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        super().__init__(config, kind)
        self.q_norm = GemmaRMSNorm(self.head_dim)
        self.k_norm = GemmaRMSNorm(self.head_dim)

    def add_projections(self, config: ConfigReader) -> None:
        super().add_projections(config)
        hidden, (bias, _) = config.integer("hidden_size"), self.biases(config)
        width = 2 * self.num_heads * self.head_dim
        self.q_proj = Linear(hidden, width, bias=bias, role=WeightRole.QUERY_KEY)

    def projected(self, x: Handle) -> Heads:
        raise NotImplementedError

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:
        batch, length, _ = x.shape
        query, gate = (
            self.q_proj(x)
            .view(batch, length, -1, 2 * self.head_dim)
            .split(self.head_dim, self.head_dim)
        )
        gate = gate.reshape(batch, length, -1)
        query = self.q_norm(query.view(batch, length, -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(x).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        cos, sin = tables
        query, key = turn_function(self.run.kernels.rotary, self.turn)(query, key, cos, sin)
        out, weights = self.attend(query, key, value, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = out * gate.unary(OperationKind.SIGMOID)
        out = self.project_out(out)
        return out, weights


class Qwen3NextDecoderLayer(HybridLayer):
    attention_class: type[LlamaAttention] = Qwen3NextAttention
    norm_class: Callable[[int], Norm] = GemmaRMSNorm
    mixed = "linear_attn"

    def mixer(self, config: ConfigReader) -> Mixer:
        return Qwen3NextGatedDeltaNet(config)

    def network(self, config: ConfigReader, kind: LayerKind) -> Module:
        return Qwen3NextSparseMoeBlock(config) if kind.sparse else GatedMLP(config)


class Qwen3NextSparseMoeBlock(Qwen2MoeSparseMoeBlock):
    sealed = False


class Qwen35MoeSparseMoeBlock(Qwen3NextSparseMoeBlock):
    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.gate.norm_topk_prob = True


class Qwen35DecoderLayer(Qwen3NextDecoderLayer):
    def mixer(self, config: ConfigReader) -> Mixer:
        return Qwen35GatedDeltaNet(config)

    def network(self, config: ConfigReader, kind: LayerKind) -> Module:
        return Qwen35MoeSparseMoeBlock(config) if kind.sparse else GatedMLP(config)


class Qwen3NextModel(MixtureModel):
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = Qwen3NextDecoderLayer
    norm_class: Callable[[int], Norm] = GemmaRMSNorm

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        return [
            LayerKind(attends=name == "full_attention", sparse=self.is_sparse(config, number))
            for number, name in enumerate(qwen_types(config))
        ]

    def is_sparse(self, config: ConfigReader, number: int) -> bool:
        dense = number in config.integers("mlp_only_layers")
        return not dense and not (number + 1) % config.integer("decoder_sparse_step")

    def rotary_width(self, config: ConfigReader) -> int:
        return int(head_width(config) * rotary_share(config, 0.25))


class Qwen35RotaryEmbedding(SectionedRotaryEmbedding):
    """Heights and widths are written between the times."""

    def recomposed(self, freq: Handle) -> Handle:
        """In place, then each number twice."""
        run, batch = freq.run, freq.shape[0] // 3
        freqs_thw = run.slice(freq.record, freq.numel // 3)
        return self.doubled(Handle(run, freqs_thw, (batch, *freq.shape[1:])), self.width)


class Qwen35TextModel(Qwen3NextModel):
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = Qwen35DecoderLayer
    rotary_class = Qwen35RotaryEmbedding
    adds_router_loss = False

    def is_sparse(self, config: ConfigReader, number: int) -> bool:  # noqa: ARG002
        return False


class Qwen35MoeTextModel(Qwen35TextModel):
    def is_sparse(self, config: ConfigReader, number: int) -> bool:  # noqa: ARG002
        return True


def qwen_types(config: ConfigReader) -> list[str]:
    """``layer_types``, or full attention in every fourth layer."""
    named = layer_kinds(config, "layer_types")
    if named:
        return named
    interval = config.integer("full_attention_interval", default=4)
    return [
        "linear_attention" if (number + 1) % interval else "full_attention"
        for number in range(config.layers("num_hidden_layers"))
    ]


def rotary_share(config: ConfigReader, default: float) -> float:
    """Which part of a head is turned."""
    nested = config.mapping("rope_parameters")
    value = nested.get("partial_rotary_factor") if nested is not None else None
    if isinstance(value, int | float):
        return float(value)
    return config.number("partial_rotary_factor", default=default)
