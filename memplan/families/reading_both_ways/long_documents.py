"""LED and BigBird-Pegasus: BART's layers for long documents, whose encoders attend to windows or blocks.

transformers 5.23, models/led, models/bigbird_pegasus. Layers that ``layerdrop`` may skip are counted as run. A
task whose class gives tokens global attention by itself is counted (``memplan.families.reading_both_ways.bart_variants``).
"""

from dataclasses import replace

from memplan.families.llama import join_runs
from memplan.families.reading_both_ways import bart, bart_variants
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.model.attention import (
    AttentionForm,
    AttentionSpec,
    BlockSparseSpec,
    QueryScaling,
    SlidingChunksSpec,
)
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import (
    EmbeddingSpec,
    LayerRun,
    LayerSpec,
    NormPlacement,
    StackSpec,
)
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task

TASKS = (Task.SEQ2SEQ_LM, Task.BASE)


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of LED or BigBird-Pegasus."""
    counted = bart_variants.VARIATIONS.get(request.model_type)
    others = () if counted is None else counted.tasks
    task = reject_task(reader, request, *TASKS, *others)
    if task not in TASKS:
        return bart_variants.read(reader, request)
    readers = {"led": _led, "bigbird_pegasus": _bigbird_pegasus}
    return readers[request.model_type](reader, request, task)


def _led(reader: ConfigReader, request: ReadRequest, task: Task) -> ModelSpec:
    tied = reader.flag("tie_word_embeddings", default=True)
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=task,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("d_model"),
        context_length=reader.integer("max_encoder_position_embeddings"),
        stacks=(_encoder(reader, tied=tied), _decoder(reader, tied=tied)),
        head=HeadSpec(tied=tied, logits_bias=True),
        num_labels=request.labels(reader),
        checkpoint_dtype=checkpoint_dtype(reader),
        eager_attention_only=True,
        source=reader.source,
    )


def _embedding(reader: ConfigReader, name: str, *, tied: bool) -> EmbeddingSpec:
    return EmbeddingSpec(
        embedding_size=reader.integer("d_model"),
        num_positions=reader.integer(f"max_{name}_position_embeddings"),
        own_table=not tied,
        norm=NormSpec(kind=NormKind.LAYER, bias=True),
        dropout=reader.number("dropout", default=bart.DROPOUT),
    )


def _encoder(reader: ConfigReader, *, tied: bool) -> StackSpec:
    """A window for each layer, to a multiple of whose widest the class pads sequences."""
    count = reader.layers("encoder_layers")
    windows = read_windows(reader, count)
    layer = bart.read_layer(reader, bart.Variation(), "encoder")
    heads, dropout = reader.integer("encoder_attention_heads"), reader.number("attention_dropout")
    layers = [
        replace(layer, attention=SlidingChunksSpec(num_heads=heads, window=window, dropout=dropout))
        for window in windows
    ]
    return StackSpec(
        name="encoder",
        runs=join_runs(layers),
        embedding=_embedding(reader, "encoder", tied=tied),
        final_norm=None,
        multiple_of=max(windows),
        spare_mask=True,
    )


def read_windows(reader: ConfigReader, count: int) -> list[int]:
    """``attention_window``: one for all layers, or one for each; all even."""
    key = "attention_window"
    listed = isinstance(reader.raw(key), list)
    windows = reader.integers(key) if listed else [reader.integer(key)] * count
    if len(windows) < count:
        raise reader.fail(key, f"names {len(windows)} layers of {count}")
    for window in windows:
        if window < 1 or window % 2:
            raise reader.fail(key, f"{window} is not an even number above 0")
    return windows[:count]


def _decoder(reader: ConfigReader, *, tied: bool) -> StackSpec:
    layer = _folded(bart.read_layer(reader, bart.Variation(), "decoder"))
    return StackSpec(
        name="decoder",
        runs=(LayerRun(count=reader.layers("decoder_layers"), layer=layer),),
        embedding=_embedding(reader, "decoder", tied=tied),
        final_norm=None,
    )


def _folded(layer: LayerSpec) -> LayerSpec:
    """Both attentions with the heads folded into the batch."""
    form, scaling = AttentionForm.FOLDED, QueryScaling.AT_ONCE
    attention, cross = layer.attention, layer.cross_attention
    assert isinstance(attention, AttentionSpec)
    assert cross is not None
    return replace(
        layer,
        attention=replace(attention, form=form, query_scaling=scaling),
        cross_attention=replace(cross, form=form, query_scaling=scaling),
    )


def _bigbird_pegasus(reader: ConfigReader, request: ReadRequest, task: Task) -> ModelSpec:
    """Pegasus's placement of norms, learned positions, and an encoder in BigBird's blocks."""
    variation = bart.Variation(
        placement=NormPlacement.PRE,
        embedding_norm=False,
        position_offset=0,
        batched_positions=False,
    )
    tied = reader.flag("tie_word_embeddings", default=True)
    encoder, decoder = (
        _biased(reader, bart.read_stack(reader, variation, name, tied=tied))
        for name in ("encoder", "decoder")
    )
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=task,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("d_model"),
        context_length=reader.integer("max_position_embeddings"),
        stacks=(_in_blocks(reader, encoder), decoder),
        head=HeadSpec(tied=tied, logits_bias=True),
        num_labels=request.labels(reader),
        checkpoint_dtype=checkpoint_dtype(reader),
        eager_attention_only=True,
        source=reader.source,
    )


def _biased(reader: ConfigReader, stack: StackSpec) -> StackSpec:
    """Biases of attention as ``use_bias`` says; tokens are scaled as ``scale_embedding`` does."""
    bias = reader.flag("use_bias")
    return _with_biases(stack, bias=bias)


def _with_biases(stack: StackSpec, *, bias: bool) -> StackSpec:
    def biased(spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, query_bias=bias, key_bias=bias, value_bias=bias, output_bias=bias)

    layer = stack.runs[0].layer
    assert isinstance(layer.attention, AttentionSpec)
    cross = layer.cross_attention
    layer = replace(
        layer,
        attention=biased(layer.attention),
        cross_attention=None if cross is None else biased(cross),
    )
    return replace(stack, runs=(replace(stack.runs[0], layer=layer),))


def _in_blocks(reader: ConfigReader, stack: StackSpec) -> StackSpec:
    """The encoder in blocks, or with all pairs of tokens as ``attention_type`` says: BigBird's own function."""
    key, run = "attention_type", stack.runs[0]
    kind = reader.choice(key, reader.text(key), ("block_sparse", "original_full"))
    assert isinstance(run.layer.attention, AttentionSpec)
    full = replace(
        run.layer.attention,
        form=AttentionForm.PLAIN_SCORES, output_apart=True, hands_on_weights=False,
    )  # fmt: skip
    if kind == "original_full":
        run = replace(run, layer=replace(run.layer, attention=full))
        return replace(stack, runs=(run,), spare_mask=True)
    blocks = BlockSparseSpec(
        full=full,
        block_size=reader.integer("block_size"),
        num_random_blocks=reader.integer("num_random_blocks"),
        integer_masks=True,
    )
    return replace(stack, runs=(replace(run, layer=replace(run.layer, attention=blocks)),))
