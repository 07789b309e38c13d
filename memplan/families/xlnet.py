"""XLNet: relative positions, tokens before sequences, norms behind each sum.

transformers 5.23, models/xlnet/modeling_xlnet.py. Classification is counted: it summarizes sequences in ways
of its own.
"""

from memplan.families import counted_encoders
from memplan.families.encoders import LAYER_NORM
from memplan.families.llama import read_activation
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.model.attention import RelativeSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerRun, LayerSpec, NormPlacement, StackSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import ParameterTable
from memplan.model.spec import ModelSpec, Task


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of XLNet."""
    task = reject_task(reader, request, *counted_encoders.FORMS["xlnet"].tasks)
    if task not in (Task.CAUSAL_LM, Task.BASE):
        return counted_encoders.read(reader, request)
    hidden, heads = reader.integer("d_model"), reader.integer("n_head")
    dropout = reader.number("dropout")
    layer = LayerSpec(
        attention=RelativeSpec(
            num_heads=heads,
            head_dim=reader.divide("d_model", hidden, "n_head", heads),
            dropout=dropout,
        ),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("d_inner"),
            activation=read_activation(reader, "ff_activation"),
            bias=True,
            activation_dropout=dropout,
            dropout_module=True,
        ),
        norm=LAYER_NORM,
        placement=NormPlacement.POST,
        dropout=dropout,
        dropout_modules=True,
    )
    stack = StackSpec(
        name="decoder",
        runs=(LayerRun(count=reader.layers("n_layer"), layer=layer),),
        embedding=EmbeddingSpec(embedding_size=hidden, dropout=dropout, dropout_module=True),
        final_norm=None,
        final_dropout=dropout,
        tokens_first=True,
    )
    table = ParameterTable()
    with table.block("mask.embed"):
        table.parameter("transformer", "mask_emb", 1, 1, hidden, unused=True)
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=task,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        context_length=reader.integer("max_position_embeddings", default=512),
        stacks=(stack,),
        head=HeadSpec(
            tied=reader.flag("tie_word_embeddings", default=True), bias=True, plain_loss=True
        ),
        num_labels=request.labels(reader),
        checkpoint_dtype=checkpoint_dtype(reader),
        recomputes=False,
        eager_attention_only=True,
        tables=table.blocks(),
        source=reader.source,
    )
