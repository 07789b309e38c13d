"""Keys that the configs of decoders have in common: heads, networks, windows, tying."""

from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.fast_dataclass import dataclass, replace
from memplan.model.attention import AttentionSpec, Projection, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.heads import DECODER_CLASSIFIER, HeadSpec
from memplan.model.layers import LayerRun, LayerSpec, StackSpec
from memplan.model.networks import Activation
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task

DECODER_TASKS = (Task.CAUSAL_LM, Task.BASE, Task.SEQUENCE_CLASSIFICATION, Task.TOKEN_CLASSIFICATION)
"""What a decoder's classes are trained for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """How one type differs from Llama, where its config does not say so."""

    qkv_bias: bool | None = None
    """Fixed by the class; None reads ``attention_bias``."""
    output_bias: bool | None = None
    """Fixed by the class; None follows ``attention_bias``."""
    query_key_norm: NormKind | None = None
    norm_at_once: bool = False
    """``q_norm(q_proj(x))``: queries are normed before keys are projected."""
    norm: NormKind = NormKind.RMS


def decoder_model(
    reader: ConfigReader,
    request: ReadRequest,
    stack: StackSpec,
    *,
    hidden_size: int,
    head: HeadSpec | None = None,
    tied_by_default: bool = True,
    context_keys: tuple[str, ...] = ("max_position_embeddings",),
) -> ModelSpec:
    """A decoder-only model around its one stack."""
    tied = reader.flag("tie_word_embeddings", default=tied_by_default)
    head = replace(head or HeadSpec(), tied=tied)
    if reader.raw("classifier_dropout") is not None:
        own = reader.number("classifier_dropout")
        head = replace(head, classifier=replace(DECODER_CLASSIFIER, token_dropout=own))
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=reject_task(reader, request, *DECODER_TASKS),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        context_length=reader.integer(*context_keys, default=2048),
        stacks=(stack,),
        head=head,
        num_labels=request.labels(reader),
        checkpoint_dtype=checkpoint_dtype(reader),
        source=reader.source,
    )


def read_attention(reader: ConfigReader, variation: Variation, hidden_size: int) -> AttentionSpec:
    """Heads, biases, rotary dimensions."""
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", default=num_heads)
    reader.divide("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    head_dim = reader.optional_integer("head_dim")
    if head_dim is None:
        head_dim = reader.divide("hidden_size", hidden_size, "num_attention_heads", num_heads)
    bias = reader.flag("attention_bias") if variation.qkv_bias is None else variation.qkv_bias
    output_bias = bias if variation.output_bias is None else variation.output_bias
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        projection=Projection.SEPARATE,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=output_bias,
        rotary=RotarySpec(dim=head_dim),
        query_key_norm=(
            NormSpec(kind=variation.query_key_norm) if variation.query_key_norm else None
        ),
        query_key_norm_at_once=variation.norm_at_once,
        dropout=reader.number("attention_dropout"),
    )


def read_activation(reader: ConfigReader, *keys: str) -> Activation:
    """An activation by transformers' name."""
    return named_activation(reader, keys[0], reader.text(*keys, default="silu"))


def named_activation(reader: ConfigReader, key: str, name: str) -> Activation:
    """An activation by transformers' name.

    Raises ``ConfigError`` for one that is not known.
    """
    known = {each.value: each for each in Activation}
    return known[reader.choice(key, ACTIVATION_NAMES.get(name, name), known)]


ACTIVATION_NAMES = {"swish": "silu", "gelu_pytorch": "gelu", "gelu_python": "gelu"}
"""Other names of the same function (transformers' ACT2FN)."""


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


def join_runs(layers: list[LayerSpec]) -> tuple[LayerRun, ...]:
    """Put equal neighbours together.

    >>> join_runs([])
    ()
    """
    runs: list[LayerRun] = []
    for layer in layers:
        if runs and (runs[-1].layer is layer or runs[-1].layer == layer):
            runs[-1] = LayerRun(count=runs[-1].count + 1, layer=layer)
        else:
            runs.append(LayerRun(count=1, layer=layer))
    return tuple(runs)
