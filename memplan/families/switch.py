"""Switch Transformers: T5's layers, of which some have experts of a limited capacity.

transformers 5.23, models/switch_transformers/modeling_switch_transformers.py.
"""

from dataclasses import replace

from memplan.dtypes import DType
from memplan.families import t5
from memplan.families.llama import join_runs, named_activation
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.model.attention import AttentionSpec, PositionBias
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerSpec, StackSpec
from memplan.model.mixtures import CapacityMixtureSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.spec import ModelSpec, Task

FIRST = (PositionBias.FIRST_LEARNED, PositionBias.FIRST_ZEROS)
LATER = (PositionBias.EARLIER_LEARNED, PositionBias.EARLIER_ZEROS)
"""Biases of self-attention and of cross attention: the first layer makes them for all."""


def read(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """Read a config of Switch Transformers."""
    num_layers = reader.layers("num_layers")
    num_decoder_layers = reader.layers("num_decoder_layers", default=num_layers)
    tied = reader.flag("tie_word_embeddings", default=True)
    return ModelSpec(
        name=request.name,
        family=request.model_type,
        task=reject_task(reader, request, Task.SEQ2SEQ_LM, Task.BASE),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("d_model"),
        context_length=reader.integer("n_positions", "max_position_embeddings", default=512),
        stacks=(
            _stack(reader, "encoder", num_layers, tied=tied),
            _stack(reader, "decoder", num_decoder_layers, tied=tied),
        ),
        head=HeadSpec(tied=tied, scaled=tied),
        num_labels=request.labels(reader),
        checkpoint_dtype=checkpoint_dtype(reader),
        eager_attention_only=True,
        source=reader.source,
    )


def _stack(reader: ConfigReader, name: str, count: int, *, tied: bool) -> StackSpec:
    step, dropout = _step(reader, name, count), reader.number("dropout_rate")
    layers = []
    for index in range(count):
        sparse = step == 1 or (step > 0 and index % step == 1)
        layers.append(_layer(reader, name, index, sparse=sparse))
    return StackSpec(
        name=name,
        runs=join_runs(layers),
        embedding=EmbeddingSpec(
            embedding_size=reader.integer("d_model"),
            dropout=dropout,
            dropout_module=True,
            own_table=not tied,
        ),
        final_norm=NormSpec(kind=NormKind.RMS_T5),
        final_dropout=dropout,
    )


def _step(reader: ConfigReader, name: str, num_layers: int) -> int:
    """Every how many layers there are experts; 0: never.

    Derived from the number of sparse layers, unless the file says it: that comes last and wins
    (``SwitchTransformersConfig.__post_init__``).
    """
    given = reader.optional_integer(f"{name}_sparse_step", minimum=0)
    if given is not None:
        return given
    sparse = reader.integer(f"num_sparse_{name}_layers", minimum=0)
    return num_layers // sparse if sparse else num_layers


def _layer(reader: ConfigReader, name: str, index: int, *, sparse: bool) -> LayerSpec:
    """T5's layer, never gated; an encoder's attention is always given a mask of padding."""
    decoder = name == "decoder"
    layer = t5.read_layer(reader, LATER if index else FIRST, decoder=decoder)
    attention, dropout = layer.attention, reader.number("dropout_rate")
    assert isinstance(attention, AttentionSpec)
    network = FeedForwardSpec(
        intermediate_size=reader.integer("d_ff"),
        activation=named_activation(
            reader, "dense_act_fn", reader.text("dense_act_fn", default="relu")
        ),
        activation_dropout=dropout,
        dropout_module=True,
        output_cast=True,
    )
    return replace(
        layer,
        attention=replace(attention, padding_mask=not decoder),
        feed_forward=_experts(reader, network) if sparse else network,
    )


_ROUTER_DTYPES = {"float32": DType.FP32, "bfloat16": DType.BF16, "float16": DType.FP16}


def _experts(reader: ConfigReader, expert: FeedForwardSpec) -> CapacityMixtureSpec:
    key = "router_dtype"
    dtype = reader.choice(key, reader.text(key, default="float32"), _ROUTER_DTYPES)
    return CapacityMixtureSpec(
        num_experts=reader.integer("num_experts"),
        capacity=reader.integer("expert_capacity"),
        expert=expert,
        router_bias=reader.flag("router_bias"),
        router_dtype=_ROUTER_DTYPES[dtype],
        jitter=reader.number("router_jitter_noise") > 0,
    )
