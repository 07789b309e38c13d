"""BART and its kin: layer norms, biases everywhere, position tables, a buffer on the logits.

What sets the types apart is a row of ``VARIATIONS``. Layers that ``layerdrop`` may skip are
counted as run.
"""

from dataclasses import replace

from memplan.families.llama import named_activation
from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.layers import (
    EmbeddingSpec,
    HalfClamp,
    LayerRun,
    LayerSpec,
    NormPlacement,
    StackSpec,
)
from memplan.model.networks import FeedForwardSpec, NetworkPlace
from memplan.model.norms import NormKind, NormSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """How one type differs from BART, where its config does not say so."""

    placement: NormPlacement = NormPlacement.POST
    """``PRE`` comes with a final norm on each stack, and an encoder that clamps fp16."""
    embedding_norm: bool = True
    position_offset: int = 2
    """Rows of the position table beside the positions."""
    batched_positions: bool = True
    """The encoder looks positions up for every sequence of the batch."""


DROPOUT = 0.1
"""What every class of this module fills in."""

_NORM = NormSpec(kind=NormKind.LAYER, bias=True)


def read_stack(reader: ConfigReader, variation: Variation, name: str, *, tied: bool) -> StackSpec:
    """The encoder, or the decoder with its cross attention."""
    return StackSpec(
        name=name,
        runs=(
            LayerRun(
                count=reader.layers(f"{name}_layers"), layer=read_layer(reader, variation, name)
            ),
        ),
        embedding=read_embedding(reader, variation, name, tied=tied),
        final_norm=_NORM if variation.placement is NormPlacement.PRE else None,
        padded_mask=name == "decoder",
    )


def read_embedding(
    reader: ConfigReader, variation: Variation, name: str, *, tied: bool
) -> EmbeddingSpec:
    """Scaled tokens and positions; without tying, each stack has a token table too."""
    return EmbeddingSpec(
        embedding_size=reader.integer("d_model"),
        num_positions=reader.integer("max_position_embeddings") + variation.position_offset,
        batched_positions=variation.batched_positions and name == "encoder",
        own_table=not tied,
        norm=_NORM if variation.embedding_norm else None,
        dropout=reader.number("dropout", default=DROPOUT),
        scaled=True,
    )


def read_layer(reader: ConfigReader, variation: Variation, name: str) -> LayerSpec:
    """One layer; heads and feed-forward size are each stack's own."""
    hidden_size, heads_key = reader.integer("d_model"), f"{name}_attention_heads"
    num_heads = reader.integer(heads_key)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=reader.divide("d_model", hidden_size, heads_key, num_heads),
        query_bias=True,
        key_bias=True,
        value_bias=True,
        output_bias=True,
        causal=name == "decoder",
        dropout=reader.number("attention_dropout"),
        fp32_softmax=False,
    )
    clamps = variation.placement is NormPlacement.PRE and name == "encoder"
    return LayerSpec(
        half_clamp=HalfClamp.LAYER if clamps else HalfClamp.NEVER,
        attention=attention,
        cross_attention=replace(attention, causal=False) if name == "decoder" else None,
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer(f"{name}_ffn_dim"),
            activation=named_activation(
                reader, "activation_function", reader.text("activation_function", default="gelu")
            ),
            bias=True,
            activation_dropout=reader.number("activation_dropout"),
            place=NetworkPlace.NESTED,
        ),
        norm=_NORM,
        placement=variation.placement,
        dropout=reader.number("dropout", default=DROPOUT),
    )
