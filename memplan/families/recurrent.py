"""Decoders whose layers are counted part by part: RWKV, RecurrentGemma, Zamba.

Norms, residual sums and what else is a usual operation are written down; the rest is weights.
"""

from dataclasses import replace

from memplan.families.hybrids import (
    LEGACY_KINDS,
    Hybrid,
    counted,
    plain_attention,
    read_hybrid,
    single,
)
from memplan.families.llama import Variation, read_activation
from memplan.families.request import ReadRequest
from memplan.families.state_space import (
    Mamba,
    expanded,
    mamba2,
    mamba_heads,
    time_step_rank,
)
from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec, NormPlacement
from memplan.model.mixers import (
    NOTHING,
    ChannelMixingSpec,
    CountedSpec,
    Mamba2Spec,
    TimeMixingSpec,
)
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec

NORM = NormSpec(kind=NormKind.RMS)
LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
GEMMA_NORM = NormSpec(kind=NormKind.RMS_GEMMA)


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``RECURRENT``."""
    return read_hybrid(reader, request, RECURRENT[request.model_type])


# -- RWKV ----------------------------------------------------------------------------------------


def _rwkv_kinds(reader: ConfigReader) -> list[str]:
    return ["first"] + ["later"] * (reader.layers("num_hidden_layers") - 1)


def _rwkv_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    """Time mixing and channel mixing; the first layer owns a norm of the embeddings."""
    hidden_size = reader.integer("hidden_size")
    width = reader.integer("attention_hidden_size", default=hidden_size)
    inner = reader.integer("intermediate_size", default=4 * hidden_size)

    return LayerSpec(
        attention=TimeMixingSpec(width=width),
        feed_forward=ChannelMixingSpec(intermediate_size=inner),
        norm=LAYER_NORM,
        entry_norm=kind == "first",
    )


# -- RecurrentGemma ------------------------------------------------------------------------------


def _griffin_kinds(reader: ConfigReader) -> list[str]:
    """``block_types``, repeated as often as there are layers."""
    pattern = reader.texts("block_types")
    if not pattern:
        error = reader.fail("block_types", "names no kind of layer")
        raise error
    count = reader.layers("num_hidden_layers")
    return [pattern[number % len(pattern)] for number in range(count)]


def _griffin_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    half = reader.divide("intermediate_size", reader.integer("intermediate_size"), "halves", 2)
    return LayerSpec(
        attention=_griffin_mixer(reader, kind),
        feed_forward=FeedForwardSpec(
            intermediate_size=half,
            activation=read_activation(reader, "hidden_activation"),
            gated=True,
            bias=True,
        ),
        norm=GEMMA_NORM,
    )


def _griffin_mixer(reader: ConfigReader, kind: str) -> AttentionSpec | CountedSpec:
    hidden_size = reader.integer("hidden_size")
    if reader.choice("block_types", kind, ("attention", "recurrent")) == "attention":
        bias = reader.flag("attention_bias")
        variation = Variation(qkv_bias=bias, output_bias=True)
        spec = plain_attention(reader, variation, rotary_share=0.5)
        return replace(spec, sliding_window=reader.integer("attention_window_size"))
    width = reader.integer("lru_width", default=hidden_size)
    heads = reader.integer("num_attention_heads")
    block = reader.divide("lru_width", width, "num_attention_heads", heads)

    def declare(table: ParameterTable) -> None:
        name = "recurrent_mixer"
        for layer in ("linear_y", "linear_x"):
            table.linear(f"{name}.{layer}", hidden_size, width)
        table.linear(f"{name}.linear_out", width, hidden_size)
        kernel = reader.integer("conv1d_width")
        table.convolution(f"{name}.conv_1d", width, width, kernel, groups=width)
        table.parameter(f"{name}.rg_lru", "recurrent_param", width)
        for gate in ("input_gate", "recurrent_gate"):
            table.parameter(f"{name}.rg_lru", f"{gate}_weight", heads, block, block)
            table.parameter(f"{name}.rg_lru", f"{gate}_bias", heads, block)

    return counted(declare)


# -- Zamba ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBlock:
    """A transformer block over hidden states and embeddings side by side, shared by layers."""

    hidden_size: int
    width: int
    """Of what it reads: both side by side."""
    queries: int
    keys: int
    """Widths of all query heads, and of all key heads."""
    inner: int
    bias: bool = False
    fused: bool = False
    """Gate and up are one linear layer."""
    adapter_rank: int = 0
    """Rank of the adapters that each layer has of its own; 0 for none."""
    attention_adapters: bool = False
    num_users: int = 1
    """How many layers run the block."""


def shared_block(table: ParameterTable, spec: SharedBlock) -> None:
    """The block's weights, its layers' adapters among them."""
    attention, network = "shared_transformer.self_attn", "shared_transformer.mlp"
    for name, size in (("q", spec.queries), ("k", spec.keys), ("v", spec.keys)):
        table.linear(f"{attention}.{name}_proj", spec.width, size, bias=False)
        for number in range(spec.num_users if spec.attention_adapters else 0):
            adapter = f"{attention}.linear_{name}_adapter_list.{number}"
            table.linear(f"{adapter}.0", spec.width, spec.adapter_rank, bias=False)
            table.linear(f"{adapter}.1", spec.adapter_rank, spec.width, bias=False)
    table.linear(f"{attention}.o_proj", spec.queries, spec.hidden_size, bias=False)
    gates = ("gate_up_proj",) if spec.fused else ("gate_proj", "up_proj")
    gate_width = 2 * spec.inner if spec.fused else spec.inner
    for gate in gates:
        table.linear(f"{network}.{gate}", spec.hidden_size, gate_width, bias=spec.bias)
    for number in range(spec.num_users if spec.adapter_rank else 0):
        adapter = f"{network}.gate_up_proj_adapter_list.{number}"
        table.linear(f"{adapter}.0", spec.hidden_size, spec.adapter_rank, bias=False)
        table.linear(f"{adapter}.1", spec.adapter_rank, gate_width, bias=False)
    table.linear(f"{network}.down_proj", spec.inner, spec.hidden_size, bias=spec.bias)
    table.norm("shared_transformer.input_layernorm", spec.width, bias=False)
    table.norm("shared_transformer.pre_ff_layernorm", spec.hidden_size, bias=False)


def _hybrid_kinds(names: list[str], num_blocks: int) -> list[str]:
    """``linear_attention``, ``owner 0`` where a layer brings a shared block, ``user`` later on.

    >>> _hybrid_kinds(["hybrid", "linear_attention", "hybrid", "hybrid"], 2)
    ['owner 0', 'linear_attention', 'owner 1', 'user']
    """
    found = []
    num_hybrids = 0
    for name in names:
        if name != "hybrid":
            found.append(name)
            continue
        found.append(f"owner {num_hybrids}" if num_hybrids < num_blocks else "user")
        num_hybrids += 1
    return found


def _named_kinds(reader: ConfigReader) -> list[str]:
    found = [LEGACY_KINDS.get(each, each) for each in reader.texts("layers_block_type")]
    for each in found:
        reader.choice("layers_block_type", each, ("hybrid", "linear_attention"))
    return found


def _zamba_kinds(reader: ConfigReader) -> list[str]:
    names = _named_kinds(reader)
    if not names:
        period = reader.integer("attn_layer_period")
        offset = reader.integer("attn_layer_offset", minimum=0)
        names = ["linear_attention", "linear_attention", "hybrid"] + [
            "hybrid" if number % period == offset else "linear_attention"
            for number in range(reader.layers("num_hidden_layers") - 3)
        ]
    return _hybrid_kinds(names, 1)


def _zamba_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    hidden_size = reader.integer("hidden_size")
    sizes = Mamba(
        hidden_size=hidden_size,
        inner=expanded(reader, "mamba_expand", hidden_size),
        state=reader.integer("mamba_d_state"),
        rank=time_step_rank(reader, "mamba_dt_rank", hidden_size),
        kernel=reader.integer("mamba_d_conv"),
        bias=reader.flag("mamba_proj_bias"),
        convolution_bias=reader.flag("mamba_conv_bias"),
    )
    heads = reader.integer("n_mamba_heads")
    reader.divide("mamba_expand", sizes.inner, "n_mamba_heads", heads)
    if kind == "linear_attention":
        return single(counted(lambda table: mamba_heads(table, "mamba", sizes, heads)))
    num_heads = reader.integer("num_attention_heads")
    head_dim = reader.integer("attention_head_dim", default=2 * hidden_size // num_heads)
    block = SharedBlock(
        hidden_size=hidden_size,
        width=reader.integer("attention_hidden_size", default=2 * hidden_size),
        queries=num_heads * head_dim,
        keys=reader.integer("num_key_value_heads", default=num_heads) * head_dim,
        inner=reader.integer("intermediate_size"),
    )

    def declare(table: ParameterTable) -> None:
        if kind != "user":
            shared_block(table, block)
        _behind_block(table, hidden_size)
        mamba_heads(table, "mamba", sizes, heads)

    return _own_norms(counted(declare))


def _behind_block(table: ParameterTable, hidden_size: int) -> None:
    """What a hybrid layer owns beside the shared block: a projection, the mixer's norm."""
    table.linear("linear", hidden_size, hidden_size, bias=False)
    table.norm("mamba_decoder.input_layernorm", hidden_size, bias=False)


def _own_norms(part: CountedSpec) -> LayerSpec:
    return LayerSpec(attention=part, feed_forward=NOTHING, norm=NORM, placement=NormPlacement.NONE)


_ZAMBA2_NAMES = (
    *("linear_attention",),
    *(*("linear_attention",) * 5, "hybrid") * 7,
    *(*("linear_attention",) * 4, "hybrid"),
    *(*("linear_attention",) * 3, "hybrid"),
    *("linear_attention",) * 2,
)
"""What ``Zamba2Config`` fills in, whatever the number of layers."""


def _zamba2_names(reader: ConfigReader) -> list[str]:
    return _named_kinds(reader) or list(_ZAMBA2_NAMES)


def _zamba2_kinds(reader: ConfigReader) -> list[str]:
    return _hybrid_kinds(_zamba2_names(reader), reader.integer("num_mem_blocks"))


def _zamba2_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    hidden_size = reader.integer("hidden_size")
    bias = reader.flag("add_bias_linear")
    mixer = Mamba2Spec(
        inner=expanded(reader, "mamba_expand", hidden_size),
        heads=reader.integer("n_mamba_heads"),
        groups=reader.integer("mamba_ngroups"),
        state=reader.integer("mamba_d_state"),
        kernel=reader.integer("mamba_d_conv"),
        chunk=reader.integer("chunk_size"),
        activation=Activation.SILU,
        bias=bias,
        output_bias=bias,
        convolution_bias=True,
    )
    if kind == "linear_attention":
        return single(mixer)

    def declare(table: ParameterTable) -> None:
        if kind != "user":
            shared_block(table, _zamba2_block(reader, int(kind.split()[1])))
        _behind_block(table, hidden_size)
        mamba2(table, "mamba", mixer, hidden_size)

    return _own_norms(counted(declare))


def _zamba2_block(reader: ConfigReader, number: int) -> SharedBlock:
    """One of the shared blocks, which hybrid layers run in turns."""
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    head_dim = 2 * hidden_size // num_heads
    num_blocks = reader.integer("num_mem_blocks")
    num_hybrids = _zamba2_names(reader).count("hybrid")
    return SharedBlock(
        hidden_size=hidden_size,
        width=2 * hidden_size,
        queries=num_heads * head_dim,
        keys=reader.integer("num_key_value_heads", default=num_heads) * head_dim,
        inner=reader.integer("intermediate_size", default=4 * hidden_size),
        bias=reader.flag("add_bias_linear"),
        fused=True,
        adapter_rank=reader.integer("adapter_rank"),
        attention_adapters=reader.flag("use_shared_attention_adapter"),
        num_users=len(range(number, num_hybrids, num_blocks)),
    )


RECURRENT: dict[str, Hybrid] = {
    "rwkv": Hybrid(
        kinds=_rwkv_kinds,
        layer=_rwkv_layer,
        final_norm=LAYER_NORM,
    ),
    "recurrent_gemma": Hybrid(
        kinds=_griffin_kinds,
        layer=_griffin_layer,
        left_out="its recurrent blocks",
        embedding_scaled=True,
        softcap_key="logits_soft_cap",
        final_norm=GEMMA_NORM,
    ),
    "zamba": Hybrid(
        kinds=_zamba_kinds,
        layer=_zamba_layer,
        left_out="its Mamba mixers and the shared attention before them",
    ),
    "zamba2": Hybrid(
        kinds=_zamba2_kinds,
        layer=_zamba2_layer,
        left_out="its Mamba-2 mixers and the shared attention before them",
    ),
}
