"""ModernBERT: rotary encoder layers, most of which look no further than a window.

The first layer has no norm before attention: the embeddings have just passed one
(``ModernBertEncoderLayer`` of transformers 5.23).
"""

from itertools import groupby

from memplan.families.encoders import encoder_model
from memplan.families.request import ReadRequest, reject_task
from memplan.families.t5 import named_activation
from memplan.model.attention import AttentionSpec, Projection, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.heads import ClassifierSpec, HeadSpec, Pooling
from memplan.model.layers import EmbeddingSpec, LayerRun, LayerSpec, StackSpec
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task

TASKS = (
    Task.MASKED_LM,
    Task.BASE,
    Task.SEQUENCE_CLASSIFICATION,
    Task.TOKEN_CLASSIFICATION,
    Task.QUESTION_ANSWERING,
    Task.MULTIPLE_CHOICE,
)
POOLINGS = {"cls": Pooling.FIRST, "mean": Pooling.MEAN}
FULL, SLIDING = "full_attention", "sliding_attention"
GLOBAL_EVERY = 3
"""Every how many layers one sees everything, where the file does not say."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config; a multiple-choice head has one output, whatever the labels."""
    task = reject_task(reader, request, *TASKS)
    hidden_size = reader.integer("hidden_size")
    norm = NormSpec(kind=NormKind.LAYER, bias=reader.flag("norm_bias"))
    stack = StackSpec(
        name="encoder",
        runs=tuple(_runs(reader, hidden_size, norm)),
        embedding=EmbeddingSpec(
            embedding_size=hidden_size,
            own_module=True,
            norm=norm,
            dropout=reader.number("embedding_dropout"),
        ),
        final_norm=norm,
        local_rotary=True,
    )
    return encoder_model(
        reader, request, stack,
        task=task, hidden_size=hidden_size, head=_head(reader, hidden_size, norm),
        context_length=reader.integer("max_position_embeddings"),
        num_labels=1 if task is Task.MULTIPLE_CHOICE else None,
    )  # fmt: skip


def _runs(reader: ConfigReader, hidden_size: int, norm: NormSpec) -> list[LayerRun]:
    """Runs of equal layers, the first one apart."""
    kinds = [(index > 0, kind) for index, kind in enumerate(_layer_types(reader))]
    return [
        LayerRun(
            count=len(list(group)),
            layer=_layer(reader, hidden_size, norm, local=kind == SLIDING, normed=normed),
        )
        for (normed, kind), group in groupby(kinds)
    ]


def _layer_types(reader: ConfigReader) -> list[str]:
    count = reader.layers("num_hidden_layers")
    listed = reader.texts("layer_types")
    for kind in listed:
        reader.choice("layer_types", kind, (FULL, SLIDING))
    if listed and len(listed) != count:
        key = "layer_types"
        raise reader.fail(key, f"has {len(listed)} entries for {count} layers")
    every = reader.integer("global_attn_every_n_layers", default=GLOBAL_EVERY)
    return listed or [SLIDING if index % every else FULL for index in range(count)]


def _layer(
    reader: ConfigReader, hidden_size: int, norm: NormSpec, *, local: bool, normed: bool
) -> LayerSpec:
    num_heads = reader.integer("num_attention_heads")
    head_dim = reader.divide("hidden_size", hidden_size, "num_attention_heads", num_heads)
    bias, dropout = reader.flag("attention_bias"), reader.number("attention_dropout")
    window = reader.integer("local_attention", minimum=2) // 2
    return LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            projection=Projection.FUSED_UNBOUND,
            query_bias=bias,
            key_bias=bias,
            value_bias=bias,
            output_bias=bias,
            rotary=RotarySpec(dim=head_dim, upcast_twice=True),
            causal=False,
            sliding_window=window if local else None,
            dropout=dropout,
        ),
        feed_forward=FeedForwardSpec(
            intermediate_size=reader.integer("intermediate_size"),
            activation=_activation(reader, "hidden_activation"),
            gated=True,
            fused_gate_up=True,
            bias=reader.flag("mlp_bias"),
            activation_dropout=reader.number("mlp_dropout"),
        ),
        norm=norm,
        dropout=dropout,
        attention_dropout_only=True,
        attention_norm=normed,
        names_attended=True,
        unnamed_norms=True,
    )


def _activation(reader: ConfigReader, key: str) -> Activation:
    return named_activation(reader, key, reader.text(key, default=Activation.GELU.value))


def _head(reader: ConfigReader, hidden_size: int, norm: NormSpec) -> HeadSpec:
    """A dense layer, activation and norm, before the output matrix as before the classes."""
    act, bias = _activation(reader, "classifier_activation"), reader.flag("classifier_bias")
    pooling = reader.choice("classifier_pooling", reader.text("classifier_pooling"), POOLINGS)
    return HeadSpec(
        tied=reader.flag("tie_word_embeddings", default=True),
        bias=reader.flag("decoder_bias"),
        transform=FeedForwardSpec(intermediate_size=hidden_size, activation=act),
        transform_bias=bias,
        transform_norm=norm,
        loss_upcast=True,
        classifier=ClassifierSpec(
            pooling=POOLINGS[pooling],
            dense=act,
            dense_bias=bias,
            norm=norm,
            every_token=True,
            dropout=reader.number("classifier_dropout"),
            token_dropout=reader.number("classifier_dropout"),
            span_dropout=reader.number("classifier_dropout"),
        ),
    )
