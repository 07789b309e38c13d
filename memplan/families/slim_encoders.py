"""DistilBERT and ALBERT: BERT with fewer layers, and with layers that share their weights."""

from dataclasses import replace

from memplan.families.encoders import (
    LAYER_NORM,
    TASKS,
    Variation,
    encoder_attention,
    encoder_embedding,
    encoder_head,
    encoder_model,
)
from memplan.families.llama import read_activation
from memplan.families.request import ReadRequest, reject_task
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import ClassifierSpec, HeadSpec
from memplan.model.layers import (
    EmbeddingSpec,
    LayerRun,
    LayerSpec,
    NormPlacement,
    StackSpec,
)
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.spec import ModelSpec


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of DistilBERT or ALBERT."""
    readers = {"distilbert": _distilbert, "albert": _albert}
    return readers[request.model_type](reader, request)


def _distilbert(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """DistilBERT: no token types, no pooler, names of its own."""
    hidden_size = reader.integer("dim")
    num_heads = reader.integer("n_heads")
    head_dim = reader.divide("dim", hidden_size, "n_heads", num_heads)
    act = read_activation(reader, "activation")
    dropout = reader.number("dropout")
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            query_bias=True,
            key_bias=True,
            value_bias=True,
            output_bias=True,
            causal=False,
            dropout=reader.number("attention_dropout"),
            fp32_softmax=False,
        ),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("hidden_dim"), activation=act, bias=True
        ),
        norm=LAYER_NORM,
        placement=NormPlacement.POST,
        dropout=dropout,
        feed_forward_dropout_only=True,
    )
    positions = reader.integer("max_position_embeddings")
    stack = StackSpec(
        name="encoder",
        runs=(LayerRun(count=reader.layers("n_layers"), layer=layer),),
        embedding=EmbeddingSpec(
            embedding_size=hidden_size,
            num_positions=positions,
            own_module=True,
            norm=LAYER_NORM,
            dropout=dropout,
        ),
        final_norm=None,
    )
    head = HeadSpec(
        tied=reader.flag("tie_word_embeddings", default=True),
        bias=True,
        transform=FeedForwardSpec(intermediate_size=hidden_size, activation=act),
        transform_norm=LAYER_NORM,
        classifier=ClassifierSpec(
            dense=Activation.RELU,
            dropout=reader.number("seq_classif_dropout"),
            token_dropout=dropout,
            span_dropout=reader.number("qa_dropout"),
        ),
    )
    return encoder_model(
        reader, request, stack,
        task=reject_task(reader, request, *TASKS), hidden_size=hidden_size, head=head,
        context_length=positions,
    )  # fmt: skip


def _albert(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """ALBERT: groups of layers that share their parameters, behind a projection."""
    key = "inner_group_num"
    if reader.integer(key) != 1:
        raise reader.fail(key, "only 1 layer a group is supported")
    variation = Variation(head_activation=None, classifier_dropout_key="classifier_dropout_prob")
    hidden_size = reader.integer("hidden_size")
    embedding_size = reader.integer("embedding_size")
    layer = LayerSpec(
        attention=encoder_attention(reader, variation, hidden_size),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size"),
            activation=read_activation(reader, "hidden_act"),
            bias=True,
        ),
        norm=LAYER_NORM,
        placement=NormPlacement.POST,
        dropout=reader.number("hidden_dropout_prob"),
        attention_dropout_only=True,
    )
    embedding = encoder_embedding(reader, variation, embedding_size)
    stack = StackSpec(
        name="encoder",
        runs=tuple(
            LayerRun(count=count, layer=layer, shared=True) for count in _group_sizes(reader)
        ),
        embedding=replace(embedding, projection_in_encoder=True),
        final_norm=None,
    )
    return encoder_model(
        reader, request, stack,
        task=reject_task(reader, request, *TASKS), hidden_size=hidden_size,
        head=encoder_head(reader, variation, embedding_size),
        context_length=reader.integer("max_position_embeddings"),
        recomputes=False,
    )  # fmt: skip


def _group_sizes(reader: ConfigReader) -> list[int]:
    """How many layers run with each group's parameters (``AlbertTransformer.forward``)."""
    num_layers = reader.layers("num_hidden_layers")
    num_groups = reader.integer("num_hidden_groups", maximum=num_layers)
    sizes = [0] * num_groups
    for index in range(num_layers):
        sizes[int(index / (num_layers / num_groups))] += 1
    return sizes
