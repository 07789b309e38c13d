"""What others read of a model that is written as a class: facts, taken off the modules that its constructor makes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from memplan.classes.blueprint import blueprint_from
from memplan.classes.llama import LlamaAttention, LlamaDecoderLayer, LlamaModel, Network
from memplan.classes.registry import base_class
from memplan.families.llama import decoder_model
from memplan.families.request import ReadRequest, reject_task
from memplan.graph.modules.basic import Embedding, Linear, Norm
from memplan.graph.modules.module import Module
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerRun, LayerSpec, StackSpec
from memplan.model.norms import NormSpec
from memplan.model.spec import ModelSpec, Task

TASKS_WITHOUT_TOKENS = Task.CAUSAL_LM, Task.BASE, Task.SEQUENCE_CLASSIFICATION
"""What decoders are trained for whose class for tokens is none of those that all share."""


def read_class(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """The facts of a model whose type has a class, and the class itself.

    Raises ``ConfigError`` for a config that no such class can be made from.
    """
    base = base_class(request.model_type)(reader)
    if not isinstance(base, LlamaModel):
        from memplan.classes.encoder_facts import read_encoder  # only for encoders
        from memplan.classes.encoders import Encoder

        assert isinstance(base, Encoder)
        return read_encoder(base, reader, request)
    table = base.children[base.table]
    assert isinstance(table, Embedding)
    if not base.classifies_tokens:
        reject_task(reader, request, *TASKS_WITHOUT_TOKENS)
    model = decoder_model(
        reader, request, _stack(base, table.width), hidden_size=table.width,
        head=HeadSpec(router_loss=base.output_router_logits, bias=base.head_bias),
    )  # fmt: skip
    return replace(
        model,
        eager_attention_only=base.eager_only,
        blueprint=blueprint_from(reader, request.model_type),
    )


def _stack(base: LlamaModel, width: int) -> StackSpec:
    return StackSpec(
        name="decoder",
        runs=tuple(_runs(base)),
        embedding=EmbeddingSpec(embedding_size=width),
        final_norm=_norm(base.children[base.last]),
    )


def _runs(base: LlamaModel) -> Iterator[LayerRun]:
    for kind, group in groupby(base.layers.kinds):
        layer = base.layers.made[kind]
        assert isinstance(layer, LlamaDecoderLayer)
        made = _layer(layer, base)
        attention = made.attention
        assert isinstance(attention, AttentionSpec)
        rotary = attention.rotary if kind.turned else None
        attention = replace(attention, sliding_window=kind.window, rotary=rotary)
        yield LayerRun(count=len(list(group)), layer=replace(made, attention=attention))


def _layer(layer: LlamaDecoderLayer, base: LlamaModel) -> LayerSpec:
    attention = next(each for each in layer.children.values() if isinstance(each, LlamaAttention))
    found = (each for each in layer.children.values() if isinstance(each, Network))
    return LayerSpec(
        attention=_attention(attention, base),
        feed_forward=next(found).facts(),
        norm=_norm(base.children[base.last]),
        placement=layer.placement,
        dropout=layer.residual_dropout,
    )


def _attention(module: LlamaAttention, base: LlamaModel) -> AttentionSpec:
    first = next(each for each in module.children.values() if isinstance(each, Linear))
    bias = _has_bias(module.children.get("q_proj") or module.children.get("qkv_proj") or first)
    names = "q_norm", "query_layernorm", "q_layernorm"
    norm = next((module.children[name] for name in names if name in module.children), None)
    if norm is not None and module.norms_by_head:
        norm = next(each for _, each in norm.modules() if isinstance(each, Norm))
    shape = () if norm is None else norm.weights["weight"].shape
    return AttentionSpec(
        num_heads=module.num_heads,
        num_kv_heads=module.num_kv_heads,
        head_dim=module.head_dim,
        projection=module.projection,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=_has_bias(module.children[module.output]),
        rotary=RotarySpec(dim=base.rotary_emb.width),
        query_key_norm=None if norm is None else _norm(norm),
        query_key_norm_per_head=not shape or shape[-1] == module.head_dim,
        query_key_norm_weight_per_head=module.norms_by_head or len(shape) > 1,
        projection_clamped=module.clip_qkv,
        softcap=module.softcap,
        causal=not base.two_sided,
        dropout=module.attention_dropout,
    )


def _norm(module: Module) -> NormSpec:
    assert isinstance(module, Norm)
    return NormSpec(kind=module.kind, bias=_has_bias(module))


def _has_bias(module: Module) -> bool:
    return "bias" in module.weights
