"""What others read of a model that is written as a class: facts, taken off the modules that its constructor makes."""

from collections.abc import Iterator
from itertools import chain, groupby

from memplan.classes.blueprint import blueprint_from
from memplan.classes.llama import (
    Decoder,
    DecoderLayer,
    HeadAttention,
    SelfAttention,
    Window,
)
from memplan.families.llama import DECODER_TASKS, decoder_model
from memplan.families.request import ReadRequest, checkpoint_dtype, reject_task
from memplan.fast_dataclass import replace
from memplan.graph.modules.basic import Conv1D, Dropout, Embedding, Linear, Norm
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import RotaryEmbedding
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.heads import HeadSpec
from memplan.model.layers import EmbeddingSpec, LayerRun, LayerSpec, StackSpec
from memplan.model.mixers import NOTHING, MixerSpec, TokenMixer
from memplan.model.norms import NormSpec
from memplan.model.spec import ModelSpec, Task


def read_decoder(base: Decoder, reader: ConfigReader, request: ReadRequest) -> ModelSpec:
    """The facts of a decoder, and the class itself.

    Raises ``ConfigError`` for a config that no such class can be made from.
    """
    table = base.children[base.table]
    assert isinstance(table, Embedding)
    request = replace(request, task=reject_task(reader, request, *_tasks(base)))
    model = decoder_model(
        base.text_config(reader), request, _stack(base, table.width), hidden_size=base.hidden_size or table.width,
        head=HeadSpec(
            router_loss=base.output_router_logits, bias=base.head_bias, unnamed_loss=base.unnamed_loss,
        ),
        tied_by_default=base.tied_by_default, context_keys=base.context_keys,
    )  # fmt: skip
    return replace(
        model,
        eager_attention_only=base.eager_only,
        checkpoint_dtype=checkpoint_dtype(reader),
        head=replace(model.head, tied=base.ties_head(reader, model.head.tied)),
        recomputes=base.checkpoints,
        transposed_linear=any(isinstance(each, Conv1D) for _, each in base.modules()),
        blueprint=blueprint_from(reader, request.model_type),
    )


def _tasks(base: Decoder) -> list[Task]:
    """What there are classes for, the usual one first."""
    if base.tasks:
        return list(base.tasks)
    if not base.speaks:
        return [Task.TOKEN_CLASSIFICATION, Task.BASE]
    left_out = {
        Task.SEQUENCE_CLASSIFICATION: not base.classifies,
        Task.TOKEN_CLASSIFICATION: not base.classifies_tokens,
    }
    return [each for each in DECODER_TASKS if not left_out.get(each)]


def _stack(base: Decoder, width: int) -> StackSpec:
    return StackSpec(
        name="decoder",
        runs=tuple(_runs(base)),
        embedding=_embedding(base, width),
        projected_out=base.hidden_size not in (0, width),
        several_streams=base.num_streams > 1,
        final_norm=None if base.last_norm is None else _norm(base.last_norm),
    )


def _embedding(base: Decoder, width: int) -> EmbeddingSpec:
    positions = base.children.get(base.positions)
    rows = positions.weight.shape[0] if isinstance(positions, Embedding) else 0
    dropouts = (each for each in base.children.values() if isinstance(each, Dropout))
    dropped = next((each.probability for each in dropouts), base.embedding_dropout)
    return EmbeddingSpec(
        embedding_size=width, num_positions=rows, dropout=dropped, own_module=base.embeds_more,
        steps=base.steps, extra_rows=base.extra_rows, patch_features=base.patch_features,
    )  # fmt: skip


def _runs(base: Decoder) -> Iterator[LayerRun]:
    for kind, group in groupby(base.layer_list.kinds):
        layer = base.layer_list.made[kind]
        assert isinstance(layer, DecoderLayer)
        rotary = _rotary(base, kind.window) if kind.turned else None
        yield LayerRun(count=len(list(group)), layer=_layer(layer, base, kind.window, rotary))


def _layer(
    layer: DecoderLayer, base: Decoder, window: Window, rotary: RotarySpec | None
) -> LayerSpec:
    own = (each for each in layer.children.values() if isinstance(each, Norm))
    norms = chain(own, (each for _, each in layer.modules() if isinstance(each, Norm)))
    mixers = [each for _, each in layer.modules() if isinstance(each, SelfAttention)]
    scores = [
        replace(_attention(each, base), sliding_window=window, rotary=rotary)
        for each in mixers
        if isinstance(each, HeadAttention)
    ]
    others = [each.facts() for each in mixers if not isinstance(each, HeadAttention)]
    found: TokenMixer = next(iter((*others, *scores)), NOTHING)
    if isinstance(found, MixerSpec) and scores:
        found = replace(found, scores=scores[0])  # both stand in the layer
    return LayerSpec(
        attention=found,
        feed_forward=layer.network_facts(),
        norm=_norm(next(norms)),
        placement=layer.placement,
        dropout=layer.residual_dropout,
    )


def _attention(module: HeadAttention, base: Decoder) -> AttentionSpec:
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
        form=module.form,
        query_key_norm=None if norm is None else _norm(norm),
        query_key_norm_per_head=not shape or shape[-1] == module.head_dim,
        query_key_norm_weight_per_head=module.norms_by_head or len(shape) > 1,
        projection_clamped=module.clip_qkv,
        softcap=module.softcap,
        output_gate=module.output_gate,
        sinks="sinks" in module.weights,
        inner_norm=_norm(module.children["attn_sub_norm"])
        if "attn_sub_norm" in module.children
        else None,
        value_head_dim=module.v_head_dim,
        causal=not base.two_sided,
        dropout=module.attention_dropout,
    )


def _norm(module: Module) -> NormSpec:
    assert isinstance(module, Norm)
    return NormSpec(kind=module.kind, bias=_has_bias(module))


def _has_bias(module: Module) -> bool:
    return "bias" in module.weights


def _rotary(base: Decoder, window: Window) -> RotarySpec | None:
    tables = base.children.get("rotary_emb")
    return RotarySpec(dim=tables.width_of(window)) if isinstance(tables, RotaryEmbedding) else None
