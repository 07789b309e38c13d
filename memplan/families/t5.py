"""T5 and its kin: relative position biases, RMS norms, no other biases, a shared token table.

``T5Config`` (transformers 5.23) derives the feed-forward network from ``feed_forward_proj``, unless
the file also says ``dense_act_fn`` and ``is_gated_act``, and always ties the output matrix. Files
with ``tie_word_embeddings: false`` (version 1.1, flan, ByT5, mT5, UMT5) come with checkpoints that
hold an output matrix of their own, which transformers 4 trained apart.
"""

from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.fast_dataclass import dataclass, replace
from memplan.model.attention import AttentionSpec, PositionBias
from memplan.model.config import ConfigReader
from memplan.model.heads import ClassifierSpec, HeadSpec, Pooling
from memplan.model.layers import EmbeddingSpec, HalfClamp, LayerRun, LayerSpec, StackSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task, Tying

TASKS = (Task.SEQ2SEQ_LM, Task.BASE, Task.SEQUENCE_CLASSIFICATION)
"""What the classes of this module are trained for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """How one type differs from another, where its config does not say so."""

    bias_per_layer: bool = False
    """Each layer has a table of relative positions, not only the first of a stack."""
    scaled_output: bool | None = None
    """The last hidden states are scaled; None: unless the file unties the output matrix."""


VARIATIONS: dict[str, Variation] = {
    "t5": Variation(),
    "mt5": Variation(scaled_output=False),
    "umt5": Variation(bias_per_layer=True, scaled_output=True),
}


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``VARIATIONS``."""
    variation = VARIATIONS[request.model_type]
    reject_lone_encoder(reader, request)
    hidden_size = reader.integer("d_model")
    num_layers = reader.layers("num_layers")
    num_decoder_layers = reader.layers("num_decoder_layers", default=num_layers)
    untied = not reader.flag("tie_word_embeddings", default=True)
    scaled = not untied if variation.scaled_output is None else variation.scaled_output
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=reject_task(reader, as_sequence_to_sequence(reader, request), *TASKS),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        context_length=reader.integer("n_positions", "max_position_embeddings", default=512),
        stacks=(
            read_stack(reader, variation, "encoder", num_layers, hidden_size),
            read_stack(reader, variation, "decoder", num_decoder_layers, hidden_size),
        ),
        head=HeadSpec(
            tied=True,
            scaled=scaled,
            classifier=read_classifier(reader),
        ),
        num_labels=request.labels(reader),
        tying=Tying.AMBIGUOUS if untied else Tying.CLEAR,
        checkpoint_dtype=checkpoint_dtype(reader),
        source=reader.source,
    )


def reject_lone_encoder(reader: ConfigReader, request: ReadRequest) -> None:
    """Refuse ``T5EncoderModel``, which is half of what would be counted."""
    if request.task is None and any(
        each.endswith("EncoderModel") for each in reader.texts("architectures")
    ):
        key = "architectures"
        problem = (
            "an encoder alone is not supported; for the whole model choose `task='seq2seq-lm'`"
        )
        raise reader.fail(key, problem)


def as_sequence_to_sequence(reader: ConfigReader, request: ReadRequest) -> ReadRequest:
    """The request, with the old name ``T5WithLMHeadModel`` understood."""
    old = any(each.endswith("WithLMHeadModel") for each in reader.texts("architectures"))
    if old and request.task is Task.CAUSAL_LM:
        return replace(request, task=Task.SEQ2SEQ_LM)
    return request


def read_classifier(reader: ConfigReader) -> ClassifierSpec:
    """Dropout, a dense layer, tanh and dropout on the last end-of-sequence token (BART, T5)."""
    dropout = reader.number("classifier_dropout", "classif_dropout")
    return ClassifierSpec(
        pooling=Pooling.LAST, dense=Activation.TANH, first_dropout=dropout, dropout=dropout
    )


def read_stack(
    reader: ConfigReader, variation: Variation, name: str, num_layers: int, hidden_size: int
) -> StackSpec:
    """The encoder, or the decoder with its cross attention."""
    norm = NormSpec(kind=NormKind.RMS_T5)
    dropout = reader.number("dropout_rate")
    decoder = name == "decoder"
    first = read_layer(reader, _biases(variation, first=True), decoder=decoder)
    runs: tuple[LayerRun, ...] = (LayerRun(count=num_layers, layer=first),)
    if not variation.bias_per_layer:
        later = read_layer(reader, _biases(variation, first=False), decoder=decoder)
        runs = (LayerRun(count=1, layer=first),)
        if num_layers > 1:
            runs += (LayerRun(count=num_layers - 1, layer=later),)
    return StackSpec(
        name=name,
        runs=runs,
        embedding=(
            None
            if decoder
            else EmbeddingSpec(embedding_size=hidden_size, dropout=dropout, dropout_module=True)
        ),
        final_norm=norm,
        final_dropout=dropout,
    )


def _biases(variation: Variation, *, first: bool) -> tuple[PositionBias, PositionBias]:
    """Position biases of a layer's self-attention and of its cross attention."""
    if variation.bias_per_layer:
        return PositionBias.LEARNED, PositionBias.ZEROS
    if first:
        return PositionBias.FIRST_LEARNED, PositionBias.FIRST_ZEROS
    return PositionBias.EARLIER_LEARNED, PositionBias.EARLIER_ZEROS


def read_layer(
    reader: ConfigReader, biases: tuple[PositionBias, PositionBias], *, decoder: bool
) -> LayerSpec:
    """One layer of the encoder or of the decoder."""
    dropout = reader.number("dropout_rate")
    num_heads = reader.integer("num_heads")
    learned, zeros = biases
    cross = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=reader.integer("d_kv"),
        causal=False,
        position_bias=zeros,
        dropout=dropout,
        fp32_softmax=False,
    )
    attention = replace(
        cross,
        causal=decoder,
        position_bias=learned,
        relative_bias_buckets=reader.integer("relative_attention_num_buckets"),
    )
    return LayerSpec(
        attention=attention,
        cross_attention=cross if decoder else None,
        feed_forward=read_feed_forward(reader, dropout),
        norm=NormSpec(kind=NormKind.RMS_T5),
        dropout=dropout,
        half_clamp=HalfClamp.SUBLAYERS,
        own_modules=True,
        dropout_modules=True,
    )


def read_feed_forward(reader: ConfigReader, dropout: float) -> FeedForwardSpec:
    """``relu``, ``gated-gelu`` (with the tanh form) or any other ``[gated-]activation``."""
    key = "feed_forward_proj"
    projection = reader.text(key, default="relu")
    gate, _, name = projection.rpartition("-")
    if gate not in ("", "gated"):
        raise reader.fail(key, f"expected 'relu' or 'gated-gelu', got {projection!r}")
    if projection == "gated-gelu":
        name = Activation.GELU_NEW.value
    return FeedForwardSpec(
        intermediate_size=reader.integer("d_ff"),
        activation=named_activation(reader, key, reader.text("dense_act_fn", default=name)),
        gated=reader.flag("is_gated_act", default=gate == "gated"),
        activation_dropout=dropout,
        dropout_module=True,
        output_cast=True,
    )


_ACTIVATION_NAMES = {"swish": "silu", "gelu_python": "gelu"}
"""Other names of the same function (transformers' ACT2FN)."""


def named_activation(reader: ConfigReader, key: str, name: str) -> Activation:
    """An activation by transformers' name.

    Raises ``ConfigError`` for one that is not known.
    """
    known = {each.value: each for each in Activation}
    return known[reader.choice(key, _ACTIVATION_NAMES.get(name, name), known)]
