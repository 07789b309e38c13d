"""Decoders with mixtures of experts around Llama's attention.

What a class fixes is a row of ``MIXTURES``; sizes come from the config.
"""

from collections.abc import Mapping
from dataclasses import replace

from memplan.families.llama import (
    decoder_model,
    join_runs,
    read_activation,
    read_attention,
)
from memplan.families.mixture_types import MAX_SOFTCAP, MIXTURES, Mixture
from memplan.families.request import ReadRequest
from memplan.model.attention import AttentionSpec, OutputGate
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerSpec, StackSpec
from memplan.model.mixtures import MixtureSpec, Normalization, RouterSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.spec import ModelSpec

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of routed experts."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``MIXTURES``."""
    kind = MIXTURES[request.model_type]
    hidden_size = reader.integer("hidden_size")
    stack = StackSpec(
        name="decoder",
        runs=join_runs(_layers(reader, kind, hidden_size)),
        embedding=EmbeddingSpec(
            embedding_size=hidden_size,
            scaled=kind.embedding_flag is not None and reader.flag(kind.embedding_flag),
            unscaled_held=kind.embedding_flag is not None,
        ),
        final_norm=kind.norm,
        mixed_masks=kind.mixed_masks,
        spare_window_mask=kind.spare_window_mask,
        local_rotary=kind.local_rotary,
    )
    head = HeadSpec(
        router_loss=kind.router_loss and reader.flag("output_router_logits"),
        bias=reader.flag("lm_head_bias", "use_bias"),
    )
    model = decoder_model(reader, request, stack, hidden_size=hidden_size, head=head)
    return replace(model, eager_attention_only=kind.own_eager)


def _layers(reader: ConfigReader, kind: Mixture, hidden_size: int) -> list[LayerSpec]:
    """Every layer: with or without a window, dense or a mixture, with its own number of heads."""
    window = _window(reader, kind)
    mixture = read_mixture(reader, kind)
    count = reader.layers("num_hidden_layers")
    heads = reader.integers("num_attention_heads_per_layer", minimum=1)
    if heads and len(heads) < count:
        error = reader.fail(
            "num_attention_heads_per_layer", f"names {len(heads)} layers of {count}"
        )
        raise error
    made: dict[tuple[bool, bool, int], LayerSpec] = {}
    layers: list[LayerSpec] = []
    for number in range(count):
        sliding = window is not None and kind.sliding is not None and kind.sliding(reader, number)
        dense = kind.dense is not None and kind.dense(reader, number)
        key = (sliding, dense, heads[number] if heads else 0)
        if key not in made:
            made[key] = LayerSpec(
                renames_weights=kind.clamped_gate,
                attention=mixture_attention(
                    reader, kind, hidden_size, window=window if sliding else None, heads=key[2]
                ),
                feed_forward=_dense(reader) if dense else mixture,
                norm=kind.norm,
                placement=kind.placement,
            )
        layers.append(made[key])
    return layers


def _window(reader: ConfigReader, kind: Mixture) -> int | None:
    if kind.sliding is None:
        return None
    return reader.optional_integer("sliding_window")


def mixture_attention(
    reader: ConfigReader, kind: Mixture, hidden_size: int, *, window: int | None, heads: int
) -> AttentionSpec:
    """Attention as the type has it: biases, norms on queries and keys, rotated share, window.

    ``heads`` is the layer's own number of query heads; 0 leaves it to the config.
    """
    variation = kind.attention
    if variation.qkv_bias is None:
        variation = replace(variation, qkv_bias=reader.flag(kind.bias_key))
    attention = read_attention(reader, variation, hidden_size)
    local = window is not None
    if local and kind.local_key_value_factor > 1:
        attention = replace(
            attention, num_kv_heads=attention.num_kv_heads * kind.local_key_value_factor
        )
    if heads:
        attention = replace(attention, num_heads=heads)
        reader.divide("num_attention_heads_per_layer", heads, "heads", attention.num_kv_heads)
    rotary = None
    if local or not kind.rotates_local_only:
        rotated = _rotated(reader, kind, attention.head_dim, local=local)
        rotary = replace(kind.rotary, dim=rotated)
    return replace(
        attention,
        query_key_norm_per_head=kind.query_key_norm_per_head,
        rotary=rotary,
        sliding_window=window,
        output_gate=_output_gate(reader, kind),
        own_eager=kind.own_eager,
        sinks=kind.sinks or (kind.local_sinks and local),
        value_head_dim=reader.optional_integer("v_head_dim") if kind.value_head else None,
        value_scaled=kind.value_head,
    )


def _output_gate(reader: ConfigReader, kind: Mixture) -> OutputGate:
    """Laguna's ``gating`` says whether each head has one gate or each of its numbers."""
    gating = reader.raw("gating")
    if kind.output_gate is OutputGate.SOFTPLUS and (gating is True or gating == "per-head"):
        return OutputGate.SOFTPLUS_PER_HEAD
    return kind.output_gate


def _rotated(reader: ConfigReader, kind: Mixture, head_dim: int, *, local: bool) -> int:
    """Dimensions of a head that are rotated."""
    if kind.partial_rotary is None:
        return head_dim
    if kind.local_rotary:
        return int(head_dim * _typed_share(reader, kind, kind.partial_rotary, local=local))
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


def _typed_share(
    reader: ConfigReader, kind: Mixture, partial_rotary: float, *, local: bool
) -> float:
    """The rotated share of layers of one kind: each has rope parameters of its own."""
    share = kind.local_partial_rotary if local else partial_rotary
    parameters = reader.mapping("rope_parameters")
    if parameters is None:
        return share
    own = parameters.get("sliding_attention" if local else "full_attention")
    value = own.get("partial_rotary_factor") if isinstance(own, Mapping) else None
    return float(value) if isinstance(value, int | float) else kind.silent_partial_rotary


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
    key = next((name for name in EXPERT_KEYS if name in reader.config), EXPERT_KEYS[0])
    num_experts = reader.integer(key, *EXPERT_KEYS)
    per_token = reader.integer("num_experts_per_tok")
    if per_token > num_experts:
        error = reader.fail("num_experts_per_tok", f"{per_token} of {num_experts} experts")
        raise error
    if kind.router.grouped:
        reader.divide(key, num_experts, "n_group", reader.integer("n_group", default=1))
    size = reader.integer(kind.expert_size)
    shared = _shared_size(reader, kind, size)
    expert = FeedForwardSpec(
        intermediate_size=size,
        activation=_activation(reader),
        gated=True,
        bias=kind.expert_bias,
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
        shared_between=kind.shared_between,
        shared_first=kind.shared_first,
        shared_gate=kind.shared_gate,
        clamped_gate=kind.clamped_gate,
        routed_scaled=kind.routed_scaled,
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
    if router.grouped:
        router = replace(router, one_group=reader.integer("n_group", default=1) == 1)
    if kind.softcap_key is not None and reader.number(kind.softcap_key, maximum=MAX_SOFTCAP) > 0:
        router = replace(router, softcap=True)
    if kind.jitter is not None and reader.number(kind.jitter) > 0:
        router = replace(router, jitter=True)
    return router
