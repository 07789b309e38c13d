"""BigBird: BERT as ``memplan.families.reading_both_ways.encoders`` reads it, in blocks or with all pairs of tokens.

transformers 5.23, models/big_bird. Tasks that BERT's heads do not cover are counted, as ``counted_encoders`` does.
"""

from collections.abc import Callable
from dataclasses import replace

from memplan.families.reading_both_ways import counted_encoders
from memplan.families.reading_both_ways.encoders import Variation, read_encoder
from memplan.families.request import ReadRequest, reject_task
from memplan.model.attention import AttentionForm, AttentionSpec, BlockSparseSpec
from memplan.model.config import ConfigReader
from memplan.model.layers import (
    LayerSpec,
)
from memplan.model.networks import Activation
from memplan.model.spec import ModelSpec, Task

VARIATION = Variation(
    head_activation=None,
    pooler_tasks=tuple(task for task in Task if task is not Task.QUESTION_ANSWERING),
    classifier_dense=Activation.GELU,
    classifier_first_dropout=True,
    tasks=(
        Task.MASKED_LM,
        Task.BASE,
        Task.SEQUENCE_CLASSIFICATION,
        Task.TOKEN_CLASSIFICATION,
        Task.PRETRAINING,
    ),
)


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of BigBird."""
    tasks = counted_encoders.FORMS[request.model_type].tasks
    if reject_task(reader, request, *tasks) not in VARIATION.tasks:
        return counted_encoders.read(reader, request)
    return _big_bird(reader, read_encoder(reader, request, VARIATION))


def with_layers(model: ModelSpec, adjusted: Callable[[LayerSpec], LayerSpec]) -> ModelSpec:
    """The same model with each of its layers replaced."""
    stack = model.stacks[0]
    runs = tuple(replace(run, layer=adjusted(run.layer)) for run in stack.runs)
    return replace(model, stacks=(replace(stack, runs=runs),))


def with_plain_scores(model: ModelSpec) -> ModelSpec:
    """Attention that the class writes out itself, always with a mask of all pairs of tokens."""

    def adjusted(layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        assert isinstance(attention, AttentionSpec)
        return replace(layer, attention=replace(attention, form=AttentionForm.PLAIN_SCORES))

    model = with_layers(model, adjusted)
    stack = replace(model.stacks[0], spare_mask=True)
    return replace(model, stacks=(stack,), eager_attention_only=True)


def _big_bird(reader: ConfigReader, model: ModelSpec) -> ModelSpec:
    """Blocks, or all pairs of tokens as ``attention_type`` says; ``use_bias`` is not the output's."""
    key, bias = "attention_type", reader.flag("use_bias")
    kind = reader.choice(key, reader.text(key), ("block_sparse", "original_full"))

    def biased(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.attention, AttentionSpec)
        attention = replace(
            layer.attention,
            query_bias=bias,
            key_bias=bias,
            value_bias=bias,
            hands_on_weights=False,
        )
        return replace(layer, attention=attention)

    model = with_plain_scores(with_layers(model, biased))
    stack = model.stacks[0]
    assert stack.embedding is not None
    embedding = replace(stack.embedding, positions_in_place=True, dropout_first=True)
    model = replace(model, stacks=(replace(stack, embedding=embedding),))
    if kind == "original_full":
        return model

    def sparse(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.attention, AttentionSpec)
        blocks = BlockSparseSpec(
            full=layer.attention,
            block_size=reader.integer("block_size"),
            num_random_blocks=reader.integer("num_random_blocks"),
        )
        return replace(layer, attention=blocks)

    model = with_layers(model, sparse)
    stack = replace(model.stacks[0], spare_mask=False)
    return replace(model, stacks=(stack,))
