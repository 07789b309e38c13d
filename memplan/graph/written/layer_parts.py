"""Which block writes down each of a layer's two parts: what mixes its tokens, and its network.

The rarer blocks are imported where a model has one: reading a model should not wait for the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from memplan.graph.feed_forward import feed_forward
from memplan.model.attention import AttentionForm, AttentionSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock
from memplan.training.choices_of_kernels.kernels import WHOLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memplan.graph.core.tape import Tape
    from memplan.graph.core.tensors import Tensor
    from memplan.graph.stack_context import StackContext
    from memplan.model.layers import LayerSpec
    from memplan.model.mixers import TokenMixer


def mix_tokens(t: Tape, x: Tensor, spec: TokenMixer, context: StackContext) -> Tensor:
    """Attention, or what stands in its place; a rank that has a share of the sequences gathers them."""
    group = t.options.tensor_parallel
    t.block = LayerBlock.ATTENTION
    if group is None or not group.sequence:
        out = _mixer(t, x, spec, context)
    else:
        from memplan.graph.splitting.tensor_parallel import (  # only then
            gather_sequence,
            note_parts_of_sums,
        )

        declared = len(t.segment.parameters)
        out = _mixer(t, gather_sequence(t, group, x), spec, context)
        note_parts_of_sums(t, declared)
        t.touch(x)
    t.block = LayerBlock.NETWORK
    return out


def _mixer(t: Tape, x: Tensor, spec: TokenMixer, context: StackContext) -> Tensor:
    if not isinstance(spec, AttentionSpec):
        return _written(MIXERS, t, x, spec, context)
    if spec.form is not AttentionForm.INTERFACE:
        from memplan.graph.attention.own_ways.older_classes import (
            own_attention,  # only for older classes
        )

        return own_attention(t, x, spec, context)
    from memplan.graph.attention.self_attention import self_attention  # not for two stacks

    return self_attention(t, x, spec, context)


def _written(
    writers: Mapping[str, Writer], t: Tape, x: Tensor, spec: object, context: StackContext
) -> Tensor:
    """What stands in the table for the spec's class."""
    module, function, block = writers[type(spec).__name__]
    if block is not None:
        t.block = block
    out: Tensor = getattr(import_module(f"memplan.graph.{module}"), function)(t, x, spec, context)
    return out


class Writer(NamedTuple):
    """Who writes a part of a layer down, from ``(t, x, spec, context)``."""

    module: str
    """In ``memplan.graph``; it is imported where a model has such a part."""
    function: str
    block: LayerBlock | None = None
    """What its tensors count as; None: as the part's place says."""


LAYERS: Mapping[str, Writer] = {
    "StreamsSpec": Writer("written.hyper_connections", "streams_layer"),
}
"""Layers that are written down whole, by the class of the spec that makes them so."""


def whole_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor | None:
    """A layer that is no sequence of parts with norms and sums around them."""
    writer = LAYERS.get(type(layer.streams).__name__)
    if writer is None:
        return None
    write = getattr(import_module(f"memplan.graph.{writer.module}"), writer.function)
    out: Tensor = write(t, x, layer, layer.streams, context)
    return out


MIXERS: Mapping[str, Writer] = {
    "CompressedAttentionSpec": Writer("attention.own_ways.compressed", "compressed_attention"),
    "SharedKeysSpec": Writer("attention.shared_keys", "shared_keys_attention"),
    "CountedSpec": Writer("counted", "counted_part", LayerBlock.MIXER),
}
"""What mixes tokens, by the class of its spec: a new kind is a row. Layers of ``MemoryAttentionSpec`` are
written down whole (``memplan.graph.written.crossing``)."""


NETWORKS: Mapping[str, Writer] = {
    "MixtureSpec": Writer("experts.mixture", "mixture"),
    "BesideDenseSpec": Writer("experts.beside_dense", "beside_dense"),
    "EveryTokenSpec": Writer("experts.every_token", "every_token"),
    "CountedSpec": Writer("counted", "counted_part"),
}
"""Networks of another kind than the dense one, likewise."""


def feed_forward_of(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """The layer's dense network, mixture of experts, or network that is only counted."""
    group = t.options.tensor_parallel
    if group is None or not group.sequence:
        return _network(t, x, layer, context)
    from memplan.graph.splitting.tensor_parallel import (  # only then
        add_up,
        gather_sequence,
        note_parts_of_sums,
    )

    declared = len(t.segment.parameters)
    if t.options.expert_parallel is not None and not isinstance(
        layer.feed_forward, FeedForwardSpec
    ):
        # Experts are sent a rank's own tokens (torchtitan 0.3.0, models/common/moe_sharding.py).
        out = _network(t, x, layer, context)
        note_parts_of_sums(t, declared)
        return out
    out = _network(t, gather_sequence(t, group, x), layer, context)
    note_parts_of_sums(t, declared)
    t.touch(x)
    return out if isinstance(layer.feed_forward, FeedForwardSpec) else add_up(t, group, out)


def _network(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    spec = layer.feed_forward
    if isinstance(spec, FeedForwardSpec):
        if t.kernels.mlp_tiles != WHOLE:
            from memplan.graph.tiles import tiled_network  # only then

            return tiled_network(t, x, spec, context.hidden_size)
        return feed_forward(t, x, spec, context.hidden_size)
    return _written(NETWORKS, t, x, spec, context)
