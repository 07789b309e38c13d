"""FSMT: an older translation model of two vocabularies, whose tokens come before sequences inside.

transformers 5.23, models/fsmt/modeling_fsmt.py. The class cannot checkpoint. Layers that ``layerdrop`` may
skip are counted as run.
"""

from dataclasses import replace

from memplan.families import bart, bart_variants
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.model.attention import AttentionForm, AttentionSpec, QueryScaling
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerRun, LayerSpec, StackSpec
from memplan.model.spec import ModelSpec, Task


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of FSMT."""
    task = reject_task(reader, request, Task.SEQ2SEQ_LM, Task.BASE)
    if task is Task.BASE:
        return bart_variants.read(reader, request)
    tied = reader.flag("tie_word_embeddings", default=True)
    if tied:
        bart_variants.require_equal(reader, "src_vocab_size", "tgt_vocab_size")
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=task,
        vocab_size=reader.integer("tgt_vocab_size"),
        hidden_size=reader.integer("d_model"),
        context_length=reader.integer("max_position_embeddings"),
        stacks=(_stack(reader, "encoder", tied=tied), _stack(reader, "decoder", tied=tied)),
        head=HeadSpec(tied=tied, of_base=True),
        num_labels=request.labels(reader),
        checkpoint_dtype=checkpoint_dtype(reader),
        recomputes=False,
        eager_attention_only=True,
        source=reader.source,
    )


def _stack(reader: ConfigReader, name: str, *, tied: bool) -> StackSpec:
    layer = bart.read_layer(reader, bart.Variation(), name)
    count = reader.layers(f"{name}_layers")
    runs: tuple[LayerRun, ...] = (
        LayerRun(count=1, layer=_folded(layer, AttentionForm.FOLDED_COPIES)),
    )
    if count > 1:
        runs += (LayerRun(count=count - 1, layer=_folded(layer, AttentionForm.FOLDED_VIEWS)),)
    skipped = reader.integer("pad_token_id", default=1, minimum=0) + 1
    vocabulary = "src_vocab_size" if name == "encoder" else "tgt_vocab_size"
    return StackSpec(
        name=name,
        runs=runs,
        embedding=EmbeddingSpec(
            embedding_size=reader.integer("d_model"),
            num_positions=reader.integer("max_position_embeddings") + skipped,
            batched_positions=True,
            num_rows=0 if tied else reader.integer(vocabulary),
            dropout=reader.number("dropout", default=bart.DROPOUT),
            scaled=True,
        ),
        final_norm=None,
        tokens_first=True,
    )


def _folded(layer: LayerSpec, form: AttentionForm) -> LayerSpec:
    """Heads that are views of the projections; queries are scaled at once."""
    attention, cross = layer.attention, layer.cross_attention
    assert isinstance(attention, AttentionSpec)
    scaling = QueryScaling.AT_ONCE
    if cross is not None:
        cross = replace(cross, form=AttentionForm.FOLDED_VIEWS, query_scaling=scaling)
    return replace(
        layer,
        attention=replace(attention, form=form, query_scaling=scaling),
        cross_attention=cross,
    )
