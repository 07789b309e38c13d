"""Funnel Transformer: an encoder that halves its sequence block by block, and a decoder on all tokens.

With queries alone pooled and relative positions by shifting, as all that are published have; another
``attention_type``, pooled keys, and classes of whole sequences, which have no decoder, are counted.
"""

from memplan.families.llama import read_activation
from memplan.families.reading_both_ways import counted_encoders
from memplan.families.reading_both_ways.encoders import LAYER_NORM, encoder_model
from memplan.families.request import ReadRequest, reject_task
from memplan.model.attention import AttentionForm, AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.funnel import FunnelSpec
from memplan.model.heads import ClassifierSpec, HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerRun, LayerSpec, NormPlacement, StackSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.spec import ModelSpec, Task

TASKS = (
    Task.MASKED_LM,
    Task.BASE,
    Task.TOKEN_CLASSIFICATION,
    Task.QUESTION_ANSWERING,
    Task.PRETRAINING,
)
"""Those whose operations are written down."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a Funnel Transformer's config."""
    task = reject_task(reader, request, *counted_encoders.FORMS["funnel"].tasks)
    shifted = reader.text("attention_type", default="relative_shift") == "relative_shift"
    average = reader.text("pooling_type", default="mean") == "mean"
    if task not in TASKS or not (shifted and average and reader.flag("pool_q_only", default=True)):
        return counted_encoders.read(reader, request)
    hidden_size = reader.integer("d_model")
    spec = _funnel(reader)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_heads,
            head_dim=spec.head_dim,
            causal=False,
            form=AttentionForm.PLAIN_SCORES,
            dropout=spec.attention_dropout,
        ),
        feed_forward=spec.network,
        norm=LAYER_NORM,
        placement=NormPlacement.POST,
        dropout=spec.dropout,
    )
    stack = StackSpec(
        name="encoder",
        runs=(LayerRun(count=sum(spec.block_sizes) + spec.decoder_layers, layer=layer),),
        embedding=EmbeddingSpec(
            embedding_size=hidden_size,
            own_module=True,
            norm=LAYER_NORM,
            dropout=spec.dropout,
            dropout_module=True,
        ),
        final_norm=None,
        funnel=spec,
    )
    head = HeadSpec(
        tied=reader.flag("tie_word_embeddings", default=True),
        bias=True,
        spare_bias=False,
        discriminator=spec.network.activation if task is Task.PRETRAINING else None,
        classifier=ClassifierSpec(token_dropout=spec.dropout),
    )
    return encoder_model(
        reader, request, stack,
        task=task, hidden_size=hidden_size, head=head,
        context_length=reader.integer("max_position_embeddings", default=512),
        recomputes=False, eager_attention_only=True,
    )  # fmt: skip


def _funnel(reader: ConfigReader) -> FunnelSpec:
    sizes = reader.integers("block_sizes", minimum=1)
    if not sizes:
        key = "block_sizes"
        raise reader.fail(key, "is empty; name at least one block's number of layers")
    repeats = reader.integers("block_repeats", minimum=1) or [1] * len(sizes)
    if len(repeats) != len(sizes):
        key = "block_repeats"
        raise reader.fail(key, f"names {len(repeats)} blocks of {len(sizes)}")
    return FunnelSpec(
        block_sizes=tuple(sizes),
        block_repeats=tuple(repeats),
        decoder_layers=reader.integer("num_decoder_layers", minimum=0),
        num_heads=reader.integer("n_head"),
        head_dim=reader.integer("d_head"),
        network=FeedForwardSpec(
            intermediate_size=reader.integer("d_inner"),
            activation=read_activation(reader, "hidden_act"),
            bias=True,
            activation_dropout=reader.number("activation_dropout"),
        ),
        norm=LAYER_NORM,
        keeps_first=reader.flag("separate_cls", default=True),
        truncates=reader.flag("truncate_seq", default=True),
        dropout=reader.number("hidden_dropout"),
        attention_dropout=reader.number("attention_dropout"),
    )
