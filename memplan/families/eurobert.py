"""EuroBERT: Llama's layers in an encoder."""

from dataclasses import replace

from memplan.families.encoders import (
    TASKS,
    encoder_model,
)
from memplan.families.llama import Variation as DecoderVariation
from memplan.families.llama import read_activation, read_attention
from memplan.families.request import ReadRequest, reject_task
from memplan.model.config import ConfigReader
from memplan.model.heads import ClassifierSpec, HeadSpec, Pooling
from memplan.model.layers import (
    EmbeddingSpec,
    LayerRun,
    LayerSpec,
    StackSpec,
)
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """EuroBERT: Llama's layers, looking both ways."""
    hidden_size = reader.integer("hidden_size")
    norm = NormSpec(kind=NormKind.RMS)
    attention = read_attention(reader, DecoderVariation(), hidden_size)
    bias = reader.flag("mlp_bias")
    layer = LayerSpec(
        attention=replace(attention, causal=False),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size"),
            activation=read_activation(reader, "hidden_act"),
            gated=True,
            bias=bias,
        ),
        norm=norm,
    )
    stack = StackSpec(
        name="encoder",
        runs=(LayerRun(count=reader.layers("num_hidden_layers"), layer=layer),),
        embedding=EmbeddingSpec(embedding_size=hidden_size),
        final_norm=norm,
    )
    pooling = reader.choice("classifier_pooling", reader.text("classifier_pooling"), POOLINGS)
    head = HeadSpec(
        tied=reader.flag("tie_word_embeddings"),
        bias=bias,
        loss_upcast=True,
        classifier=ClassifierSpec(pooling=POOLINGS[pooling], dense=Activation.GELU),
    )
    tasks = tuple(task for task in TASKS if task is not Task.QUESTION_ANSWERING)
    return encoder_model(
        reader, request, stack,
        task=reject_task(reader, request, *tasks), hidden_size=hidden_size, head=head,
        context_length=reader.integer("max_position_embeddings"),
    )  # fmt: skip


POOLINGS = {"bos": Pooling.FIRST, "mean": Pooling.MEAN, "late": Pooling.MEAN_LOGITS}
"""EuroBERT's names."""
