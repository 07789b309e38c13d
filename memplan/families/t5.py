"""T5 and its kin: relative position biases, RMS norms, no other biases, a shared token table.

``T5Config`` (transformers 5.23) derives the feed-forward network from ``feed_forward_proj``, unless
the file also says ``dense_act_fn`` and ``is_gated_act``, and always ties the output matrix. Files
with ``tie_word_embeddings: false`` (version 1.1, flan, ByT5, mT5, UMT5) come with checkpoints that
hold an output matrix of their own, which transformers 4 trained apart.
"""

from memplan.families.llama import named_activation
from memplan.fast_dataclass import replace
from memplan.model.attention import AttentionSpec, PositionBias
from memplan.model.config import ConfigReader
from memplan.model.layers import EmbeddingSpec, HalfClamp, LayerRun, LayerSpec, StackSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec


def read_stack(reader: ConfigReader, name: str, num_layers: int, hidden_size: int) -> StackSpec:
    """The encoder, or the decoder with its cross attention."""
    norm = NormSpec(kind=NormKind.RMS_T5)
    dropout = reader.number("dropout_rate")
    decoder = name == "decoder"
    first = read_layer(reader, FIRST, decoder=decoder)
    runs: tuple[LayerRun, ...] = (LayerRun(count=1, layer=first),)
    if num_layers > 1:
        later = read_layer(reader, LATER, decoder=decoder)
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


FIRST = (PositionBias.FIRST_LEARNED, PositionBias.FIRST_ZEROS)
LATER = (PositionBias.EARLIER_LEARNED, PositionBias.EARLIER_ZEROS)
"""Biases of self-attention and of cross attention: the first layer makes them for all."""


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
