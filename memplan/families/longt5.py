"""LongT5: T5 with an encoder whose tokens see their neighbours, and maybe summaries of all blocks.

transformers 5.23, models/longt5/modeling_longt5.py. The class ties whatever the file says, as T5's does.
"""

from dataclasses import replace

from memplan.families import t5
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.model.attention import AttentionSpec, LocalBlocksSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import LayerRun, StackSpec
from memplan.model.spec import ModelSpec, Task, Tying

LOCAL = "local"
TRANSIENT_GLOBAL = "transient-global"


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of LongT5."""
    hidden_size, num_layers = reader.integer("d_model"), reader.layers("num_layers")
    num_decoder_layers = reader.layers("num_decoder_layers", default=num_layers)
    untied = reader.config.get("tie_word_embeddings") is False
    encoder = t5.read_stack(reader, "encoder", num_layers, hidden_size)
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=reject_task(reader, request, Task.SEQ2SEQ_LM, Task.BASE),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        context_length=reader.integer("n_positions", "max_position_embeddings", default=512),
        stacks=(
            _in_blocks(reader, encoder),
            _returning_weights(t5.read_stack(reader, "decoder", num_decoder_layers, hidden_size)),
        ),
        head=HeadSpec(tied=True, scaled=not untied),
        num_labels=request.labels(reader),
        tying=Tying.AMBIGUOUS if untied else Tying.CLEAR,
        checkpoint_dtype=checkpoint_dtype(reader),
        eager_attention_only=True,
        source=reader.source,
    )


def _in_blocks(reader: ConfigReader, stack: StackSpec) -> StackSpec:
    """The encoder with its attention replaced."""
    key = "encoder_attention_type"
    kind = reader.choice(key, reader.text(key), (LOCAL, TRANSIENT_GLOBAL))
    size = reader.integer("global_block_size") if kind == TRANSIENT_GLOBAL else 0
    radius = reader.integer("local_radius")

    def replaced(run: LayerRun) -> LayerRun:
        scores = run.layer.attention
        assert isinstance(scores, AttentionSpec)
        blocks = LocalBlocksSpec(scores=scores, radius=radius, global_block_size=size)
        return replace(run, layer=replace(run.layer, attention=blocks))

    return replace(stack, runs=tuple(replaced(run) for run in stack.runs))


def _returning_weights(stack: StackSpec) -> StackSpec:
    """The decoder, whose layers hand on their attention weights."""
    runs = tuple(replace(run, layer=replace(run.layer, returns_weights=True)) for run in stack.runs)
    return replace(stack, runs=runs)
