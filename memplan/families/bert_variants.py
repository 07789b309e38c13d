"""MPNet and Longformer: RoBERTa as ``memplan.families.encoders`` reads it, with its attention replaced."""

from collections.abc import Callable
from dataclasses import replace

from memplan.families import counted_encoders
from memplan.families.encoders import ROBERTA, Variation, read_encoder
from memplan.families.llama import join_runs
from memplan.families.request import ReadRequest, reject_task
from memplan.model.attention import AttentionForm, AttentionSpec, PositionBias, SlidingChunksSpec
from memplan.model.config import ConfigReader
from memplan.model.layers import EmbeddingSpec, LayerRun
from memplan.model.networks import Activation
from memplan.model.spec import ModelSpec, Task

VARIATIONS: dict[str, Variation] = {
    "mpnet": replace(ROBERTA, classifier_dropout_key="hidden_dropout_prob", names_weights=False),
    "longformer": replace(
        ROBERTA,
        tasks=(Task.MASKED_LM, Task.BASE, Task.TOKEN_CLASSIFICATION),
        head_activation=Activation.GELU,
    ),
}


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of any type in ``VARIATIONS``."""
    if request.model_type == "longformer" and not _attends_locally(reader, request):
        return counted_encoders.read(reader, request)
    model = read_encoder(reader, request, VARIATIONS[request.model_type])
    return ADJUSTMENTS[request.model_type](reader, model)


def _with_embedding(model: ModelSpec, embedding: EmbeddingSpec) -> ModelSpec:
    return replace(model, stacks=(replace(model.stacks[0], embedding=embedding),))


def _embedding(model: ModelSpec) -> EmbeddingSpec:
    return model.stacks[0].embedding or EmbeddingSpec(embedding_size=model.hidden_size)


def _plain_scores(
    model: ModelSpec,
    form: AttentionForm,
    *,
    bias: PositionBias = PositionBias.NONE,
    buckets: int = 0,
) -> ModelSpec:
    """Attention written out by the class; it has no other, whatever is asked for."""

    def adjusted(run: LayerRun) -> LayerRun:
        attention = run.layer.attention
        if not isinstance(attention, AttentionSpec):
            return run
        plain = replace(
            attention,
            form=form,
            position_bias=bias,
            relative_bias_buckets=buckets,
        )
        return replace(run, layer=replace(run.layer, attention=plain))

    stack = model.stacks[0]
    runs = tuple(adjusted(run) for run in stack.runs)
    return replace(model, stacks=(replace(stack, runs=runs),), eager_attention_only=True)


def _mpnet(reader: ConfigReader, model: ModelSpec) -> ModelSpec:
    """One table of relative positions for all layers, no token types, and no checkpointing.

    The module that attends projects the output too.
    """
    buckets = reader.integer("relative_attention_num_buckets")
    form = AttentionForm.PLAIN_SCORES_PROJECTED
    model = _plain_scores(model, form, bias=PositionBias.STACK, buckets=buckets)
    embedding = replace(_embedding(model), num_token_types=0)
    return replace(_with_embedding(model, embedding), recomputes=False)


def _attends_locally(reader: ConfigReader, request: ReadRequest) -> bool:
    """Whether Longformer's class for the task gives no token global attention by itself."""
    task = reject_task(reader, request, *counted_encoders.FORMS["longformer"].tasks)
    return task in VARIATIONS["longformer"].tasks


def _longformer(reader: ConfigReader, model: ModelSpec) -> ModelSpec:
    """A window for each layer, to a multiple of whose widest the class pads sequences."""
    key, stack = "attention_window", model.stacks[0]
    layer, count = stack.runs[0].layer, stack.num_layers
    listed = isinstance(reader.raw(key), list)
    windows = reader.integers(key) if listed else [reader.integer(key)] * count
    if len(windows) < count:
        raise reader.fail(key, f"names {len(windows)} layers of {count}")
    for window in windows:
        if window < 1 or window % 2:
            raise reader.fail(key, f"{window} is not an even number above 0")
    heads = reader.integer("num_attention_heads")
    dropout = reader.number("attention_probs_dropout_prob")
    layers = [
        replace(layer, attention=SlidingChunksSpec(num_heads=heads, window=window, dropout=dropout))
        for window in windows[:count]
    ]
    stack = replace(
        stack, runs=join_runs(layers), multiple_of=max(windows[:count]), spare_mask=True
    )
    return replace(model, stacks=(stack,), eager_attention_only=True)


ADJUSTMENTS: dict[str, Callable[[ConfigReader, ModelSpec], ModelSpec]] = {
    "mpnet": _mpnet,
    "longformer": _longformer,
}
"""What is replaced in each type."""
