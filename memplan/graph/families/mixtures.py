"""Decoders with mixtures of experts around Llama's attention.

What a class fixes is a row of ``MIXTURES``; sizes come from the config.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from memplan.graph.families.llama import (
    Variation,
    decoder_model,
    join_runs,
    read_activation,
    read_attention,
)
from memplan.graph.families.request import ReadRequest
from memplan.model.config import ConfigReader
from memplan.model.spec import (
    Activation,
    AttentionSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    HeadSpec,
    LayerSpec,
    MixtureSpec,
    ModelSpec,
    Normalization,
    NormKind,
    NormPlacement,
    NormSpec,
    RotarySpec,
    RouterScore,
    RouterSpec,
    StackSpec,
)

DEEPSEEK_ROUTER = RouterSpec(
    score=RouterScore.SIGMOID,
    fp32_product=True,
    correction=True,
    grouped=True,
    normalization=Normalization.IN_PLACE,
    scaled=True,
)
"""DeepSeek-V3's: sigmoid scores, a correction bias, groups ruled out, weights normalized."""

QWEN_ROUTER = RouterSpec(
    fp32_logits=False, normalization=Normalization.IN_PLACE, cast_weights=True
)
"""Qwen's: a softmax in fp32, weights normalized where ``norm_topk_prob`` says so, cast back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """What one type's class fixes."""

    router: RouterSpec
    attention: Variation = Variation()
    bias_key: str = "attention_bias"
    """Which key gives queries, keys and values a bias."""
    norm: NormSpec = NormSpec(kind=NormKind.RMS)
    placement: NormPlacement = NormPlacement.PRE
    query_key_norm_per_head: bool = True
    rotary: RotarySpec = RotarySpec(dim=0)
    """The form of the rotary embedding; how much is rotated is read."""
    partial_rotary: float | None = None
    """The share of each head that is rotated where the config is silent; None: all of it."""
    normalizes: bool | None = None
    """Whether weights are normalized; None reads ``norm_topk_prob``."""
    expert_size: str = "moe_intermediate_size"
    """Which key holds the width of a routed expert."""
    shared_size: str | None = None
    """Which key holds the width of the shared expert, if not a number of routed ones."""
    shared_count: str | None = None
    """Which key counts shared experts of a routed expert's width."""
    shared_first: bool = False
    shared_gate: bool = False
    jitter: tuple[str, int] | None = None
    """Which key switches noise on, and how many times it is then applied."""
    dense: Callable[[ConfigReader, int], bool] | None = None
    """Which layers, by number, are dense; None: none."""
    sliding: Callable[[ConfigReader, int], bool] | None = None
    """Which layers have the sliding window; None: none."""
    window_switch: bool = False
    """Sliding windows need ``use_sliding_window``."""
    residual_scaled: bool = False
    mixed_masks: bool = False
    """The full causal mask is made even where no layer uses it."""
    spare_window_mask: bool = False
    """The sliding mask is made even where no layer uses it."""
    local_rotary: bool = False
    """Layers with a window have rotary tables of their own."""
    rotates_local_only: bool = False
    """Only layers with a window have positions (AFMoE)."""
    grouped_by: tuple[str, str] | None = None
    """Which key must have which value for groups to be ruled out; None leaves it to the row."""


def first_dense(reader: ConfigReader, number: int) -> bool:
    """Whether the layer is one of the first ones, which are dense."""
    return number < reader.integer("first_k_dense_replace", default=0, minimum=0)


def _qwen_dense(reader: ConfigReader, number: int) -> bool:
    if number in reader.integers("mlp_only_layers"):
        return True
    return bool((number + 1) % reader.integer("decoder_sparse_step", default=1))


def _ernie_dense(reader: ConfigReader, number: int) -> bool:
    last = reader.optional_integer("moe_layer_end_index", minimum=-1)
    if last is None or last == -1:
        last = reader.layers("num_hidden_layers") - 1
    first = reader.integer("moe_layer_start_index", default=1, minimum=0)
    interval = reader.integer("moe_layer_interval", default=1)
    return bool((number + 1) % interval) or not first <= number <= last


def typed_dense(reader: ConfigReader, number: int) -> bool:
    """``mlp_layer_types``, or the first layer only."""
    types = reader.texts("mlp_layer_types")
    if not types:
        return number == 0
    if number >= len(types):
        raise reader.fail("mlp_layer_types", f"names {len(types)} layers, needs more")
    return types[number] != "sparse"


def _always(reader: ConfigReader, number: int) -> bool:
    del reader, number
    return True


def _typed_sliding(
    reader: ConfigReader, number: int, default: Callable[[ConfigReader, int], bool]
) -> bool:
    types = reader.texts("layer_types")
    if not types:
        return default(reader, number)
    if number >= len(types):
        raise reader.fail("layer_types", f"names {len(types)} layers, needs more")
    return types[number] == "sliding_attention"


def _after_window_layers(reader: ConfigReader, number: int) -> bool:
    late = reader.integer("max_window_layers", default=0, minimum=0)
    return _typed_sliding(reader, number, lambda _, each: each >= late)


def _qwen2_sliding(reader: ConfigReader, number: int) -> bool:
    last = reader.integer("max_window_layers", default=0, minimum=0)
    return _typed_sliding(reader, number, lambda _, each: bool((each + 1) % 2) and each < last)


MIXTURES: dict[str, Mixture] = {
    "mixtral": Mixture(
        router=RouterSpec(normalization=Normalization.IN_PLACE),
        attention=Variation(qkv_bias=False, output_bias=False),
        normalizes=True,
        expert_size="intermediate_size",
        jitter=("router_jitter_noise", 1),
        sliding=_always,
    ),
    "qwen3_moe": Mixture(
        router=QWEN_ROUTER,
        attention=Variation(query_key_norm=NormKind.RMS),
        dense=_qwen_dense,
        sliding=_always,
        window_switch=True,
    ),
    "qwen2_moe": Mixture(
        router=QWEN_ROUTER,
        attention=Variation(output_bias=False),
        bias_key="qkv_bias",
        shared_size="shared_expert_intermediate_size",
        shared_first=True,
        shared_gate=True,
        dense=_qwen_dense,
        sliding=_qwen2_sliding,
        window_switch=True,
        mixed_masks=True,
        spare_window_mask=True,
    ),
    "olmoe": Mixture(
        router=QWEN_ROUTER,
        attention=Variation(query_key_norm=NormKind.RMS),
        query_key_norm_per_head=False,
        expert_size="intermediate_size",
    ),
    "granitemoe": Mixture(
        router=RouterSpec(score=RouterScore.SOFTMAX_SELECTED, cast_weights=True),
        normalizes=False,
        expert_size="intermediate_size",
        residual_scaled=True,
    ),
    "phimoe": Mixture(
        router=RouterSpec(score=RouterScore.SPARSE_MIXER, fp32_logits=False),
        norm=NormSpec(kind=NormKind.LAYER, bias=True),
        normalizes=False,
        expert_size="intermediate_size",
        jitter=("input_jitter_noise", 2),
        sliding=_always,
    ),
    "dots1": Mixture(
        router=DEEPSEEK_ROUTER,
        attention=Variation(query_key_norm=NormKind.RMS),
        shared_count="n_shared_experts",
        dense=first_dense,
        sliding=_after_window_layers,
    ),
    "glm4_moe": Mixture(
        router=DEEPSEEK_ROUTER,
        attention=Variation(output_bias=False),
        partial_rotary=0.5,
        shared_count="n_shared_experts",
        dense=first_dense,
    ),
    "solar_open": Mixture(
        router=DEEPSEEK_ROUTER,
        attention=Variation(output_bias=False),
        partial_rotary=1.0,
        shared_count="n_shared_experts",
    ),
    "ernie4_5_moe": Mixture(
        router=RouterSpec(
            fp32_product=True,
            fp32_weight=True,
            correction_parameter=True,
            normalization=Normalization.COPY,
            cast_weights=True,
        ),
        bias_key="use_bias",
        rotary=RotarySpec(dim=0, upcast=True, expanded_tables=True),
        normalizes=True,
        shared_count="moe_num_shared_experts",
        shared_first=True,
        dense=_ernie_dense,
    ),
    "minimax_m2": Mixture(
        router=RouterSpec(
            score=RouterScore.SIGMOID, correction=True, normalization=Normalization.IN_PLACE
        ),
        attention=Variation(qkv_bias=False, output_bias=False, query_key_norm=NormKind.RMS),
        query_key_norm_per_head=False,
        partial_rotary=1.0,
        normalizes=True,
        expert_size="intermediate_size",
        jitter=("router_jitter_noise", 1),
    ),
    "hy_v3": Mixture(
        router=RouterSpec(
            score=RouterScore.SIGMOID,
            fp32_product=True,
            correction=True,
            normalization=Normalization.COPY,
            scaled=True,
        ),
        attention=Variation(query_key_norm=NormKind.RMS),
        normalizes=True,
        shared_count="num_shared_experts",
        dense=typed_dense,
    ),
}


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``MIXTURES``."""
    kind = MIXTURES[request.model_type]
    hidden_size = reader.integer("hidden_size")
    stack = StackSpec(
        name="decoder",
        runs=join_runs(_layers(reader, kind, hidden_size)),
        embedding=EmbeddingSpec(
            embedding_size=hidden_size, scaled=reader.raw("embedding_multiplier") is not None
        ),
        final_norm=kind.norm,
        mixed_masks=kind.mixed_masks,
        spare_window_mask=kind.spare_window_mask,
        local_rotary=kind.local_rotary,
    )
    head = HeadSpec(
        bias=reader.flag("lm_head_bias", "use_bias"), scaled=reader.raw("logits_scaling") is not None
    )
    return decoder_model(reader, request, stack, hidden_size=hidden_size, head=head)


def _layers(reader: ConfigReader, kind: Mixture, hidden_size: int) -> list[LayerSpec]:
    """Every layer: with or without a window, dense or a mixture."""
    attention = mixture_attention(reader, kind, hidden_size)
    window = _window(reader, kind)
    local = replace(attention, sliding_window=window)
    mixture = read_mixture(reader, kind)
    made: dict[tuple[bool, bool], LayerSpec] = {}
    layers: list[LayerSpec] = []
    for number in range(reader.layers("num_hidden_layers")):
        sliding = window is not None and kind.sliding is not None and kind.sliding(reader, number)
        dense = kind.dense is not None and kind.dense(reader, number)
        if (sliding, dense) not in made:
            made[sliding, dense] = LayerSpec(
                attention=local if sliding else attention,
                feed_forward=_dense(reader) if dense else mixture,
                norm=kind.norm,
                placement=kind.placement,
                residual_scaled=kind.residual_scaled,
            )
        layers.append(made[sliding, dense])
    return layers


def _window(reader: ConfigReader, kind: Mixture) -> int | None:
    if kind.sliding is None or (kind.window_switch and not reader.flag("use_sliding_window")):
        return None
    return reader.optional_integer("sliding_window")


def mixture_attention(reader: ConfigReader, kind: Mixture, hidden_size: int) -> AttentionSpec:
    """Attention as the type has it: biases, norms on queries and keys, rotated share."""
    variation = kind.attention
    if variation.qkv_bias is None:
        variation = replace(variation, qkv_bias=reader.flag(kind.bias_key))
    attention = read_attention(reader, variation, hidden_size)
    attention = replace(
        attention,
        query_key_norm_per_head=kind.query_key_norm_per_head,
        rotary=replace(kind.rotary, dim=_rotated(reader, kind, attention.head_dim)),
    )
    if reader.flag("use_qk_norm") and kind.partial_rotary is not None:
        attention = replace(attention, query_key_norm=NormSpec(kind=NormKind.RMS))
    return attention


def _rotated(reader: ConfigReader, kind: Mixture, head_dim: int) -> int:
    """Dimensions of a head that are rotated."""
    if kind.partial_rotary is None:
        return head_dim
    share = reader.number("partial_rotary_factor", default=kind.partial_rotary)
    dim = reader.optional_integer("rotary_dim")
    if dim is not None:
        share = dim / head_dim
    for key in ("rope_parameters", "rope_scaling"):
        nested = reader.mapping(key)
        value = nested.get("partial_rotary_factor") if nested is not None else None
        if isinstance(value, int | float):
            share = float(value)
    return int(head_dim * share)


def _dense(reader: ConfigReader) -> FeedForwardSpec:
    """The network of a layer that has no experts."""
    return FeedForwardSpec(
        intermediate_size=reader.integer("intermediate_size"),
        activation=_activation(reader),
        gated=True,
        bias=reader.flag("use_bias"),
    )


def _activation(reader: ConfigReader) -> Activation:
    return read_activation(reader, "hidden_act")


def read_mixture(reader: ConfigReader, kind: Mixture) -> MixtureSpec:
    """Experts, shared experts and router.

    Raises ``ConfigError`` where a token would need more experts than there are.
    """
    num_experts = reader.integer("num_experts", "num_local_experts", "n_routed_experts")
    per_token = reader.integer("num_experts_per_tok")
    if per_token > num_experts:
        raise reader.fail("num_experts_per_tok", f"{per_token} of {num_experts} experts")
    size = reader.integer(kind.expert_size)
    shared = _shared_size(reader, kind, size)
    expert = FeedForwardSpec(
        intermediate_size=size, activation=_activation(reader), gated=True
    )
    return MixtureSpec(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        expert=expert,
        router=_router(reader, kind),
        shared=(
            replace(expert, intermediate_size=shared, bias=reader.flag("use_bias"))
            if shared
            else None
        ),
        shared_first=kind.shared_first,
        shared_gate=kind.shared_gate,
        fp32_sum=reader.flag("enable_moe_fp32_combine"),
    )


def _shared_size(reader: ConfigReader, kind: Mixture, size: int) -> int:
    """Width of the shared expert; 0 without one."""
    if kind.shared_size is not None:
        return reader.integer(kind.shared_size)
    if kind.shared_count is not None:
        return size * reader.integer(kind.shared_count, minimum=0)
    return 0


def _router(reader: ConfigReader, kind: Mixture) -> RouterSpec:
    """The type's router, with what the config may switch."""
    router = kind.router
    normalizes = kind.normalizes
    if normalizes is None:
        normalizes = reader.flag("norm_topk_prob")
    if not normalizes:
        router = replace(router, normalization=Normalization.NONE)
    if kind.grouped_by is not None:
        key, value = kind.grouped_by
        router = replace(router, grouped=reader.text(key) == value)
    if kind.jitter is not None:
        key, times = kind.jitter
        if reader.number(key) > 0:
            router = replace(router, jitter=times)
    return router
