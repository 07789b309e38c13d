"""What others read of a model that is written as a class: facts, taken off the modules that its constructor makes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from memplan.classes.blueprint import blueprint_from
from memplan.classes.llama import (
    MLP,
    GatedMLP,
    GateUpMLP,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
)
from memplan.classes.mixtures import MixtureBlock
from memplan.classes.registry import base_class
from memplan.families.llama import decoder_model
from memplan.families.request import ReadRequest
from memplan.graph.modules.basic import Norm
from memplan.graph.modules.module import Module
from memplan.model.attention import AttentionSpec, Projection, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerRun, LayerSpec, StackSpec
from memplan.model.mixtures import MixtureSpec, RouterSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormSpec
from memplan.model.spec import ModelSpec


def read_class(reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """The facts of a model whose type has a class, and the class itself.

    Raises ``ConfigError`` for a config that no such class can be made from.
    """
    base = base_class(request.model_type)(reader)
    assert isinstance(base, LlamaModel)
    model = decoder_model(
        reader, request, _stack(base), hidden_size=base.embed_tokens.width,
        head=HeadSpec(router_loss=base.output_router_logits, bias=base.head_bias),
    )  # fmt: skip
    return replace(
        model,
        eager_attention_only=base.eager_only,
        blueprint=blueprint_from(reader, request.model_type),
    )


def _stack(base: LlamaModel) -> StackSpec:
    return StackSpec(
        name="decoder",
        runs=tuple(_runs(base)),
        embedding=EmbeddingSpec(embedding_size=base.embed_tokens.width),
        final_norm=_norm(base.norm),
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
    found = (each for each in layer.children.values() if isinstance(each, MLP | MixtureBlock))
    network = next(found)
    return LayerSpec(
        attention=_attention(layer.self_attn, base),
        feed_forward=_network(network) if isinstance(network, MLP) else _mixture(network),
        norm=_norm(base.norm),
        placement=layer.placement,
        dropout=layer.residual_dropout,
    )


def _attention(module: LlamaAttention, base: LlamaModel) -> AttentionSpec:
    fused = module.children.get("qkv_proj")
    bias = _has_bias(fused or module.children["q_proj"])
    norm = module.children.get("q_norm") or module.children.get("query_layernorm")
    shape = () if norm is None else norm.weights["weight"].shape
    return AttentionSpec(
        num_heads=module.num_heads,
        num_kv_heads=module.num_kv_heads,
        head_dim=module.head_dim,
        projection=Projection.SEPARATE if fused is None else Projection.FUSED_SLICED,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=_has_bias(module.children["o_proj"]),
        rotary=RotarySpec(dim=base.rotary_emb.width),
        query_key_norm=None if norm is None else _norm(norm),
        query_key_norm_per_head=not shape or shape[-1] == module.head_dim,
        query_key_norm_weight_per_head=len(shape) > 1,
        projection_clamped=module.clip_qkv,
        softcap=module.softcap,
        causal=not base.two_sided,
        dropout=module.attention_dropout,
    )


def _network(module: MLP) -> FeedForwardSpec:
    down = module.last
    return FeedForwardSpec(
        intermediate_size=down.in_features,
        activation=module.activation_kind,
        gated=isinstance(module, GatedMLP | GateUpMLP),
        fused_gate_up=isinstance(module, GateUpMLP),
        bias=_has_bias(down),
    )


def _mixture(block: MixtureBlock) -> MixtureSpec:
    router, experts, shared = block.parts()
    return MixtureSpec(
        num_experts=router.num_experts,
        num_experts_per_token=router.top_k,
        expert=FeedForwardSpec(
            intermediate_size=experts.intermediate_dim, activation=experts.act_fn.kind, gated=True
        ),
        router=RouterSpec(score=router.score),
        shared=None if shared is None else _network(shared),
    )


def _norm(module: Module) -> NormSpec:
    assert isinstance(module, Norm)
    return NormSpec(kind=module.kind, bias=_has_bias(module))


def _has_bias(module: Module) -> bool:
    return "bias" in module.weights
