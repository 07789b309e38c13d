"""BART and its kin: layer norms, biases everywhere, position tables, a buffer on the logits.

What sets the types apart is a row of ``VARIATIONS``. Layers that ``layerdrop`` may skip are
counted as run.
"""

from dataclasses import replace

from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.families.t5 import named_activation, read_classifier
from memplan.fast_dataclass import dataclass
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
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
from memplan.model.spec import ModelSpec, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """How one type differs from BART, where its config does not say so."""

    placement: NormPlacement = NormPlacement.POST
    """``PRE`` comes with a final norm on each stack, and an encoder that clamps fp16."""
    embedding_norm: bool = True
    position_offset: int = 2
    """Rows of the position table beside the positions."""
    position_buffer: bool = False
    fixed_positions: bool = False
    batched_positions: bool = True
    """The encoder looks positions up for every sequence of the batch; so does the decoder in a buffer."""
    logits_bias: bool = True
    classifies: bool = False
    """There is a class for sequence classification."""
    num_labels: int = 2


_BART = Variation(classifies=True)

VARIATIONS: dict[str, Variation] = {
    "bart": replace(_BART, num_labels=3),
    "plbart": _BART,
    "mbart": replace(_BART, placement=NormPlacement.PRE),
    "pegasus": Variation(
        placement=NormPlacement.PRE,
        embedding_norm=False,
        position_offset=0,
        fixed_positions=True,
        batched_positions=False,
    ),
    "marian": Variation(
        embedding_norm=False, position_offset=0, fixed_positions=True, batched_positions=False
    ),
    "blenderbot": Variation(
        placement=NormPlacement.PRE,
        embedding_norm=False,
        position_offset=0,
        batched_positions=False,
    ),
    "blenderbot-small": Variation(position_offset=0, batched_positions=False),
    "m2m_100": Variation(
        placement=NormPlacement.PRE,
        embedding_norm=False,
        position_buffer=True,
        logits_bias=False,
    ),
}

DROPOUT = 0.1
"""What every class of this module fills in."""

SHARED_KEY = "share_encoder_decoder_embeddings"
"""Marian's switch between one token table and two."""

_NORM = NormSpec(kind=NormKind.LAYER, bias=True)


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``VARIATIONS``."""
    variation = VARIATIONS[request.model_type]
    if not reader.flag(SHARED_KEY, default=True):
        problem = "false is not supported: the stacks would have a vocabulary each"
        raise reader.fail(SHARED_KEY, problem)
    tasks: tuple[Task, ...] = (Task.SEQ2SEQ_LM, Task.BASE)
    if variation.classifies:
        tasks += (Task.SEQUENCE_CLASSIFICATION,)
    tied = reader.flag("tie_word_embeddings", default=True)
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=reject_task(reader, request, *tasks),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("d_model"),
        context_length=reader.integer("max_position_embeddings"),
        stacks=(
            read_stack(reader, variation, "encoder", tied=tied),
            read_stack(reader, variation, "decoder", tied=tied),
        ),
        head=HeadSpec(
            tied=tied, logits_bias=variation.logits_bias, classifier=read_classifier(reader)
        ),
        num_labels=num_labels(reader, request, variation),
        checkpoint_dtype=checkpoint_dtype(reader),
        source=reader.source,
    )


def num_labels(reader: ConfigReader, request: ReadRequest, variation: Variation) -> int:
    """Classes: asked for, in the config, or the class's own default (BART has 3)."""
    said = request.num_labels is not None or any(
        reader.config.get(key) for key in ("id2label", "num_labels")
    )
    return request.labels(reader) if said else variation.num_labels


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
        batched_positions=(
            variation.batched_positions and (name == "encoder" or variation.position_buffer)
        ),
        fixed_positions=variation.fixed_positions,
        position_buffer=variation.position_buffer,
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
