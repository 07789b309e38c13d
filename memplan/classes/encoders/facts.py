"""What others read of an encoder that is written as a class."""

from collections.abc import Iterator
from itertools import groupby

from memplan.classes.blueprint import blueprint_from
from memplan.classes.encoders.base import Encoder, EncoderLayer
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.graph.modules.layer_list import numbered
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerRun, StackSpec
from memplan.model.spec import ModelSpec


def read_encoder(base: Encoder, reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """The facts of an encoder, and the class itself.

    Raises ``ConfigError`` for a config that no such class can be made from.
    """
    task = reject_task(reader, request, *base.tasks)
    tied = reader.flag("tie_word_embeddings", default=base.ties) and base.ties_output
    model = ModelSpec(
        name=request.name,
        family=request.model_type,
        task=task,
        vocab_size=base.token_table.weight.shape[0],
        hidden_size=base.hidden_size(reader),
        context_length=base.context_length(reader),
        stacks=(_stack(base),),
        head=HeadSpec(tied=tied, loss_upcast=base.tasks[task].upcasts),
        num_labels=base.tasks[task].outputs or request.labels(reader),
        checkpoint_dtype=checkpoint_dtype(reader),
        recomputes=base.recomputes,
        eager_attention_only=base.eager_only,
        activations_left_out=f"activations of {request.model_type}" * base.tasks[task].is_counted,
        blueprint=blueprint_from(reader, request.model_type),
        source=reader.source,
    )
    base.tasks[task](reader, model, type(base))  # it refuses what its head cannot be made from
    return model


def _stack(base: Encoder) -> StackSpec:
    return StackSpec(
        name="encoder",
        runs=tuple(_runs(base)),
        embedding=EmbeddingSpec(
            embedding_size=base.token_table.width,
            num_positions=base.num_positions,
            num_regions=base.num_regions,
            own_module=True,
        ),
        final_norm=base.last_norm(),
    )


def _runs(base: Encoder) -> Iterator[LayerRun]:
    for layers in numbered(base):
        for kind, group in groupby(layers.kinds):
            layer = layers.made[kind]
            assert isinstance(layer, EncoderLayer)
            yield LayerRun(count=len(list(group)), layer=layer.facts(), shared=layers.shared)
