"""Kimi Linear: a delta rule whose decays differ from channel to channel, and latent attention without positions.

Every pair of a chunk's tokens has a product of its own in each channel: no batched product, but tensors of
pairs times channels, nearly all kept.

(transformers 5.23: models/kimi_linear)
"""

from collections.abc import Callable, Sequence

from memplan.classes.llama import (
    DecoderLayer,
    GatedMLP,
    LayerKind,
    LlamaDecoderLayer,
    SelfAttention,
)
from memplan.classes.mixed.deepseek import DeepseekV3MoE
from memplan.classes.mixed.latent import LatentAttention
from memplan.classes.recurrent.chunks import padded, running_sum, whole
from memplan.classes.recurrent.convolution import CausalConv1d
from memplan.classes.recurrent.delta_rule import (
    CHUNK,
    apart,
    difference,
    later_tokens,
    seen_in_chunks,
    write,
)
from memplan.classes.recurrent.hybrids import UnturnedModel, layer_kinds
from memplan.classes.recurrent.mamba import Mixer
from memplan.dtypes import DType
from memplan.families.llama import read_activation
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.experts.routing import summed_rows
from memplan.graph.modules.attention import Attended, attention_function
from memplan.graph.modules.basic import Linear
from memplan.graph.modules.contractions import matmul
from memplan.graph.modules.functional import divide, masked_fill, total
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import Tables, concatenate
from memplan.graph.modules.unread import UnreadGraph
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, WeightRole


class KimiLinearAttention(LatentAttention):
    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Attended:  # noqa: ARG002
        batch, length, _ = x.shape
        q_states = self.queries(x)
        query_states = q_states.view(batch, length, -1, self.qk_head_dim).transpose(1, 2)
        compressed_kv = self.kv_a_proj_with_mqa(x)
        kv_nope, k_rot = compressed_kv.split(self.kv_lora_rank, self.qk_rope_head_dim)
        kv_nope = self.kv_a_layernorm(kv_nope)
        kv_nope = kv_nope.view(batch, 1, length, self.kv_lora_rank)
        k_rot = k_rot.view(batch, 1, length, self.qk_rope_head_dim)
        key_states, value_states = self.expand_kv(kv_nope, k_rot)
        attend = attention_function(self.run)
        out, weights = attend(query_states, key_states, value_states, mask, self.attention_dropout)
        out = out.reshape(batch, length, -1)
        out = self.o_proj(out)
        return out, weights


class KimiLinearRMSNormGated(Module):
    def __init__(self, width: int) -> None:
        self.weight = Weight(width, role=WeightRole.NORM)

    def forward(self, x: Handle, gate: Handle) -> Handle:
        dtype = x.dtype
        x = x.float()
        variance = x.pow(2).mean()
        x = x * (variance + 1e-6).rsqrt()
        x = self.operand(self.weight, DType.FP32) * x
        x = x * gate.float().unary(OperationKind.SIGMOID)
        return x.to(dtype)


class KimiLinearForgetGate(Module):
    def __init__(self, hidden: int, heads: int, width: int) -> None:
        self.head_dim = width
        self.dt_bias = Weight(heads * width)
        self.A_log = Weight(1, 1, heads, 1)
        self.f_a_proj = Linear(hidden, width)
        self.f_b_proj = Linear(width, heads * width)

    def forward(self, x: Handle) -> Handle:
        batch, length, _ = x.shape
        forget_gate = self.f_b_proj(self.f_a_proj(x))
        g = (forget_gate.float() + self.operand(self.dt_bias, DType.FP32)).view(
            batch, length, -1, self.head_dim
        )
        a_log = self.operand(self.A_log, DType.FP32)
        decay_rate = a_log.unary(OperationKind.EXP)
        g_softplus = where(
            g.apart(OperationKind.GT, dtype=DType.BOOL), g,
            (g.unary(OperationKind.EXP) + 1.0).unary(OperationKind.LOG),
        )  # fmt: skip
        return -decay_rate * g_softplus


def where(mask: Handle, one: Handle, other: Handle) -> Handle:
    """``torch.where(mask, one, other)``: keeps the mask."""
    made = one.run.tensor(one.numel, one.dtype)
    one.run.record(
        OperationKind.WHERE, (mask.record, one.record, other.record), (made,), saves=(mask.record,),
        gradients=(Gradient.NONE, Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    return one.like(made, other)


def l2norm(x: Handle) -> Handle:
    """Over the root of the sum of its squares."""
    inv_norm = (total(x * x) + 1e-6).unary(OperationKind.SQRT)
    return divide(x, inv_norm)


def summed(x: Handle, dim: int) -> Handle:
    """``x.sum(dim)``."""
    dim %= len(x.shape)
    shape = *x.shape[:dim], *x.shape[dim + 1 :]
    return Handle(x.run, summed_rows(x.run, x.record, x.numel // x.shape[dim]), shape)


def chunk_kimi_delta_attention(
    query: Handle, key: Handle, value: Handle, g: Handle, beta: Handle
) -> Handle:
    """Within chunks, row by row; then over them."""
    dtype, run, length = query.dtype, query.run, query.shape[1]
    query, key, value, beta, g = [
        x.transpose(1, 2).contiguous().float() for x in (query, key, value, beta, g)
    ]
    query = l2norm(query)
    key = l2norm(key)
    filled = whole(length, CHUNK)
    query = padded(query, filled, 2) * 1.0
    key = padded(key, filled, 2)
    value = padded(value, filled, 2)
    g = padded(g, filled, 2)
    beta = padded(beta, filled, 2)
    v_beta = value * apart(beta, -1)
    k_beta = key * apart(beta, -1)
    query, key, value, g, k_beta, v_beta = [
        seen_in_chunks(x) for x in (query, key, value, g, k_beta, v_beta)
    ]
    g = running_sum(g)
    mask = later_tokens(run)
    strict_mask = later_tokens(run)
    decay_mask = masked_fill(apart(g, -2) - apart(g, -3), strict_mask).unary(OperationKind.EXP)
    attn = -masked_fill(summed(apart(k_beta, -2) * apart(key, -3) * decay_mask, -1), mask)
    for number in range(1, CHUNK):
        row = attn.select(-2).narrow(number).contiguous()
        sub = attn.narrow(number, -2).narrow(number).contiguous()
        attn = write(attn, row + summed(row.unsqueeze(-1) * sub, -2))
    attn = attn + made_by(run, OperationKind.EYE, (CHUNK, CHUNK), attn.dtype)
    value = matmul(attn, v_beta)
    k_cumdecay = matmul(attn, k_beta * g.unary(OperationKind.EXP))
    parts = query, key, value, g, decay_mask, k_cumdecay
    core_attn_out, _frame = over_chunks(parts)
    batch, heads = core_attn_out.shape[:2]
    core_attn_out = core_attn_out.reshape(batch, heads, -1, core_attn_out.shape[-1])
    core_attn_out = core_attn_out.narrow(length, 2)
    return core_attn_out.transpose(1, 2).contiguous().to(dtype)


def over_chunks(parts: tuple[Handle, ...]) -> tuple[Handle, tuple[Handle, ...]]:
    """What the state predicts is taken off, read, and what is new is added; what has names to the end beside."""
    query, key, value, g, decay_mask, k_cumdecay = parts
    run, width = query.run, query.shape[-1]
    batch, heads, chunks = query.shape[:3]
    shape = batch, heads, width, value.shape[-1]
    last_recurrent_state = made_by(run, OperationKind.ZEROS, shape, value.dtype)
    core_attn_out = made_by(run, OperationKind.ZEROS, value.shape, value.dtype)
    mask = later_tokens(run)
    numbers = run.turns(chunks)
    number = next(numbers)
    while True:
        q_i, k_i, v_i, g_i = (each.select(2) for each in (query, key, value, g))
        attn_inter = matmul(q_i * g_i.unary(OperationKind.EXP), last_recurrent_state)
        attn_intra = masked_fill(
            summed(apart(q_i, -2) * apart(k_i, -3) * decay_mask.select(2), -1), mask
        )
        v_prime = matmul(k_cumdecay.select(2), last_recurrent_state)
        v_new = difference(v_i, v_prime)
        core_attn_out = write(core_attn_out, attn_inter + matmul(attn_intra, v_new))
        if number == chunks - 1:
            break
        last_recurrent_state = next_state(k_i, g_i, v_new, last_recurrent_state)
        number = next(numbers)
    with UnreadGraph(run) as graph:
        last_recurrent_state = next_state(k_i, g_i, v_new, last_recurrent_state)
    del graph, last_recurrent_state
    return core_attn_out, (attn_inter, attn_intra, v_prime, v_new, mask)


def next_state(k_i: Handle, g_i: Handle, v_new: Handle, state: Handle) -> Handle:
    """What a chunk leaves of it, and adds."""
    kept = state * g_i.select(2).unary(OperationKind.EXP).unsqueeze(-1)
    faded = k_i * (g_i.narrow(1, 2) - g_i).unary(OperationKind.EXP)
    return kept + matmul(faded.transpose(-1, -2), v_new)


class KimiLinearDeltaAttention(Mixer):
    is_given_names = True
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader) -> None:
        nested = config.mapping("linear_attn_config")
        sizes = config.nested(nested or {}, "linear_attn_config.")
        heads = sizes.optional_integer("num_heads") or config.integer("linear_num_heads")
        width = sizes.optional_integer("head_dim") or config.integer("linear_head_dim")
        kernel = sizes.optional_integer("short_conv_kernel_size")
        hidden, self.head_dim, self.width = config.integer("hidden_size"), width, heads * width
        self.activation = read_activation(config, "hidden_act")
        self.q_proj = Linear(hidden, self.width)
        self.k_proj = Linear(hidden, self.width)
        self.v_proj = Linear(hidden, self.width)
        self.conv1d = CausalConv1d(
            3 * self.width, kernel or config.integer("linear_conv_kernel_dim")
        )
        self.forget_gate = KimiLinearForgetGate(hidden, heads, width)
        self.b_proj = Linear(hidden, heads)
        self.g_a_proj = Linear(hidden, width)
        self.g_b_proj = Linear(width, self.width)
        self.o_norm = KimiLinearRMSNormGated(width)
        self.o_proj = Linear(self.width, hidden)

    def forward(self, x: Handle) -> Handle:
        batch, length, _ = x.shape
        mixed_qkv = concatenate(self.q_proj(x), self.k_proj(x), self.v_proj(x)).transpose(1, 2)
        self.read_apart(self.conv1d, called=False)
        mixed_qkv = self.conv1d(mixed_qkv, self.activation)
        query, key, value = mixed_qkv.transpose(1, 2).split(*(self.width,) * 3)
        query = query.view(batch, length, -1, self.head_dim)
        key = key.view(batch, length, -1, self.head_dim)
        value = value.view(batch, length, -1, self.head_dim)
        g = self.forget_gate(x)
        beta = self.b_proj(x).unary(OperationKind.SIGMOID)
        core_attn_out = chunk_kimi_delta_attention(query, key, value, g, beta)
        gate = self.g_b_proj(self.g_a_proj(x)).view(batch, length, -1, self.head_dim)
        output = self.o_norm(core_attn_out, gate).reshape(batch, length, -1)
        output = self.o_proj(output)
        return output


class KimiLinearDecoderLayer(LlamaDecoderLayer):
    self_attn: SelfAttention

    def __init__(self, config: ConfigReader, kind: LayerKind) -> None:
        self.attends = kind.attends
        if kind.attends:
            self.self_attn = KimiLinearAttention(config, kind)
        else:
            self.self_attn = KimiLinearDeltaAttention(config)
        self.mlp = DeepseekV3MoE(config) if kind.sparse else GatedMLP(config)
        self.add_norms(config.integer("hidden_size"))

    def forward(self, x: Handle, tables: Tables, mask: Handle | None) -> Handle:
        residual = x
        x = self.input_layernorm(x)
        if self.attends:
            x, _ = self.self_attn(x, tables, mask)
        else:
            x = self.self_attn(x)
        x = residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        x = residual + x
        return x


class KimiLinearModel(UnturnedModel):
    layer_class: Callable[[ConfigReader, LayerKind], DecoderLayer] = KimiLinearDecoderLayer
    adds_router_loss = False

    def kinds(self, config: ConfigReader) -> Sequence[LayerKind]:
        types = layer_kinds(config, "layer_types") or kimi_types(config)
        networks = config.texts("mlp_layer_types")
        if not networks:
            dense = config.integer("first_k_dense_replace", default=1, minimum=0)
            networks = ["dense" if at < dense else "sparse" for at in range(len(types))]
        if len(networks) < len(types):
            msg = "mlp_layer_types"
            raise config.fail(msg, f"names {len(networks)} layers of {len(types)}")
        return [
            LayerKind(turned=False, attends=mixer == "full_attention", sparse=network == "sparse")
            for mixer, network in zip(types, networks, strict=False)
        ]


def kimi_types(config: ConfigReader) -> list[str]:
    """What ``linear_attn_config`` lists, from 1 on, or full attention in every fourth layer."""
    nested = config.mapping("linear_attn_config") or {}
    count = config.layers("num_hidden_layers")
    full, linear = nested.get("full_attn_layers"), nested.get("kda_layers")
    if full is None or linear is None:
        attends = set(range(4, count, 4))
    else:
        attends, mixes = places(config, full), places(config, linear)
        if attends & mixes or attends | mixes != set(range(count)):
            problem = f"full_attn_layers and kda_layers must name each of {count} layers once"
            msg = "linear_attn_config"
            raise config.fail(msg, problem)
    return [
        "full_attention" if number in attends else "linear_attention" for number in range(count)
    ]


def places(config: ConfigReader, named: object) -> set[int]:
    """Layers that are counted from 1 on."""
    if not isinstance(named, list) or not all(isinstance(each, int) for each in named):
        problem = "full_attn_layers and kda_layers must be lists of whole numbers"
        msg = "linear_attn_config"
        raise config.fail(msg, problem)
    return {each - 1 for each in named}
