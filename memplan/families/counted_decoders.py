"""Decoders whose attention or experts are counted, not written down.

Norms, residual sums, embeddings, heads and plain networks are operations; what a class does in a
way of its own is weights.
"""

from dataclasses import replace
from math import isqrt

from memplan.families.hybrids import (
    Hybrid,
    attention_weights,
    counted,
    gated_network,
    plain_attention,
    read_hybrid,
)
from memplan.families.llama import Variation, read_attention, read_feed_forward
from memplan.families.request import ReadRequest
from memplan.model.attention import RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec
from memplan.model.mixers import DifferentialSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task

NORM = NormSpec(kind=NormKind.RMS)
WEIGHT_ONLY_LAYER_NORM = NormSpec(kind=NormKind.LAYER)


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``COUNTED``."""
    return read_hybrid(reader, request, COUNTED[request.model_type])


def all_alike(reader: ConfigReader) -> list[str]:
    """Every layer is like the others."""
    return ["layer"] * reader.layers("num_hidden_layers")


def gated_weights(
    table: ParameterTable, name: str, hidden_size: int, inner: int, *, bias: bool = False
) -> None:
    """The three linear layers of a gated network."""
    table.linear(f"{name}.gate_proj", hidden_size, inner, bias=bias)
    table.linear(f"{name}.up_proj", hidden_size, inner, bias=bias)
    table.linear(f"{name}.down_proj", inner, hidden_size, bias=bias)


# -- DiffLlama -----------------------------------------------------------------------------------


def _diffllama_layer(reader: ConfigReader, _: str) -> LayerSpec:
    """Differential attention: two attention calls, their difference scaled by four vectors."""
    spec = plain_attention(reader, Variation())
    spec = replace(spec, rotary=RotarySpec(dim=spec.head_dim), dropout=0.0)
    if spec.num_kv_heads % 2:
        error = reader.fail("num_key_value_heads", f"{spec.num_kv_heads} is odd, must be even")
        raise error

    return LayerSpec(
        attention=DifferentialSpec(scores=spec), feed_forward=gated_network(reader),
        norm=NORM,
    )  # fmt: skip


# -- JetMoE --------------------------------------------------------------------------------------


def _jetmoe_layer(reader: ConfigReader, _: str) -> LayerSpec:
    """Experts for queries and output of attention, and for the network."""
    hidden_size = reader.integer("hidden_size")
    width = reader.integer("kv_channels") * reader.integer("num_key_value_heads")
    inner = reader.integer("intermediate_size")
    experts, active = reader.integer("num_local_experts"), reader.integer("num_experts_per_tok")
    check_experts(reader, "num_experts_per_tok", active, experts)

    def attention(table: ParameterTable) -> None:
        name = "self_attn.experts"
        table.linear("self_attn.kv_proj", hidden_size, 2 * width, bias=False)
        _expert_pair(table, name, (experts, active), (hidden_size, width, width))

    def network(table: ParameterTable) -> None:
        sizes = (hidden_size, 2 * inner, inner)
        _expert_pair(table, "mlp", (experts, active), sizes, matrices=2)

    return LayerSpec(attention=counted(attention), feed_forward=counted(network), norm=NORM)


def check_experts(reader: ConfigReader, key: str, active: int, experts: int) -> None:
    """Refuse a token that would need more experts than there are."""
    if active > experts:
        raise reader.fail(key, f"{active} of {experts} experts")


def _expert_pair(
    table: ParameterTable,
    name: str,
    counts: tuple[int, int],
    sizes: tuple[int, int, int],
    *,
    matrices: int = 1,
) -> None:
    """``JetMoeMoE``: a router, experts' first and last matrices, and one bias for all of them.

    ``counts`` are the experts and those of a token; ``sizes`` the hidden size, what the first
    matrix gives and what the last one reads.
    """
    experts, active = counts
    hidden_size, first, last = sizes
    table.parameter(name, "bias", hidden_size)
    table.experts(
        f"{name}.input_linear", "weight", experts, first, hidden_size,
        active=active, matrices=matrices,
    )  # fmt: skip
    table.experts(f"{name}.output_linear", "weight", experts, hidden_size, last, active=active)
    table.linear(f"{name}.router.layer", hidden_size, experts, bias=False)


# -- DBRX ----------------------------------------------------------------------------------------


def _dbrx_layer(reader: ConfigReader, _: str) -> LayerSpec:
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    head_dim = reader.divide("d_model", hidden_size, "n_heads", num_heads)
    attention = reader.child("attn_config", "dbrx.attn_config")
    network = reader.child("ffn_config", "dbrx.ffn_config")
    keys = attention.integer("kv_n_heads") * head_dim
    inner = network.integer("ffn_hidden_size")
    experts, active = network.integer("moe_num_experts"), network.integer("moe_top_k")
    check_experts(network, "moe_top_k", active, experts)

    def declare_attention(table: ParameterTable) -> None:
        table.linear("self_attn.Wqkv", hidden_size, hidden_size + 2 * keys, bias=False)
        table.linear("self_attn.out_proj", hidden_size, hidden_size, bias=False)

    def declare_network(table: ParameterTable) -> None:
        table.linear("mlp.router.layer", hidden_size, experts, bias=False)
        for matrix in ("w1", "v1", "w2"):
            rows = experts * inner
            table.experts("mlp.experts", matrix, rows, hidden_size, active=active, count=experts)

    return LayerSpec(
        attention=counted(declare_attention),
        feed_forward=counted(declare_network),
        norm=WEIGHT_ONLY_LAYER_NORM,
    )


# -- BitNet --------------------------------------------------------------------------------------


def _bitnet_layer(reader: ConfigReader, _: str) -> LayerSpec:
    """Llama's layer with a norm before each sublayer's last matrix."""
    attention = read_attention(reader, Variation(), reader.integer("hidden_size"))
    return LayerSpec(
        attention=replace(attention, inner_norm=NORM),
        feed_forward=replace(read_feed_forward(reader, bias=False), inner_norm=NORM),
        norm=NORM,
    )


# -- Doge ----------------------------------------------------------------------------------------


def _doge_layer(reader: ConfigReader, _: str) -> LayerSpec:
    """Attention with a mask that depends on the values, and scaled residuals."""
    hidden_size = reader.integer("hidden_size")
    bias = reader.flag("attention_bias")
    spec = plain_attention(reader, Variation())

    def attention(table: ParameterTable) -> None:
        name, heads = "self_attn", spec.num_kv_heads
        table.parameter("", "input_residual", hidden_size)
        table.parameter(name, "A", heads)
        table.linear(f"{name}.dt_proj", heads * spec.head_dim, heads, bias=bias)
        attention_weights(table, name, spec, hidden_size)
        table.norm(f"{name}.q_norm", spec.head_dim, bias=False)
        table.norm(f"{name}.k_norm", spec.head_dim, bias=False)

    def network(table: ParameterTable) -> None:
        table.parameter("", "post_attention_residual", hidden_size)
        inner, has_bias = reader.integer("intermediate_size"), reader.flag("mlp_bias")
        gated_weights(table, "mlp", hidden_size, inner, bias=has_bias)
        if reader.flag("is_moe"):
            _doge_experts(table, reader, hidden_size)

    return LayerSpec(attention=counted(attention), feed_forward=counted(network), norm=NORM)


def _doge_experts(table: ParameterTable, reader: ConfigReader, hidden_size: int) -> None:
    """Experts of one row each, found by two keys whose pairs count them."""
    experts = reader.integer("num_experts")
    table.linear("mlp.router_gate", hidden_size, 2 * isqrt(experts), bias=False)
    table.embedding("mlp.down_embed", experts, hidden_size)
    table.embedding("mlp.up_embed", experts, hidden_size)


# -- OpenAI's privacy filter ---------------------------------------------------------------------


def _filter_layer(reader: ConfigReader, _: str) -> LayerSpec:
    """gpt-oss's layer looking both ways, with experts that always compute in fp32."""
    hidden_size, inner = reader.integer("hidden_size"), reader.integer("intermediate_size")
    spec = plain_attention(reader, Variation())
    experts, active = reader.integer("num_local_experts"), reader.integer("num_experts_per_tok")
    check_experts(reader, "num_experts_per_tok", active, experts)

    def attention(table: ParameterTable) -> None:
        table.parameter("self_attn", "sinks", spec.num_heads)
        attention_weights(table, "self_attn", spec, hidden_size)

    def network(table: ParameterTable) -> None:
        name = "mlp.experts"
        table.linear("mlp.router", hidden_size, experts)
        first, last = (experts, hidden_size, 2 * inner), (experts, inner, hidden_size)
        table.experts(name, "gate_up_proj", *first, active=active, matrices=2)
        table.experts(name, "gate_up_proj_bias", experts, 2 * inner, active=active, matrices=2)
        table.experts(name, "down_proj", *last, active=active)
        table.experts(name, "down_proj_bias", experts, hidden_size, active=active)

    return LayerSpec(attention=counted(attention), feed_forward=counted(network), norm=NORM)


# -- Step 3.5 ------------------------------------------------------------------------------------

_STEP_FIRST_SPARSE = 3
"""The first layer with experts where the config is silent (``Step3p7TextConfig``)."""


def _step_kinds(reader: ConfigReader) -> list[str]:
    """Which attention and which network; entries for layers that only predict ahead are left."""
    count = reader.layers("num_hidden_layers")
    types = reader.texts("layer_types") or ["full_attention"] * count
    networks = reader.texts("mlp_layer_types") or _step_networks(reader, count)
    for key, found in (("layer_types", types), ("mlp_layer_types", networks)):
        if len(found) < count:
            raise reader.fail(key, f"names {len(found)} layers of {count}")
    return [f"{each} {network}" for each, network in zip(types, networks, strict=False)][:count]


def _step_networks(reader: ConfigReader, count: int) -> list[str]:
    """``moe_layers_enum``, numbers in a list or between commas, or all but the first ones."""
    named = reader.raw("moe_layers_enum")
    sparse = {str(number) for number in range(_STEP_FIRST_SPARSE, count)}
    if isinstance(named, str):
        sparse = {each.strip() for each in named.split(",")}
    elif named is not None:
        sparse = {str(number) for number in reader.integers("moe_layers_enum")}
    return ["sparse" if str(number) in sparse else "dense" for number in range(count)]


def _step_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    """Grouped queries with norms and a gate for each head; local layers may have other heads."""
    hidden_size = reader.integer("hidden_size")
    spec = plain_attention(reader, Variation())
    if kind.startswith("sliding"):
        spec = replace(spec, num_heads=_sliding_heads(reader, spec.num_heads))

    def attention(table: ParameterTable) -> None:
        attention_weights(table, "self_attn", spec, hidden_size)
        table.norm("self_attn.q_norm", spec.head_dim, bias=False)
        table.norm("self_attn.k_norm", spec.head_dim, bias=False)
        table.linear("self_attn.g_proj", hidden_size, spec.num_heads, bias=False)

    def network(table: ParameterTable) -> None:
        bias = reader.flag("mlp_bias")
        if kind.endswith("sparse"):
            _step_experts(table, reader, hidden_size, bias=bias)
        else:
            inner = reader.integer("intermediate_size")
            gated_weights(table, "mlp", hidden_size, inner, bias=bias)

    return LayerSpec(attention=counted(attention), feed_forward=counted(network), norm=NORM)


def _sliding_heads(reader: ConfigReader, num_heads: int) -> int:
    """Query heads of layers with a window."""
    found = reader.optional_integer("num_sliding_attention_heads")
    if found is not None:
        return found
    other = reader.mapping("attention_other_setting")
    value = other.get("num_attention_heads") if other is not None else None
    return value if isinstance(value, int) else num_heads


def _step_experts(
    table: ParameterTable, reader: ConfigReader, hidden_size: int, *, bias: bool
) -> None:
    experts, active = reader.integer("n_routed_experts"), reader.integer("num_experts_per_tok")
    check_experts(reader, "num_experts_per_tok", active, experts)
    inner = reader.integer("moe_intermediate_size")
    table.linear("mlp.gate", hidden_size, experts, bias=False)
    first, last = (experts, 2 * inner, hidden_size), (experts, hidden_size, inner)
    table.experts("mlp.experts", "gate_up_proj", *first, active=active, matrices=2)
    table.experts("mlp.experts", "down_proj", *last, active=active)
    shared = reader.integer("share_expert_dim")
    gated_weights(table, "mlp.shared_experts", hidden_size, shared, bias=bias)


COUNTED: dict[str, Hybrid] = {
    "diffllama": Hybrid(kinds=all_alike, layer=_diffllama_layer),
    "jetmoe": Hybrid(kinds=all_alike, layer=_jetmoe_layer, left_out="its experts and attention"),
    "dbrx": Hybrid(
        kinds=all_alike,
        layer=_dbrx_layer,
        left_out="its experts and attention",
        final_norm=WEIGHT_ONLY_LAYER_NORM,
    ),
    "bitnet": Hybrid(kinds=all_alike, layer=_bitnet_layer),
    "doge": Hybrid(
        kinds=all_alike, layer=_doge_layer, left_out="its attention and feed-forward networks"
    ),
    "openai_privacy_filter": Hybrid(
        kinds=all_alike,
        layer=_filter_layer,
        left_out="its attention and experts",
        tasks=(Task.TOKEN_CLASSIFICATION, Task.BASE),
    ),
    "step3p5": Hybrid(
        kinds=_step_kinds,
        layer=_step_layer,
        left_out="its attention and feed-forward networks",
    ),
}
