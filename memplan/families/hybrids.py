"""State-space decoders, and hybrids of them with attention.

Attention and feed-forward networks are operations like any other decoder's; the recurrent mixers
are weights only (``memplan.families.state_space``).
"""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.llama import (
    DECODER_TASKS,
    Variation,
    decoder_model,
    join_runs,
    read_activation,
    read_attention,
)
from memplan.families.mixtures import DEEPSEEK_ROUTER, MAX_SOFTCAP, Mixture, read_mixture
from memplan.families.request import ReadRequest, reject_task
from memplan.families.state_space import (
    automatic,
    check_heads,
    expanded,
    time_step_rank,
)
from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerSpec, NormPlacement, PromptSpec, StackSpec
from memplan.model.mixers import (
    NOTHING,
    CountedSpec,
    GatedNorm,
    Mamba2Spec,
    MambaSpec,
    SideBySideSpec,
    TokenMixer,
)
from memplan.model.mixtures import MixtureSpec, RouterScore, RouterSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task

NORM = NormSpec(kind=NormKind.RMS)
UPCAST_NORM = NormSpec(kind=NormKind.RMS_UPCAST)

LEGACY_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Older names of layer types (transformers' ``remap_legacy_layer_types``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hybrid:
    """What one type's class fixes."""

    kinds: Callable[[ConfigReader], list[str]]
    """What each layer is, in order; equal words mean equal layers."""
    layer: Callable[[ConfigReader, str], LayerSpec]
    """The layer for one of those words."""
    left_out: str = ""
    """Whose activations are left out, in words."""
    never_tied: bool = False
    """The class ties no matrices whatever the config says."""
    embedding_scaled: bool = False
    unscaled_held: bool = False
    """A name holds the embeddings as they were before."""
    embedding_copied: bool = False
    """Layers read a copy of the embeddings."""
    logits_scaled: bool = False
    chunked_mask: bool = False
    """Windows are chunks, whose mask is made for every sequence."""
    upcasts_logits: bool = False
    """The class makes fp32 logits itself."""
    softcap_key: str = ""
    """Which key, above 0, caps the logits."""
    final_norm: NormSpec = NORM
    embedding_norm: NormSpec | None = None
    """Of what the token table looks up, inside it."""
    recomputes: bool = True
    """The class can checkpoint its activations."""
    router_loss: bool = False
    """It adds the routers' loss where ``output_router_logits`` is set."""
    written_mask: bool = False
    """The class writes the causal mask out whatever the kernel knows."""
    mixed_masks: bool = False
    """The class makes the full mask even where every layer has a window."""
    local_rotary: bool = False
    """Layers with a window have rotary tables of their own."""
    extra_rows: Callable[[ConfigReader], int] = lambda _: 0
    """Rows of the token table beside the vocabulary's."""
    prompts: Callable[[ConfigReader], PromptSpec] | None = None
    """Trained prompts before the tokens."""
    tasks: tuple[Task, ...] = DECODER_TASKS
    """What there are classes for, the usual one first."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``HYBRIDS``."""
    return read_hybrid(reader, request, HYBRIDS[request.model_type])


def read_hybrid(reader: ConfigReader, request: ReadRequest, kind: Hybrid) -> ModelSpec:
    """A decoder of layers that differ."""
    hidden_size = reader.integer("hidden_size")
    made: dict[str, LayerSpec] = {}
    layers = []
    for each in kind.kinds(reader):
        if each not in made:
            made[each] = kind.layer(reader, each)
        layers.append(made[each])
    stack = StackSpec(
        name="decoder",
        runs=join_runs(layers),
        embedding=EmbeddingSpec(
            embedding_size=hidden_size,
            norm=kind.embedding_norm,
            norm_in_table=kind.embedding_norm is not None,
            scaled=kind.embedding_scaled,
            unscaled_held=kind.unscaled_held,
            copied=kind.embedding_copied,
            extra_rows=kind.extra_rows(reader),
            prompts=kind.prompts(reader) if kind.prompts is not None else None,
        ),
        final_norm=kind.final_norm,
        chunked_mask=kind.chunked_mask,
        mixed_masks=kind.mixed_masks,
        written_mask=kind.written_mask,
        local_rotary=kind.local_rotary,
    )
    head = HeadSpec(
        scaled=kind.logits_scaled,
        router_loss=kind.router_loss and reader.flag("output_router_logits"),
        upcast=kind.upcasts_logits,
        softcap=bool(kind.softcap_key) and reader.number(kind.softcap_key, maximum=MAX_SOFTCAP) > 0,
        capped_at_once=bool(kind.softcap_key),
    )
    request = replace(request, task=reject_task(reader, request, *kind.tasks))
    model = decoder_model(reader, request, stack, hidden_size=hidden_size, head=head)
    tied = model.head.tied and not kind.never_tied
    return replace(
        model,
        head=replace(model.head, tied=tied),
        recomputes=kind.recomputes,
        activations_left_out=f"activations of {kind.left_out}" if kind.left_out else "",
    )


def layer_kinds(reader: ConfigReader, *keys: str) -> list[str]:
    """Layer types by their present names, one for each layer; empty where none are given."""
    found = [LEGACY_KINDS.get(each, each) for each in reader.texts(*keys)]
    count = reader.layers("num_hidden_layers")
    if found and len(found) < count:
        raise reader.fail(keys[0], f"names {len(found)} layers of {count}")
    return found[:count]


def single(part: TokenMixer) -> LayerSpec:
    """A norm and a mixer."""
    return LayerSpec(
        attention=part, feed_forward=NOTHING, norm=NORM, placement=NormPlacement.SINGLE
    )


def counted(declare: Callable[[ParameterTable], None]) -> CountedSpec:
    """Weights that a function declares."""
    table = ParameterTable()
    declare(table)
    return CountedSpec(parameters=table.shapes())


# -- Mamba ---------------------------------------------------------------------------------------


def _all_alike(reader: ConfigReader) -> list[str]:
    return ["linear_attention"] * reader.layers("num_hidden_layers")


def _mamba_layer(reader: ConfigReader, _: str) -> LayerSpec:
    hidden_size = reader.integer("hidden_size")
    inner = reader.optional_integer("intermediate_size")
    mixer = MambaSpec(
        inner=inner or expanded(reader, "expand", hidden_size),
        state=reader.integer("state_size"),
        rank=time_step_rank(reader, "time_step_rank", hidden_size),
        kernel=reader.integer("conv_kernel"),
        activation=read_activation(reader, "hidden_act"),
        bias=reader.flag("use_bias"),
        convolution_bias=reader.flag("use_conv_bias"),
    )
    return replace(single(mixer), residual_upcast=_upcasts(reader))


def _falcon_mamba_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    """Mamba's, with norms on the parameters of its scan that own buffers of ones in place of weights."""
    layer = _mamba_layer(reader, kind)
    assert isinstance(layer.attention, MambaSpec)
    weightless = NormSpec(kind=NormKind.RMS, weight=False)
    return replace(layer, attention=replace(layer.attention, norm=weightless))


def _upcasts(reader: ConfigReader) -> bool:
    """The residual stream is fp32, whatever the weights are."""
    return reader.flag("residual_in_fp32")


def _mamba2_layer(reader: ConfigReader, _: str) -> LayerSpec:
    hidden_size = reader.integer("hidden_size")
    heads, inner = reader.integer("num_heads"), expanded(reader, "expand", hidden_size)
    check_heads(reader, "num_heads", heads, reader.integer("head_dim"), inner)
    mixer = Mamba2Spec(
        inner=inner,
        heads=heads,
        groups=reader.integer("n_groups"),
        state=reader.integer("state_size"),
        kernel=reader.integer("conv_kernel"),
        chunk=reader.integer("chunk_size"),
        activation=read_activation(reader, "hidden_act"),
        bias=reader.flag("use_bias"),
        output_bias=reader.flag("use_bias"),
        convolution_bias=reader.flag("use_conv_bias"),
    )
    return replace(single(mixer), residual_upcast=_upcasts(reader))


# -- Jamba, Bamba, Granite 4, Falcon-H1 ----------------------------------------------------------


def _jamba_kinds(reader: ConfigReader) -> list[str]:
    """``attention sparse``, ``mamba dense`` ...: both by their place in a period."""
    attends = _periodic(reader, "attn_layer_period", "attn_layer_offset")
    sparse = _periodic(reader, "expert_layer_period", "expert_layer_offset")
    many = reader.integer("num_experts") > 1
    return [
        f"{'attention' if attends(number) else 'mamba'} "
        f"{'sparse' if many and sparse(number) else 'dense'}"
        for number in range(reader.layers("num_hidden_layers"))
    ]


def _periodic(reader: ConfigReader, period_key: str, offset_key: str) -> Callable[[int], bool]:
    period, offset = reader.integer(period_key), reader.integer(offset_key, minimum=0)
    if offset >= period:
        raise reader.fail(offset_key, f"{offset} is not below {period_key} ({period})")
    return lambda number: number % period == offset


_JAMBA_MIXTURE = Mixture(
    router=RouterSpec(fp32_logits=False), normalizes=False, expert_size="intermediate_size"
)


def _jamba_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    mixer, network = kind.split()
    return LayerSpec(
        attention=(plain_attention(reader) if mixer == "attention" else _jamba_mixer(reader)),
        feed_forward=(
            read_mixture(reader, _JAMBA_MIXTURE) if network == "sparse" else gated_network(reader)
        ),
        norm=NORM,
    )


def _jamba_mixer(reader: ConfigReader) -> MambaSpec:
    hidden_size = reader.integer("hidden_size")
    return MambaSpec(
        inner=expanded(reader, "mamba_expand", hidden_size),
        state=reader.integer("mamba_d_state"),
        rank=time_step_rank(reader, "mamba_dt_rank", hidden_size),
        kernel=reader.integer("mamba_d_conv"),
        activation=read_activation(reader, "hidden_act"),
        bias=reader.flag("mamba_proj_bias"),
        convolution_bias=reader.flag("mamba_conv_bias"),
        norm=NORM,
    )


def plain_attention(
    reader: ConfigReader, variation: Variation | None = None, *, rotary_share: float = 0.0
) -> AttentionSpec:
    """Grouped-query attention that rotates a share of each head; none by default."""
    variation = variation or Variation(qkv_bias=False, output_bias=False)
    spec = read_attention(reader, variation, reader.integer("hidden_size"))
    rotated = int(spec.head_dim * rotary_share)
    return replace(spec, rotary=RotarySpec(dim=rotated, joined=True) if rotated else None)


def gated_network(reader: ConfigReader, *, bias_key: str = "") -> FeedForwardSpec:
    """Llama's network."""
    return FeedForwardSpec(
        intermediate_size=reader.integer("intermediate_size"),
        activation=read_activation(reader, "hidden_act"),
        gated=True,
        bias=reader.flag(bias_key) if bias_key else False,
    )


def _bamba_kinds(reader: ConfigReader) -> list[str]:
    attends = set(reader.integers("attn_layer_indices"))
    return [
        "full_attention" if number in attends else "linear_attention"
        for number in range(reader.layers("num_hidden_layers"))
    ]


def _bamba_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    attention: TokenMixer
    if kind == "full_attention":
        attention = plain_attention(reader, Variation(), rotary_share=0.5)
    else:
        attention = bamba_mixer(reader)
    return LayerSpec(
        attention=attention,
        feed_forward=gated_network(reader, bias_key="mlp_bias"),
        norm=NORM,
    )


def bamba_mixer(reader: ConfigReader, inner: int | None = None) -> Mamba2Spec:
    """Bamba's mixer, whose head size may be derived; ``inner`` overrules the expansion."""
    hidden_size = reader.integer("hidden_size")
    if inner is None:
        inner = expanded(reader, "mamba_expand", hidden_size)
    heads = reader.integer("mamba_n_heads")
    head_dim = automatic(reader, "mamba_d_head", inner // heads)
    check_heads(reader, "mamba_n_heads", heads, head_dim, inner)
    bias = reader.flag("mamba_proj_bias")
    return Mamba2Spec(
        inner=inner,
        heads=heads,
        groups=reader.integer("mamba_n_groups"),
        state=reader.integer("mamba_d_state"),
        kernel=reader.integer("mamba_d_conv"),
        chunk=reader.integer("mamba_chunk_size"),
        activation=read_activation(reader, "hidden_act"),
        bias=bias,
        output_bias=bias,
        convolution_bias=reader.flag("mamba_conv_bias"),
    )


def _granite_kinds(reader: ConfigReader) -> list[str]:
    return layer_kinds(reader, "layer_types") or _all_alike(reader)


_GRANITE_MIXTURE = Mixture(
    router=RouterSpec(score=RouterScore.SOFTMAX_SELECTED, cast_weights=True),
    normalizes=False,
    expert_size="intermediate_size",
    shared_size="shared_intermediate_size",
)


def _granite_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    rotates = reader.text("position_embedding_type", default="nope") == "rope"
    attention: TokenMixer
    if kind == "full_attention":
        attention = plain_attention(reader, Variation(), rotary_share=1.0 if rotates else 0.0)
        if attention.rotary is not None:
            attention = replace(attention, rotary=RotarySpec(dim=attention.head_dim))
    else:
        attention = bamba_mixer(reader)
    return LayerSpec(
        attention=attention,
        feed_forward=_granite_network(reader),
        norm=NORM,
        residual_scaled=True,
    )


def _granite_network(reader: ConfigReader) -> FeedForwardSpec | MixtureSpec:
    """A dense network that every token passes, beside routed experts where there are any."""
    shared = FeedForwardSpec(
        intermediate_size=reader.integer("shared_intermediate_size"),
        activation=read_activation(reader, "hidden_act"),
        gated=True,
        fused_gate_up=True,
    )
    if reader.integer("num_local_experts", minimum=0) == 0:
        return shared
    return replace(read_mixture(reader, _GRANITE_MIXTURE), shared=shared)


def _falcon_kinds(reader: ConfigReader) -> list[str]:
    return ["hybrid"] * reader.layers("num_hidden_layers")


def _falcon_layer(reader: ConfigReader, _: str) -> LayerSpec:
    """Falcon-H1: attention and a mixer side by side on one normalized input."""
    hidden_size = reader.integer("hidden_size")
    inner = None
    if not _is_null(reader, "mamba_d_ssm"):
        inner = reader.integer("mamba_d_ssm")
    normed = GatedNorm.LAST if reader.flag("mamba_norm_before_gate") else GatedNorm.FIRST
    mixer = replace(
        bamba_mixer(reader, inner),
        output_bias=reader.flag("projectors_bias"),
        gate=normed if reader.flag("mamba_rms_norm") else GatedNorm.NONE,
        scaled=True,
    )
    attention = replace(read_attention(reader, Variation(), hidden_size), key_scaled=True)
    return LayerSpec(
        attention=SideBySideSpec(mixer=mixer, scores=attention),
        feed_forward=replace(gated_network(reader, bias_key="mlp_bias"), scaled=True),
        norm=NORM,
    )


def _is_null(reader: ConfigReader, key: str) -> bool:
    """The config overrules the class's default with a null."""
    return key in reader.config and reader.config[key] is None


def attention_weights(
    table: ParameterTable, name: str, spec: AttentionSpec, hidden_size: int
) -> None:
    """The four linear layers of grouped-query attention."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    table.linear(f"{name}.q_proj", hidden_size, queries, bias=spec.query_bias)
    table.linear(f"{name}.k_proj", hidden_size, keys, bias=spec.key_bias)
    table.linear(f"{name}.v_proj", hidden_size, keys, bias=spec.value_bias)
    table.linear(f"{name}.o_proj", queries, hidden_size, bias=spec.output_bias)


# -- Nemotron-H ----------------------------------------------------------------------------------

_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""Letters of ``hybrid_override_pattern``."""

_DEFAULT_PATTERN = ("linear_attention", "moe", "full_attention", "mlp")


def _nemotron_kinds(reader: ConfigReader) -> list[str]:
    """The layers by name or by letter; ``num_hidden_layers`` is not looked at."""
    found = [LEGACY_KINDS.get(each, each) for each in reader.texts("layers_block_type")]
    pattern = reader.text("hybrid_override_pattern")
    if not found and pattern:
        found = [_PATTERN.get(letter, letter) for letter in pattern]
    for each in found:
        reader.choice("layers_block_type", each, _DEFAULT_PATTERN)
    return found or list(_DEFAULT_PATTERN)


_NEMOTRON_MIXTURE = Mixture(
    router=DEEPSEEK_ROUTER, shared_size="moe_shared_expert_intermediate_size"
)


def _nemotron_layer(reader: ConfigReader, kind: str) -> LayerSpec:
    attention: TokenMixer = NOTHING
    network: FeedForwardSpec | MixtureSpec | CountedSpec = NOTHING
    if kind == "linear_attention":
        attention = _nemotron_mixer(reader)
    elif kind == "full_attention":
        attention = plain_attention(reader)
    elif kind == "moe":
        network = _nemotron_mixture(reader)
    else:
        network = _nemotron_network(reader, reader.integer("intermediate_size"))
    return LayerSpec(
        attention=attention,
        feed_forward=network,
        norm=UPCAST_NORM,
        placement=NormPlacement.SINGLE,
    )


def _nemotron_mixer(reader: ConfigReader) -> Mamba2Spec:
    heads = reader.integer("mamba_num_heads")
    return Mamba2Spec(
        inner=heads * reader.integer("mamba_head_dim"),
        heads=heads,
        groups=reader.integer("mamba_n_groups", "n_groups"),
        state=reader.integer("ssm_state_size"),
        kernel=reader.integer("mamba_d_conv", "conv_kernel"),
        chunk=reader.integer("mamba_chunk_size", "chunk_size"),
        activation=read_activation(reader, "mamba_hidden_act"),
        bias=reader.flag("use_bias"),
        output_bias=reader.flag("use_bias"),
        convolution_bias=reader.flag("mamba_conv_bias", "use_conv_bias"),
    )


def _nemotron_network(reader: ConfigReader, size: int) -> FeedForwardSpec:
    return FeedForwardSpec(
        intermediate_size=size,
        activation=read_activation(reader, "mlp_hidden_act"),
        bias=reader.flag("mlp_bias"),
    )


def _nemotron_mixture(reader: ConfigReader) -> MixtureSpec:
    """Experts without a gate, behind a narrower projection where ``moe_latent_size`` says so."""
    expert = _nemotron_network(reader, reader.integer("moe_intermediate_size"))
    return replace(
        read_mixture(reader, _NEMOTRON_MIXTURE),
        expert=replace(expert, bias=False),
        shared=_nemotron_network(reader, reader.integer("moe_shared_expert_intermediate_size")),
        latent=reader.optional_integer("moe_latent_size") or 0,
        latent_bias=reader.flag("mlp_bias"),
    )


HYBRIDS: dict[str, Hybrid] = {
    "mamba": Hybrid(kinds=_all_alike, layer=_mamba_layer, upcasts_logits=True),
    "falcon_mamba": Hybrid(kinds=_all_alike, layer=_falcon_mamba_layer, upcasts_logits=True),
    "mamba2": Hybrid(kinds=_all_alike, layer=_mamba2_layer, upcasts_logits=True),
    "jamba": Hybrid(kinds=_jamba_kinds, layer=_jamba_layer),
    "bamba": Hybrid(kinds=_bamba_kinds, layer=_bamba_layer),
    "granitemoehybrid": Hybrid(
        kinds=_granite_kinds,
        layer=_granite_layer,
        embedding_scaled=True,
        logits_scaled=True,
    ),
    "falcon_h1": Hybrid(
        kinds=_falcon_kinds,
        layer=_falcon_layer,
        embedding_scaled=True,
        logits_scaled=True,
    ),
    "nemotron_h": Hybrid(
        kinds=_nemotron_kinds,
        layer=_nemotron_layer,
        never_tied=True,
        final_norm=UPCAST_NORM,
        upcasts_logits=True,
    ),
}
