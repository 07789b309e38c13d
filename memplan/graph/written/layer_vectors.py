"""Vectors that each layer has of its own for each token (``Gemma4TextModel``).

A second token table holds all layers' side by side; projected embeddings are added to what it gives. A
layer takes its slice, whose gradient is a zero-filled tensor of all of them.
"""

from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation_module
from memplan.graph.operations.lookups import embedding
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.layers import LayerSpec, LayerVectorsSpec, OwnVectorSpec


def layer_vectors(t: Tape, x: Tensor, spec: LayerVectorsSpec, hidden_size: int) -> Tensor:
    """All layers' vectors: looked up, plus the embeddings' projections, normed; held by the model."""
    tokens = t.options.batch_size * t.options.seq_len
    width = spec.num_layers * spec.width
    looked_up = t.scale(embedding(t, "embed_tokens_per_layer", spec.num_rows, width, tokens))
    projected = t.scale(linear(t, x, "per_layer_model_projection", hidden_size, width))
    normed = norm(t, projected, spec.norm, "per_layer_projection_norm", spec.width)
    out = t.scale(t.add(normed, looked_up))
    t.touch(normed, looked_up)
    t.hold(out)
    return out


def own_vector(t: Tape, context: StackContext, spec: OwnVectorSpec) -> Tensor:
    """A layer's slice of them, cut before the layer begins."""
    assert context.vectors is not None
    return t.slice(context.vectors, context.batch * context.seq_len * spec.width)


def add_own_vector(
    t: Tape,
    x: Tensor,
    vector: Tensor,
    layer: LayerSpec,
    spec: OwnVectorSpec,
    context: StackContext,
) -> Tensor:
    """The vector times a gate of the hidden states, projected, normed, added to them."""
    hidden = context.hidden_size
    gate = linear(t, x, "per_layer_input_gate", hidden, spec.width)
    active = activation_module(t, gate, spec.activation, "act_fn")
    gated = t.mul(active, vector)
    made = linear(t, gated, "per_layer_projection", spec.width, hidden)
    normed = norm(t, made, layer.norm, "post_per_layer_input_norm", hidden)
    return t.add(x, normed)
