"""Decoders from before Llama: layer norms, learned positions or ALiBi, plain feed-forward networks.

GPT, GPT-2, GPT-BigCode, GPT-Neo, GPT-J, CodeGen, OPT, XGLM, BLOOM, MPT, Persimmon and Falcon. What sets the types apart is a row of ``FORMS``.
"""

from dataclasses import replace

from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.fast_dataclass import dataclass
from memplan.model.attention import (
    AttentionForm,
    AttentionSpec,
    Projection,
    QueryScaling,
    RotarySpec,
)
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import (
    EmbeddingSpec,
    LayerRun,
    LayerSpec,
    NormPlacement,
    PositionSource,
    StackSpec,
)
from memplan.model.networks import Activation, FeedForwardSpec, NetworkPlace
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How one type's class is built, beyond the sizes in its config."""

    projection: Projection = Projection.SEPARATE
    attention: AttentionForm = AttentionForm.INTERFACE
    placement: NormPlacement = NormPlacement.PRE
    positions: PositionSource = PositionSource.NONE
    position_offset: int = 0
    """Rows of the position table beyond those that the config names."""
    bias: str | bool = True
    """Biases of queries, keys and values: fixed, or the key that says so."""
    output_bias: str | bool = True
    feed_forward_bias: str | bool = True
    feed_forward_place: NetworkPlace = NetworkPlace.MODULE
    head_bias: bool = False
    norm: NormKind = NormKind.LAYER
    norm_bias: bool = True
    activation_keys: tuple[str, ...] = ("activation_function",)
    inner_keys: tuple[str, ...] = ("n_inner", "intermediate_size")
    """Width of the feed-forward network; four times the hidden size without it."""
    dropout_keys: tuple[str, str, str] = ("attn_pdrop", "resid_pdrop", "embd_pdrop")
    """Probabilities in attention, on the residual branches, on the embeddings; empty: none."""
    rotated_share: float | None = None
    """Part of each head that is rotated unless the config says otherwise; None: no rotary."""
    paired_rotary: bool = False
    """``rotary_dim`` neighbouring pairs, as GPT-J does."""
    fp32_softmax: bool = True
    query_scaling: QueryScaling = QueryScaling.IN_SCORES
    names_attended: bool = False
    feed_forward_dropout_only: bool = False
    dropout_inside: bool = False
    dropout_modules: bool = False
    context_keys: tuple[str, ...] = ("max_position_embeddings",)
    unnamed_loss: bool = False
    """The class of its language model is named ``...LMHeadModel``."""
    classified: bool = True
    """The class has a variant for sequence classification."""
    transposed_linear: bool = False


GPT2 = Form(
    projection=Projection.FUSED_SPLIT,
    positions=PositionSource.COUNTED,
    fp32_softmax=False,
    names_attended=True,
    dropout_inside=True,
    dropout_modules=True,
    unnamed_loss=True,
    transposed_linear=True,
)
_GPTJ = Form(
    dropout_inside=True,
    dropout_modules=True,
    attention=AttentionForm.FP32_SCORES,
    placement=NormPlacement.PARALLEL_SHARED,
    bias=False,
    output_bias=False,
    head_bias=True,
    paired_rotary=True,
)

FORMS: dict[str, Form] = {
    "openai-gpt": replace(
        GPT2,
        attention=AttentionForm.MASK_PRODUCT,
        placement=NormPlacement.POST,
        positions=PositionSource.BUFFER,
        activation_keys=("afn",),
        inner_keys=(),
        names_attended=False,
    ),
    "gpt2": GPT2,
    "gpt_bigcode": replace(GPT2, fp32_softmax=True, unnamed_loss=False, transposed_linear=False),
    "gpt_neo": Form(
        attention=AttentionForm.FP32_SCORES_MASKED,
        positions=PositionSource.COUNTED,
        bias=False,
        dropout_keys=("attention_dropout", "resid_dropout", "embed_dropout"),
        dropout_inside=True,
        dropout_modules=True,
        names_attended=True,
    ),
    "gptj": _GPTJ,
    "codegen": replace(
        _GPTJ,
        attention=AttentionForm.FP32_SCORES_DIVIDED,
        projection=Projection.FUSED_COPIED,
        classified=False,
    ),
    "opt": Form(
        positions=PositionSource.MASK_SUM,
        position_offset=2,
        bias="enable_bias",
        output_bias="enable_bias",
        feed_forward_bias="enable_bias",
        inner_keys=("ffn_dim",),
        feed_forward_place=NetworkPlace.STEPS,
        dropout_keys=("attention_dropout", "dropout", ""),
        query_scaling=QueryScaling.AT_ONCE,
    ),
    "xglm": Form(
        attention=AttentionForm.CLAMPED_SCORES,
        positions=PositionSource.SINUSOIDS,
        position_offset=2,
        inner_keys=("ffn_dim",),
        feed_forward_place=NetworkPlace.NESTED,
        dropout_keys=("attention_dropout", "dropout", "dropout"),
        query_scaling=QueryScaling.AT_ONCE,
        classified=False,
    ),
    "bloom": Form(
        attention=AttentionForm.ALIBI_PRODUCT,
        projection=Projection.FUSED_SELECTED,
        activation_keys=(),
        inner_keys=(),
        dropout_keys=("attention_dropout", "hidden_dropout", ""),
        context_keys=("seq_length",),
    ),
    "mpt": Form(
        attention=AttentionForm.ALIBI_SUM,
        projection=Projection.FUSED_SPLIT,
        bias=False,
        output_bias=False,
        feed_forward_bias=False,
        norm_bias=False,
        activation_keys=(),
        inner_keys=(),
        dropout_keys=("", "", ""),
        names_attended=True,
        context_keys=("max_seq_len",),
    ),
    "falcon": Form(
        attention=AttentionForm.DIRECT,
        projection=Projection.FUSED_SELECTED,
        bias="bias",
        output_bias="bias",
        feed_forward_bias="bias",
        activation_keys=("activation",),
        inner_keys=("ffn_hidden_size",),
        dropout_keys=("attention_dropout", "hidden_dropout", ""),
        rotated_share=1.0,
    ),
    "persimmon": Form(
        projection=Projection.FUSED_SELECTED,
        activation_keys=("hidden_act",),
        dropout_keys=("attention_dropout", "hidden_dropout", ""),
        feed_forward_dropout_only=True,
        rotated_share=0.5,
    ),
}
"""Sources: ``modeling_*.py`` and ``configuration_*.py`` of transformers 5.23."""


_CHOOSING = frozenset({AttentionForm.INTERFACE, AttentionForm.DIRECT})
"""Attention that has more than the eager form."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``FORMS``."""
    form = FORMS[request.model_type]
    hidden_size = reader.integer("n_embed", "hidden_size")
    layer = read_layer(reader, form, request.model_type, hidden_size)
    stack = StackSpec(
        name="decoder",
        runs=_runs(reader, request.model_type, layer),
        embedding=_embedding(reader, form, request.model_type, hidden_size),
        final_norm=_final_norm(reader, request.model_type, layer),
        projected_out=_table_width(reader, hidden_size) != hidden_size,
    )
    tasks = (Task.CAUSAL_LM, Task.BASE, *((Task.SEQUENCE_CLASSIFICATION,) * form.classified))
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=reject_task(reader, request, *tasks),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        context_length=reader.integer(*form.context_keys, default=2048),
        stacks=(stack,),
        head=HeadSpec(
            tied=reader.flag("tie_word_embeddings"),
            bias=form.head_bias,
            unnamed_loss=form.unnamed_loss,
        ),
        num_labels=request.labels(reader),
        checkpoint_dtype=checkpoint_dtype(reader),
        transposed_linear=form.transposed_linear,
        eager_attention_only=form.attention not in _CHOOSING,
        recomputes=request.model_type != "openai-gpt",
        source=reader.source,
    )


def read_layer(reader: ConfigReader, form: Form, model_type: str, hidden_size: int) -> LayerSpec:
    """One layer, as its class and config make it."""
    weight = reader.flag("layer_norm_elementwise_affine", default=True)
    attention = _attention(reader, form, model_type, hidden_size)
    shared_dropout = form.attention is AttentionForm.ALIBI_SUM
    return LayerSpec(
        attention=attention,
        feed_forward=_feed_forward(reader, form, hidden_size),
        norm=NormSpec(kind=form.norm, bias=form.norm_bias and weight, weight=weight),
        placement=(
            _falcon_placement(reader) if model_type == "falcon" else _placement(reader, form)
        ),
        dropout=(
            attention.dropout if shared_dropout else _probability(reader, form.dropout_keys[1])
        ),
        feed_forward_dropout_only=form.feed_forward_dropout_only,
        dropout_modules=form.dropout_modules or form.feed_forward_dropout_only,
        dropout_inside=form.dropout_inside,
        sums_inside=form.attention in {AttentionForm.ALIBI_PRODUCT, AttentionForm.ALIBI_SUM},
        names_attended=form.names_attended,
        names_parts=form.attention is AttentionForm.MASK_PRODUCT,
        flat_products=form.attention is AttentionForm.MASK_PRODUCT,
        flat_rows=form.feed_forward_place is NetworkPlace.STEPS,
        residual_normed=reader.flag("apply_residual_connection_post_layernorm"),
    )


def _probability(reader: ConfigReader, key: str) -> float:
    return reader.number(key) if key else 0.0


def _flag(reader: ConfigReader, value: str | bool) -> bool:
    return reader.flag(value) if isinstance(value, str) else value


def _placement(reader: ConfigReader, form: Form) -> NormPlacement:
    """OPT's norms stand before or after."""
    if not reader.flag("do_layer_norm_before", default=True):
        return NormPlacement.POST
    return form.placement


def _falcon_placement(reader: ConfigReader) -> NormPlacement:
    """In a row, or side by side with a norm for each where the newer architecture says two."""
    if not reader.flag("parallel_attn"):
        return NormPlacement.PRE
    norms = reader.optional_integer("num_ln_in_parallel_attn")
    if reader.flag("new_decoder_architecture") and norms in {None, 2}:
        return NormPlacement.PARALLEL
    return NormPlacement.PARALLEL_SHARED


def _attention(
    reader: ConfigReader, form: Form, model_type: str, hidden_size: int
) -> AttentionSpec:
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = _num_kv_heads(reader, model_type, num_heads)
    reader.divide("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    head_dim = reader.divide("hidden_size", hidden_size, "num_attention_heads", num_heads)
    bias = _flag(reader, form.bias)
    projection = form.projection
    if (model_type == "gpt_bigcode" and num_kv_heads != 1) or (
        model_type == "falcon" and reader.flag("new_decoder_architecture")
    ):
        projection = Projection.FUSED_INTERLEAVED
    return AttentionSpec(
        views_last=model_type in {"gpt_neo", "xglm"},
        query_viewed_last=model_type in {"gpt2", "xglm"},
        kept_cache=model_type == "gpt_bigcode",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        projection=projection,
        form=AttentionForm.DIRECT_ALIBI if reader.flag("alibi") else form.attention,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=_flag(reader, form.output_bias),
        rotary=_rotary(reader, form, head_dim),
        paired_rotary_dim=_paired_rotary_dim(reader, head_dim) if form.paired_rotary else 0,
        query_key_norm=_query_key_norm(reader),
        fp32_softmax=form.fp32_softmax,
        weights_like_values=not form.fp32_softmax,
        upcast_reordered=reader.flag("reorder_and_upcast_attn"),
        query_scaling=form.query_scaling,
        dropout=_attention_dropout(reader, form),
        buffer_positions=_buffer_positions(reader, form),
    )


def _num_kv_heads(reader: ConfigReader, model_type: str, num_heads: int) -> int:
    if model_type == "gpt_bigcode":
        return 1 if reader.flag("multi_query") else num_heads
    if model_type == "falcon" and reader.flag("new_decoder_architecture"):
        return reader.integer("num_kv_heads", default=num_heads)
    if model_type == "falcon":
        return 1 if reader.flag("multi_query") else num_heads
    return num_heads


def _rotary(reader: ConfigReader, form: Form, head_dim: int) -> RotarySpec | None:
    if form.rotated_share is None:
        return None
    share = reader.number("partial_rotary_factor", default=form.rotated_share)
    for key in ("rope_scaling", "rope_parameters"):
        nested = reader.mapping(key) or {}
        value = nested.get("partial_rotary_factor")
        if isinstance(value, int | float):
            share = float(value)
    if form.rotated_share == 1.0:
        share = 1.0
    dim = int(head_dim * share)
    if not 0 < dim <= head_dim:
        error = reader.fail("partial_rotary_factor", f"leaves {dim} of {head_dim} dimensions")
        raise error
    return RotarySpec(
        dim=dim,
        joined=form.rotated_share < 1.0,
        names_parts=form.rotated_share < 1.0,
    )


def _paired_rotary_dim(reader: ConfigReader, head_dim: int) -> int:
    key = "rotary_dim"
    dim = reader.integer(key)
    if dim > head_dim or dim % 2:
        raise reader.fail(key, f"must be even and at most {head_dim}, got {dim}")
    return dim


def _query_key_norm(reader: ConfigReader) -> NormSpec | None:
    if not reader.flag("qk_layernorm"):
        return None
    return NormSpec(kind=NormKind.LAYER, bias=True)


def _attention_dropout(reader: ConfigReader, form: Form) -> float:
    if form.attention is AttentionForm.ALIBI_SUM:
        nested = reader.mapping("attn_config") or {}
        return reader.nested(nested, f"{reader.path}attn_config.").number("attn_pdrop")
    return _probability(reader, form.dropout_keys[0])


def _buffer_positions(reader: ConfigReader, form: Form) -> int:
    """Rows of the masks and tables that each attention module keeps."""
    if form.attention in {
        AttentionForm.FP32_SCORES,
        AttentionForm.FP32_SCORES_DIVIDED,
        AttentionForm.FP32_SCORES_MASKED,
        AttentionForm.MASK_PRODUCT,
        AttentionForm.ALIBI_SUM,
    }:
        return reader.integer(*form.context_keys)
    return 0


ACTIVATION_NAMES = {
    "swish": "silu", "gelu_10": "gelu", "gelu_python": "gelu", "gelu_pytorch": "gelu",
    "gelu_python_tanh": "gelu_new",
}  # fmt: skip
"""Other names of the same function (transformers' ``ACT2FN``)."""


def _activation(reader: ConfigReader, form: Form) -> Activation:
    """By transformers' name; GPT's own table calls the tanh form ``gelu``."""
    if form.attention is AttentionForm.ALIBI_PRODUCT:
        return Activation.BLOOM_GELU
    if not form.activation_keys:
        return Activation.GELU
    name = reader.text(*form.activation_keys)
    name = ACTIVATION_NAMES.get(name, name)
    if form.attention is AttentionForm.MASK_PRODUCT and name == "gelu":
        return Activation.GELU_NEW
    known = {each.value: each for each in Activation}
    return known[reader.choice(form.activation_keys[0], name, known)]


def _feed_forward(reader: ConfigReader, form: Form, hidden_size: int) -> FeedForwardSpec:
    inner = reader.integer(*form.inner_keys, default=4 * hidden_size) if form.inner_keys else None
    return FeedForwardSpec(
        intermediate_size=inner or 4 * hidden_size,
        activation=_activation(reader, form),
        gated=False,
        bias=_flag(reader, form.feed_forward_bias),
        place=form.feed_forward_place,
        activation_dropout=(
            reader.number("activation_dropout")
            if form.attention is AttentionForm.CLAMPED_SCORES
            else 0.0
        ),
    )


def _table_width(reader: ConfigReader, hidden_size: int) -> int:
    return reader.integer("word_embed_proj_dim", default=hidden_size)


def _embedding(
    reader: ConfigReader, form: Form, model_type: str, hidden_size: int
) -> EmbeddingSpec:
    positions = 0
    if form.positions is not PositionSource.NONE:
        positions = reader.integer("max_position_embeddings") + form.position_offset
    return EmbeddingSpec(
        embedding_size=_table_width(reader, hidden_size),
        num_positions=positions,
        position_source=form.positions,
        projection_bias=False,
        scaled_in_table=model_type == "xglm",
        norm=NormSpec(kind=NormKind.LAYER, bias=True) if model_type == "bloom" else None,
        dropout=_probability(reader, form.dropout_keys[2]),
        dropout_module=form.dropout_modules,
        masked_last=model_type == "gpt2",
        mask_buffer=model_type == "gpt_bigcode",
    )


def _final_norm(reader: ConfigReader, model_type: str, layer: LayerSpec) -> NormSpec | None:
    if model_type == "openai-gpt" or reader.flag("_remove_final_layer_norm"):
        return None
    if layer.placement is NormPlacement.POST:
        return None
    return layer.norm


def _runs(reader: ConfigReader, model_type: str, layer: LayerSpec) -> tuple[LayerRun, ...]:
    count = reader.layers("num_hidden_layers")
    if model_type == "gpt_neo":
        _check_attention_types(reader, count)
    return (LayerRun(count=count, layer=layer),)


def _check_attention_types(reader: ConfigReader, count: int) -> None:
    """GPT-Neo lists what each layer sees; local and global ones take the same memory."""
    key, total = "attention_types", 0
    for item in reader.sequence(key):
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], list)):
            raise reader.fail(key, "expected pairs of names and a repetition")
        total += len(item[0]) * (item[1] if isinstance(item[1], int) else 0)
    if (total or 24) != count:
        raise reader.fail(key, f"names {total or 24} layers of {count}")
