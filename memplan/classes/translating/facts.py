"""What others read of a model of two stacks that is written as a class."""

from itertools import groupby

from memplan.classes.blueprint import blueprint_from
from memplan.classes.translating.stacks import Stack, StackLayer, TwoStacks
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import LayerRun, StackSpec
from memplan.model.spec import ModelSpec


def read_two_stacks(base: TwoStacks, reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """The facts of an encoder-decoder, and the class itself.

    Raises ``ConfigError`` for a config that no such class can be made from.
    """
    task = reject_task(reader, base.understood(reader, request), *base.tasks)
    table = base.vocabulary
    model = ModelSpec(
        name=request.name,
        family=request.model_type,
        task=task,
        vocab_size=table.weight.shape[0],
        hidden_size=table.width,
        context_length=reader.integer(*base.context_keys, default=base.default_context),
        stacks=(_stack(base.encoder), _stack(base.decoder)),
        head=HeadSpec(tied=base.is_tied, scaled=base.scales_output),
        num_labels=_num_labels(base, reader, request),
        tying=base.tying,
        checkpoint_dtype=checkpoint_dtype(reader),
        eager_attention_only=base.eager_only,
        recomputes=base.recomputes,
        activations_left_out=f"activations of {request.model_type}" * base.tasks[task].is_counted,
        blueprint=blueprint_from(reader, request.model_type),
        source=reader.source,
    )
    base.tasks[task](reader, model, type(base))  # it refuses what its head cannot be made from
    return model


def _num_labels(base: TwoStacks, reader: ConfigReader, request: ReadRequest) -> int:
    """Classes: asked for, in the config, or the class's own default (BART has 3)."""
    said = request.num_labels is not None or any(
        reader.config.get(key) for key in ("id2label", "num_labels")
    )
    return request.labels(reader) if said else base.default_labels


def _stack(stack: Stack) -> StackSpec:
    layers = stack.layer_list
    runs = []
    for kind, group in groupby(layers.kinds):
        layer = layers.made[kind]
        assert isinstance(layer, StackLayer)
        runs.append(LayerRun(count=len(list(group)), layer=layer.facts()))
    return StackSpec(
        name=stack.name, runs=tuple(runs), embedding=stack.embedding_facts(),
        final_norm=stack.norm_facts(),
    )  # fmt: skip
