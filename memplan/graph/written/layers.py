"""Whole layers of encoders that are no classes yet: attention and a feed-forward network, a norm behind each."""

from memplan.graph.attention.own_ways.older_classes import own_attention
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.feed_forward import feed_forward
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.norms import norm
from memplan.graph.stack_context import StackContext
from memplan.model.attention import AttentionSpec
from memplan.model.layers import LayerSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock


def post_norm_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """BERT's order: attention, sum, norm; feed-forward, sum, norm."""
    hidden, spec, network = context.hidden_size, layer.attention, layer.feed_forward
    assert isinstance(spec, AttentionSpec)
    assert isinstance(network, FeedForwardSpec)
    t.block = LayerBlock.ATTENTION
    attended = own_attention(t, x, spec, context)
    t.block = LayerBlock.NETWORK
    attended = dropout(t, attended, layer.dropout, module="self_attn.dropout")
    middle = norm(t, t.add(attended, x), layer.norm, "self_attn_layer_norm", hidden)
    t.touch(attended, *context.attention_frame)
    context.attention_frame = ()
    fed = feed_forward(t, middle, network, hidden)
    activated = _activated(t)
    fed = dropout(t, fed, layer.dropout, module="mlp.dropout")
    added = t.add(fed, middle)
    out = norm(t, added, layer.norm, "final_layer_norm", hidden)
    t.touch(fed)
    t.touch(activated)
    # One statement names what attention returned and its weights, in this order.
    t.segment.lingering.insert(0, middle)
    return out


def _activated(t: Tape) -> Tensor:
    """The network's activations: what its last product is made of, autocast's copy of it left out."""
    kinds = (OperationKind.LINEAR, OperationKind.TO)
    made = (each for each in reversed(t.segment.operations) if each.kind not in kinds)
    return next(made).outputs[0]
