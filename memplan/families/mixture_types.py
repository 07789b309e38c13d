"""The types of mixtures of experts, one row each: what a class fixes and its config cannot say.

Rows are read by ``memplan.families.mixtures``.
"""

from collections.abc import Callable

from memplan.families.llama import Variation
from memplan.fast_dataclass import dataclass
from memplan.model.attention import OutputGate, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.layers import NormPlacement
from memplan.model.mixtures import Normalization, RouterScore, RouterSpec
from memplan.model.norms import NormKind, NormSpec

DEEPSEEK_ROUTER = RouterSpec(
    score=RouterScore.SIGMOID,
    fp32_product=True,
    fp32_logits=False,
    correction=True,
    grouped=True,
    normalization=Normalization.IN_PLACE,
    scaled=True,
)
"""DeepSeek-V3's: sigmoid scores, a correction bias, groups ruled out, weights normalized."""

LLAMA = Variation()
"""Biases as ``attention_bias`` says, no norms on queries and keys."""

RMS_NORM = NormSpec(kind=NormKind.RMS)

PLAIN_ROTARY = RotarySpec(dim=0)
"""Llama's form; how much of a head is rotated is read from the config."""

JOINED_ROTARY = RotarySpec(dim=0, joined=True)
"""Heads are joined from a rotated part and the rest, even where nothing rests."""

MAX_SOFTCAP = 1e9
"""No cap on logits is larger."""

QWEN_ROUTER = RouterSpec(fp32_logits=False, normalization=Normalization.IN_PLACE, cast_weights=True)
"""Qwen's: a softmax in fp32, weights normalized where ``norm_topk_prob`` says so, cast back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """What one type's class fixes."""

    router: RouterSpec
    attention: Variation = LLAMA
    bias_key: str = "attention_bias"
    """Which key gives queries, keys and values a bias."""
    norm: NormSpec = RMS_NORM
    placement: NormPlacement = NormPlacement.PRE
    query_key_norm_per_head: bool = True
    rotary: RotarySpec = PLAIN_ROTARY
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
    shared_between: bool = False
    shared_first: bool = False
    shared_gate: bool = False
    jitter: str | None = None
    """Which key switches noise on."""
    dense: Callable[[ConfigReader, int], bool] | None = None
    """Which layers, by number, are dense; None: none."""
    sliding: Callable[[ConfigReader, int], bool] | None = None
    """Which layers have the sliding window; None: none."""
    mixed_masks: bool = False
    """The full causal mask is made even where no layer uses it."""
    spare_window_mask: bool = False
    """The sliding mask is made even where no layer uses it."""
    local_rotary: bool = False
    """Layers with a window have rotary tables of their own."""
    local_partial_rotary: float = 1.0
    """The same share in layers with a window."""
    silent_partial_rotary: float = 1.0
    """The share where the config has rope parameters, but not this one."""
    output_gate: OutputGate = OutputGate.NONE
    own_eager: bool = False
    """The class has an eager attention of its own, and no other."""
    sinks: bool = False
    local_sinks: bool = False
    """Only layers with a window have sinks (MiMo-V2)."""
    local_key_value_factor: int = 1
    """How many times more key/value heads layers with a window have (MiMo-V2)."""
    value_head: bool = False
    """Values have a head size of their own and are scaled (MiMo-V2)."""
    router_loss: bool = False
    """``output_router_logits`` adds a loss; other classes ignore it."""
    clamped_gate: bool = False
    expert_bias: bool = False
    routed_scaled: bool = False
    embedding_flag: str | None = None
    """Which key switches the embedding's scaling on (AFMoE)."""
    softcap_key: str | None = None
    """Which key, above 0, switches the router's softcap on (Laguna)."""
    rotates_local_only: bool = False
    """Only layers with a window have positions (AFMoE)."""


def first_dense(reader: ConfigReader, number: int) -> bool:
    """Whether the layer is one of the first ones, which are dense."""
    return number < reader.integer("first_k_dense_replace", default=0, minimum=0)


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
        error = reader.fail("mlp_layer_types", f"names {len(types)} layers, needs more")
        raise error
    return types[number] != "sparse"


def typed_or_first_dense(reader: ConfigReader, number: int) -> bool:
    """``mlp_layer_types``, or the first ``first_k_dense_replace`` layers."""
    if reader.texts("mlp_layer_types"):
        return typed_dense(reader, number)
    return first_dense(reader, number)


def _typed_sliding(
    reader: ConfigReader, number: int, default: Callable[[ConfigReader, int], bool]
) -> bool:
    types = reader.texts("layer_types")
    if not types:
        return default(reader, number)
    if number >= len(types):
        error = reader.fail("layer_types", f"names {len(types)} layers, needs more")
        raise error
    return types[number] == "sliding_attention"


def _afmoe_sliding(reader: ConfigReader, number: int) -> bool:
    every = reader.integer("global_attn_every_n_layers", default=4)
    return _typed_sliding(reader, number, lambda _, each: bool((each + 1) % every))


def _even_sliding(reader: ConfigReader, number: int) -> bool:
    return _typed_sliding(reader, number, lambda _, each: bool((each + 1) % 2))


def _mimo_sliding(reader: ConfigReader, number: int) -> bool:
    return _typed_sliding(reader, number, lambda _, each: each != 0 and bool((each + 1) % 6))


def _never_sliding(reader: ConfigReader, number: int) -> bool:
    return _typed_sliding(reader, number, lambda *_: False)


def _dense_layers(reader: ConfigReader, number: int) -> bool:
    return number < reader.integer("num_dense_layers", default=0, minimum=0)


MIXTURES: dict[str, Mixture] = {
    "ernie4_5_moe": Mixture(
        router=RouterSpec(
            fp32_product=True,
            fp32_weight=True,
            correction_parameter=True,
            normalization=Normalization.COPY,
            cast_weights=True,
        ),
        bias_key="use_bias",
        rotary=RotarySpec(dim=0, upcast_apart=True, expanded_tables=True, full_tables=True),
        normalizes=True,
        shared_count="moe_num_shared_experts",
        shared_first=True,
        dense=_ernie_dense,
        router_loss=True,
    ),
    "afmoe": Mixture(
        router=RouterSpec(
            score=RouterScore.SIGMOID,
            returns_fp32_logits=True,
            correction_parameter=True,
            normalization=Normalization.COPY,
            scaled=True,
        ),
        attention=Variation(query_key_norm=NormKind.RMS_UPCAST),
        norm=NormSpec(kind=NormKind.RMS_UPCAST),
        placement=NormPlacement.SANDWICH,
        normalizes=True,
        shared_count="num_shared_experts",
        shared_between=True,
        output_gate=OutputGate.SIGMOID,
        dense=_dense_layers,
        sliding=_afmoe_sliding,
        rotates_local_only=True,
        mixed_masks=True,
        spare_window_mask=True,
        embedding_flag="mup_enabled",
    ),
    "laguna": Mixture(
        router=RouterSpec(
            score=RouterScore.SIGMOID,
            returns_fp32_logits=True,
            correction_parameter=True,
            normalization=Normalization.COPY,
            cast_weights=True,
        ),
        attention=Variation(query_key_norm=NormKind.RMS),
        rotary=JOINED_ROTARY,
        partial_rotary=0.5,
        local_rotary=True,
        normalizes=True,
        shared_size="shared_expert_intermediate_size",
        shared_first=True,
        routed_scaled=True,
        output_gate=OutputGate.SOFTPLUS,
        softcap_key="moe_router_logit_softcapping",
        dense=typed_dense,
        sliding=_never_sliding,
        router_loss=True,
    ),
    "gpt_oss": Mixture(
        router=RouterSpec(
            score=RouterScore.SOFTMAX_SELECTED, bias=True, fp32_logits=False, own_dtype=True
        ),
        norm=NormSpec(kind=NormKind.RMS_UPCAST),
        rotary=RotarySpec(dim=0, halved=True),
        normalizes=False,
        expert_size="intermediate_size",
        expert_bias=True,
        clamped_gate=True,
        own_eager=True,
        sinks=True,
        sliding=_even_sliding,
        mixed_masks=True,
        spare_window_mask=True,
        router_loss=True,
    ),
    "mimo_v2_flash": Mixture(
        router=DEEPSEEK_ROUTER,
        attention=Variation(output_bias=False),
        rotary=JOINED_ROTARY,
        partial_rotary=0.334,
        local_partial_rotary=0.334,
        silent_partial_rotary=0.334,
        local_rotary=True,
        own_eager=True,
        local_sinks=True,
        local_key_value_factor=2,
        value_head=True,
        dense=typed_dense,
        sliding=_mimo_sliding,
    ),
}
