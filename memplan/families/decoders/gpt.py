"""Layers of GPT-2 and Persimmon as others have them inside: Decision Transformer's and Fuyu's.

Both types themselves are classes (``memplan.classes.older.gpt2``, ``memplan.classes.gpt_neox``).
"""

from memplan.families.llama import read_activation, rotated_dim
from memplan.model.attention import AttentionSpec, Projection, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.layers import LayerSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec

LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)


def gpt2_layer(reader: ConfigReader, hidden_size: int) -> LayerSpec:
    """One of GPT-2's."""
    return LayerSpec(
        attention=_attention(
            reader, hidden_size, Projection.FUSED_SPLIT, dropout=reader.number("attn_pdrop")
        ),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("n_inner", default=4 * hidden_size),
            activation=read_activation(reader, "activation_function"),
            gated=False,
            bias=True,
        ),
        norm=LAYER_NORM,
        dropout=reader.number("resid_pdrop"),
        dropout_modules=True,
        dropout_inside=True,
        names_attended=True,
    )


def persimmon_layer(reader: ConfigReader, hidden_size: int) -> LayerSpec:
    """One of Persimmon's."""
    return LayerSpec(
        attention=_attention(
            reader, hidden_size, Projection.FUSED_SELECTED,
            dropout=reader.number("attention_dropout"),
        ),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size", default=4 * hidden_size),
            activation=read_activation(reader, "hidden_act"),
            gated=False,
            bias=True,
        ),
        norm=LAYER_NORM,
        dropout=reader.number("hidden_dropout"),
        feed_forward_dropout_only=True,
        dropout_modules=True,
    )  # fmt: skip


def _attention(
    reader: ConfigReader, hidden_size: int, projection: Projection, *, dropout: float
) -> AttentionSpec:
    heads = reader.integer("num_attention_heads")
    head_dim = reader.divide("hidden_size", hidden_size, "num_attention_heads", heads)
    turned = projection is Projection.FUSED_SELECTED
    normed = turned and reader.flag("qk_layernorm")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        projection=projection,
        query_bias=True,
        key_bias=True,
        value_bias=True,
        output_bias=True,
        rotary=_half_turned(reader, head_dim) if turned else None,
        query_key_norm=LAYER_NORM if normed else None,
        query_viewed_last=not turned,
        fp32_softmax=turned,
        weights_like_values=not turned,
        upcast_reordered=not turned and reader.flag("reorder_and_upcast_attn"),
        dropout=dropout,
    )


def _half_turned(reader: ConfigReader, head_dim: int) -> RotarySpec:
    return RotarySpec(dim=rotated_dim(reader, head_dim, 0.5), joined=True, names_parts=True)
