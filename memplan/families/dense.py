"""Dense decoders that depart from Llama: in their norms, their rotary embeddings or their windows.

What a class of transformers 5.23 does differently is a row of ``FORMS``; what its config decides is
read below.
"""

from dataclasses import replace

from memplan.families.llama import (
    Variation,
    decoder_model,
    join_runs,
    read_activation,
    read_attention,
)
from memplan.families.request import ReadRequest
from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec, Projection, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerSpec, NormPlacement, StackSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
"""What ``layer_types`` calls layers without and with a window."""


_LLAMA_ATTENTION = Variation()
_WHOLE_HEADS = RotarySpec(dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How one type's class differs from Llama's, where its config does not say so."""

    norm: NormKind = NormKind.RMS
    norm_bias: bool = False
    placement: NormPlacement = NormPlacement.PRE
    attention: Variation = _LLAMA_ATTENTION
    """Biases, and the norm on queries and keys."""
    query_key_norm_per_head: bool = True
    query_key_norm_last: bool = False
    query_scaled_by_position: bool = False
    projection: Projection = Projection.SEPARATE
    rotary: RotarySpec = _WHOLE_HEADS
    """How heads are turned; ``dim`` is read from the config."""
    rotated_share: float = 1.0
    """Share of each head that is turned unless the config says otherwise."""
    derived_head_dim: bool = False
    """Without a ``head_dim`` of its own the config has hidden size over heads."""
    square_output: bool = False
    """The output projection goes from the hidden size to itself, so the heads must fill it."""
    gated: bool = True
    fused_gate_up: bool = False
    feed_forward_bias: bool | None = None
    """Fixed by the class; None reads ``mlp_bias``."""
    window_pattern: int | None = None
    """Every n-th layer sees everything, the others a window; None: all layers alike."""
    window_flag: bool = False
    """``use_sliding_window`` must be on as well, and windows are where nothing is turned (SmolLM3)."""
    mixed_masks: bool = False
    local_rotary: bool = False
    """Layers with a window have rotary tables of their own."""
    rotary_in_full_layers: bool = True
    """Without it, only layers with a window know positions, unless no layer has one."""
    embedding_scaled: bool = False
    logits_scaled: bool = False
    residual_scaled: bool = False
    residual_first: bool = False
    eager_only: bool = False
    dropout_modules: bool = False
    dropout_inside: bool = False


_GEMMA = Form(norm=NormKind.RMS_GEMMA, feed_forward_bias=False, embedding_scaled=True)
_GEMMA2 = replace(
    _GEMMA, placement=NormPlacement.SANDWICH, window_pattern=2, mixed_masks=True, eager_only=True
)
_OLMO = Form(
    norm=NormKind.LAYER_PLAIN, rotary=RotarySpec(dim=1, full_tables=True), feed_forward_bias=False
)
_OLMO2 = replace(
    _OLMO,
    norm=NormKind.RMS_UPCAST,
    placement=NormPlacement.OUTPUT,
    attention=Variation(query_key_norm=NormKind.RMS_UPCAST, norm_at_once=True),
    query_key_norm_per_head=False,
)
_COHERE = Form(
    norm=NormKind.LAYER_UPCAST,
    placement=NormPlacement.PARALLEL_SHARED,
    rotary=RotarySpec(dim=1, upcast=True),
    feed_forward_bias=False,
    logits_scaled=True,
    residual_first=True,
)
_GLM = Form(
    attention=Variation(output_bias=False),
    rotary=RotarySpec(dim=1, expanded_tables=True, joined=True),
    rotated_share=0.5,
    fused_gate_up=True,
    feed_forward_bias=False,
)
_GRANITE = Form(embedding_scaled=True, logits_scaled=True, residual_scaled=True)

FORMS: dict[str, Form] = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        attention=Variation(query_key_norm=NormKind.RMS_GEMMA),
        window_pattern=6,
        local_rotary=True,
        eager_only=False,
    ),
    "vaultgemma": replace(_GEMMA2, placement=NormPlacement.PRE),
    "phi3": Form(
        attention=Variation(qkv_bias=False, output_bias=False),
        projection=Projection.FUSED_SLICED,
        rotary=RotarySpec(dim=1, joined=True, joined_at_once=True),
        fused_gate_up=True,
        feed_forward_bias=False,
        window_pattern=0,
        dropout_modules=True,
    ),
    "olmo": _OLMO,
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, window_pattern=4, mixed_masks=True, local_rotary=True),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        derived_head_dim=True,
        window_pattern=4,
        mixed_masks=True,
        rotary_in_full_layers=False,
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, placement=NormPlacement.SANDWICH),
    "granite": _GRANITE,
    "hyperclovax": _GRANITE,
    "arcee": Form(gated=False),
    "apertus": Form(
        attention=Variation(query_key_norm=NormKind.RMS), gated=False, feed_forward_bias=False
    ),
    "exaone4": Form(
        placement=NormPlacement.OUTPUT,
        attention=Variation(qkv_bias=False, output_bias=False, query_key_norm=NormKind.RMS),
        feed_forward_bias=False,
        window_pattern=4,
        mixed_masks=True,
        rotary_in_full_layers=False,
    ),
    "smollm3": Form(window_pattern=0, window_flag=True, mixed_masks=True),
    "ministral3": Form(
        attention=Variation(qkv_bias=False, output_bias=False),
        feed_forward_bias=False,
        query_scaled_by_position=True,
        window_pattern=0,
    ),
    "hunyuan_v1_dense": Form(
        attention=Variation(query_key_norm=NormKind.RMS),
        query_key_norm_last=True,
        feed_forward_bias=False,
    ),
    "seed_oss": Form(dropout_inside=True),
    "helium": Form(
        norm=NormKind.RMS_UPCAST,
        attention=Variation(output_bias=False),
        square_output=True,
        rotary=RotarySpec(dim=1, expanded_tables=True),
    ),
    "jais2": Form(norm=NormKind.LAYER, norm_bias=True, gated=False),
}
"""Sources: the ``modeling_*.py`` and ``configuration_*.py`` of each type."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``FORMS``."""
    form = FORMS[request.model_type]
    hidden_size = reader.integer("hidden_size")
    norm = NormSpec(kind=form.norm, bias=form.norm_bias)
    layer = LayerSpec(
        attention=_attention(reader, form, hidden_size),
        feed_forward=_feed_forward(reader, form),
        norm=norm,
        placement=_placement(reader, form),
        dropout=reader.number("resid_pdrop", "residual_dropout"),
        dropout_modules=form.dropout_modules,
        dropout_inside=form.dropout_inside,
        residual_scaled=form.residual_scaled,
        residual_first=form.residual_first,
    )
    stack = StackSpec(
        name="decoder",
        runs=join_runs(_layers(reader, form, layer)),
        embedding=EmbeddingSpec(embedding_size=hidden_size, scaled=form.embedding_scaled),
        final_norm=norm,
        mixed_masks=form.mixed_masks,
        local_rotary=form.local_rotary,
    )
    head = HeadSpec(softcap=bool(reader.raw("final_logit_softcapping")), scaled=form.logits_scaled)
    model = decoder_model(reader, request, stack, hidden_size=hidden_size, head=head)
    return replace(model, eager_attention_only=form.eager_only)


def _placement(reader: ConfigReader, form: Form) -> NormPlacement:
    """HyperCLOVA X is Granite with norms behind both blocks, unless switched off."""
    if reader.flag("use_post_norm"):
        return NormPlacement.SANDWICH
    return form.placement


def _attention(reader: ConfigReader, form: Form, hidden_size: int) -> AttentionSpec:
    """Heads, biases, norms, rotary form."""
    spec = read_attention(reader, form.attention, hidden_size)
    head_dim = spec.head_dim
    if form.derived_head_dim and reader.optional_integer("head_dim") is None:
        head_dim = reader.divide("hidden_size", hidden_size, "num_attention_heads", spec.num_heads)
    width = spec.num_heads * head_dim
    if form.square_output and width != hidden_size:
        error = reader.fail(
            "head_dim",
            f"{spec.num_heads} heads of {head_dim} make {width}, not the hidden_size {hidden_size}",
        )
        raise error
    query_key_norm = spec.query_key_norm
    if reader.flag("use_qk_norm"):
        query_key_norm = NormSpec(kind=form.norm)
    if form is _OLMO:
        spec = replace(spec, views_last=True)
    if reader.raw("attention_out_bias") is not None:
        spec = replace(spec, output_bias=reader.flag("attention_out_bias"))
    return replace(
        spec,
        head_dim=head_dim,
        projection=form.projection,
        rotary=replace(form.rotary, dim=rotated_dim(reader, head_dim, form.rotated_share)),
        query_key_norm=query_key_norm,
        query_key_norm_per_head=form.query_key_norm_per_head,
        query_key_norm_weight_per_head=reader.flag("use_qk_norm"),
        query_key_norm_last=form.query_key_norm_last,
        query_scaled_by_position=form.query_scaled_by_position,
        projection_clamped=reader.raw("clip_qkv") is not None,
        softcap=form.eager_only and bool(reader.raw("attn_logit_softcapping")),
        causal=not reader.flag("use_bidirectional_attention"),
    )


def rotated_dim(reader: ConfigReader, head_dim: int, share: float) -> int:
    """Dimensions of a head that are turned: ``partial_rotary_factor``, wherever it stands."""
    share = reader.number("partial_rotary_factor", default=share)
    for key in ("rope_scaling", "rope_parameters"):
        nested = reader.nested(reader.mapping(key) or {}, f"{reader.path}{key}.")
        share = nested.number("partial_rotary_factor", default=share)
    dim = int(head_dim * share)
    if not 0 < dim <= head_dim:
        error = reader.fail("partial_rotary_factor", f"leaves {dim} of {head_dim} dimensions")
        raise error
    return dim


def _feed_forward(reader: ConfigReader, form: Form) -> FeedForwardSpec:
    fixed = form.feed_forward_bias
    return FeedForwardSpec(
        intermediate_size=reader.integer("intermediate_size"),
        activation=_activation(reader),
        gated=form.gated,
        fused_gate_up=form.fused_gate_up,
        bias=reader.flag("mlp_bias") if fixed is None else fixed,
    )


def _activation(reader: ConfigReader) -> Activation:
    """By its name; Gemma 2 and 3 call the key ``hidden_activation``."""
    return read_activation(reader, "hidden_act", "hidden_activation")


def _layers(reader: ConfigReader, form: Form, layer: LayerSpec) -> list[LayerSpec]:
    """One specification for each layer: with or without window, with or without positions."""
    count = reader.layers("num_hidden_layers")
    types = layer_types(reader, form, count)
    window = reader.optional_integer("sliding_window")
    if window is None and SLIDING in types:
        error = reader.fail("sliding_window", "is missing, but some layers have one")
        raise error
    turned = _turned(reader, form, types)
    return [
        _layer(layer, window if kind == SLIDING else None, turned=has_positions)
        for kind, has_positions in zip(types, turned, strict=True)
    ]


def _layer(layer: LayerSpec, window: int | None, *, turned: bool) -> LayerSpec:
    attention = layer.attention
    if not isinstance(attention, AttentionSpec):
        return layer
    rotary = attention.rotary if turned else None
    return replace(layer, attention=replace(attention, sliding_window=window, rotary=rotary))


def layer_types(reader: ConfigReader, form: Form, count: int) -> list[str]:
    """What each layer sees, as the config lists it or as the class lays it out."""
    if form.window_pattern is None or reader.optional_integer("sliding_window") is None:
        return [FULL] * count
    if form.window_flag and not reader.flag("use_sliding_window"):
        return [FULL] * count
    listed = reader.texts("layer_types")
    if not listed and form.window_flag:
        return [FULL if turned else SLIDING for turned in _turned(reader, form, [FULL] * count)]
    if not listed:
        period = _period(reader, form)
        return [SLIDING if period == 0 or (index + 1) % period else FULL for index in range(count)]
    if len(listed) != count:
        error = reader.fail("layer_types", f"names {len(listed)} layers of {count}")
        raise error
    for kind in listed:
        reader.choice("layer_types", kind, (FULL, SLIDING))
    return listed


def _period(reader: ConfigReader, form: Form) -> int:
    """Every how many layers one sees everything; 0: none does."""
    pattern = form.window_pattern or 0
    if not pattern:
        return 0
    return reader.integer("sliding_window_pattern", "_sliding_window_pattern", default=pattern)


def _turned(reader: ConfigReader, form: Form, types: list[str]) -> list[bool]:
    """Which layers turn their heads: SmolLM3 lists it, Cohere 2 and EXAONE 4 turn in windows only."""
    listed = reader.integers("no_rope_layers")
    interval = reader.optional_integer("no_rope_layer_interval")
    if listed:
        if len(listed) < len(types):
            error = reader.fail("no_rope_layers", f"names {len(listed)} layers of {len(types)}")
            raise error
        return [bool(flag) for flag in listed[: len(types)]]
    if interval is not None:
        return [(index + 1) % interval != 0 for index in range(len(types))]
    if form.rotary_in_full_layers or (
        reader.raw("sliding_window") is None and SLIDING not in types
    ):
        return [True] * len(types)
    return [kind == SLIDING for kind in types]
