"""Experts of one row each, found by two keys whose pairs count them (``DogeCDMoE``).

The largest logits of either half are added pair by pair, the best pairs are the experts; rows of two tables
are looked up for them, and multiply the token beside the dense network.
"""

from math import isqrt

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.experts.routing import top_k
from memplan.graph.feed_forward import feed_forward
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import softmax
from memplan.graph.operations.lookups import embedding
from memplan.graph.operations.products import linear
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.mixtures import CrossedKeysSpec
from memplan.model.parameters import LayerBlock, WeightRole


def crossed_keys(t: Tape, x: Tensor, spec: CrossedKeysSpec, context: StackContext) -> Tensor:
    """Router, looked-up experts, the dense network, the sum."""
    hidden_size = context.hidden_size
    tokens, keys = x.numel // hidden_size, isqrt(spec.num_experts)
    chosen_count = tokens * spec.num_chosen
    logits = linear(t, x, "mlp.router_gate", hidden_size, 2 * keys, role=WeightRole.ROUTER)
    best, places = top_k(t, logits, logits.numel)
    first, second = t.split(best, best.numel // 2, best.numel // 2)
    scores = t.tensor(tokens * keys**2, best.dtype)
    t.record(
        OperationKind.ADD, (first, second), (scores,), gradients=(Gradient.SUMMED, Gradient.SUMMED)
    )
    indices = t.tensor(tokens * keys**2, DType.INT64)
    scratch = t.tensor(tokens * keys, DType.INT64).storage.num_bytes
    t.record(OperationKind.ADD, (places,), (indices,), forward_scratch_bytes=scratch)
    values, positions = top_k(t, scores, chosen_count)
    ids = t.tensor(chosen_count, DType.INT64)
    t.record(OperationKind.GATHER, (indices, positions), (ids,))
    weights = softmax(t, values)
    t.block = LayerBlock.EXPERTS
    down = embedding(t, "mlp.down_embed", spec.num_experts, hidden_size, chosen_count, ids)
    up = embedding(t, "mlp.up_embed", spec.num_experts, hidden_size, chosen_count, ids)
    t.block = LayerBlock.NETWORK
    products = batched_matmul(t, down, x, chosen_count, hidden_size)
    factors = t.mul(activation(t, products, spec.dense.activation), weights)
    made = batched_matmul(t, factors, up, x.numel, spec.num_chosen)
    dense = feed_forward(t, x, spec.dense, hidden_size)
    out = t.add(dense, made)
    t.touch(dense, best, scores, indices, values, made, logits)
    return out
