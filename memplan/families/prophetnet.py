"""ProphetNet: BART's layers in other words, and a decoder that predicts several tokens ahead.

transformers 5.23, models/prophetnet/modeling_prophetnet.py. The decoder alone, one without cross attention
and label smoothing are counted (``memplan.families.bart_variants``).
"""

from memplan.families import bart_variants
from memplan.families.llama import named_activation
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.model.attention import AttentionForm, AttentionSpec, FutureTokensSpec, QueryScaling
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerRun, LayerSpec, NormPlacement, StackSpec
from memplan.model.networks import FeedForwardSpec, NetworkPlace
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task

DROPOUT = 0.1

_NORM = NormSpec(kind=NormKind.LAYER, bias=True)


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of ProphetNet."""
    if _is_counted(reader, request):
        return bart_variants.read(reader, request)
    tied = reader.flag("tie_word_embeddings", default=True)
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=reject_task(reader, request, Task.SEQ2SEQ_LM, Task.BASE),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        context_length=reader.integer("max_position_embeddings"),
        stacks=(_stack(reader, "encoder", tied=tied), _stack(reader, "decoder", tied=tied)),
        head=HeadSpec(tied=tied),
        num_labels=request.labels(reader),
        checkpoint_dtype=checkpoint_dtype(reader),
        eager_attention_only=True,
        source=reader.source,
    )


def _is_counted(reader: ConfigReader, request: ReadRequest) -> bool:
    alone = request.task is None and bart_variants.names_decoder(reader)
    smoothed = reader.number("eps", default=0.0) > 0.0
    return alone or smoothed or not reader.flag("add_cross_attention", default=True)


def _stack(reader: ConfigReader, name: str, *, tied: bool) -> StackSpec:
    layer = LayerRun(count=reader.layers(f"num_{name}_layers"), layer=_layer(reader, name))
    return StackSpec(
        name=name,
        runs=(layer,),
        embedding=EmbeddingSpec(
            embedding_size=reader.integer("hidden_size"),
            num_positions=reader.integer("max_position_embeddings"),
            batched_positions=True,
            own_table=not tied,
            norm=_NORM,
            dropout=reader.number("dropout", default=DROPOUT),
        ),
        final_norm=None,
    )


def _layer(reader: ConfigReader, name: str) -> LayerSpec:
    attention = _attention(reader, name)
    decoder = name == "decoder"
    return LayerSpec(
        attention=_future_tokens(reader, attention) if decoder else attention,
        cross_attention=attention if decoder else None,
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer(f"{name}_ffn_dim"),
            activation=named_activation(
                reader, "activation_function", reader.text("activation_function", default="gelu")
            ),
            bias=True,
            activation_dropout=reader.number("activation_dropout", default=DROPOUT),
            place=NetworkPlace.MODULE,
        ),
        norm=_NORM,
        placement=NormPlacement.POST,
        dropout=reader.number("dropout", default=DROPOUT),
        names_parts=True,
    )


def _attention(reader: ConfigReader, name: str) -> AttentionSpec:
    """Of the encoder, or of the decoder to it."""
    heads_key = f"num_{name}_attention_heads"
    num_heads = reader.integer(heads_key)
    hidden_size = reader.integer("hidden_size")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=reader.divide("hidden_size", hidden_size, heads_key, num_heads),
        query_bias=True,
        key_bias=True,
        value_bias=True,
        output_bias=True,
        causal=False,
        dropout=reader.number("attention_dropout", default=DROPOUT),
        fp32_softmax=False,
        form=AttentionForm.CONTRACTED,
        query_scaling=QueryScaling.AT_ONCE,
    )


def _future_tokens(reader: ConfigReader, attention: AttentionSpec) -> FutureTokensSpec:
    return FutureTokensSpec(
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        num_streams=reader.integer("ngram"),
        num_buckets=reader.integer("num_buckets"),
        num_positions=reader.integer("max_position_embeddings"),
        dropout=attention.dropout,
    )
