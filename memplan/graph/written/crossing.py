"""Layers of a decoder that attend to pictures (``MllamaCrossAttentionDecoderLayer``, transformers 5.23).

Towers run before the tokens are embedded. What they give is the memory of all such layers, which a mask
tells each token's pictures from; without pictures the class passes these layers over.
"""

from dataclasses import replace

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, as_heads, splits_heads
from memplan.graph.attention.paths import attend
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.counted import idle_linear
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.graph.stacks import TrainedRun
from memplan.graph.towers.flow import record_flow
from memplan.graph.towers.state import Flow, from_batch
from memplan.graph.written.layer_parts import feed_forward_of
from memplan.model.layers import LayerSpec, StackSpec
from memplan.model.mixers import MemoryAttentionSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock, ModelPart, ParameterBlock, WeightRole

GATES = ("cross_attn_attn_gate", "cross_attn_mlp_gate")


def record_memory(t: Tape, blocks: tuple[ParameterBlock, ...]) -> Tensor:
    """Run the towers; what they give is held while the layers run."""
    flow = Flow(items=t.options.batch_size * t.options.images_per_sample)
    memory = record_flow(t, blocks, tied=False, flow=flow)
    assert memory is not None
    t.hold(memory)
    return memory


def share_memory(t: Tape, context: StackContext, memory: Tensor, tiles: int) -> None:
    """Let the layers see the memory, and make what says which of it each token sees.

    ``_prepare_cross_attention_mask``; a picture comes in so many ``tiles``.
    """
    context.memory = memory
    context.memory_len = memory.numel // context.hidden_size // context.batch
    rows = context.batch * context.seq_len
    pairs = rows * context.memory_len
    given = from_batch(t, rows * t.options.images_per_sample * tiles, DType.INT64)
    repeated = t.tensor(pairs, DType.INT64)
    t.record(OperationKind.REPEAT_INTERLEAVE, (given,), (repeated,))
    inverted = t.tensor(pairs, DType.FP32)
    t.record(OperationKind.SUB, (repeated,), (inverted,))
    inverted = t.cast(inverted, t.compute)
    hidden = t.tensor(pairs, DType.BOOL)
    t.record(OperationKind.TO, (inverted,), (hidden,))
    context.memory_mask = t.tensor(pairs, t.compute)
    t.record(OperationKind.MASKED_FILL, (inverted, hidden), (context.memory_mask,))
    t.touch(repeated)
    seen = t.tensor(pairs, DType.BOOL)
    t.record(OperationKind.EQ, (context.memory_mask,), (seen,))
    context.memory_rows = t.tensor(rows, t.compute)
    t.record(OperationKind.MAX, (seen,), (context.memory_rows,))
    t.touch(inverted)
    t.hold(context.memory_mask)
    t.hold(context.memory_rows)


def crossing_layer(t: Tape, x: Tensor, layer: LayerSpec, context: StackContext) -> Tensor:
    """Attention to the memory and a network, each behind a norm and times the tanh of a gate."""
    spec = layer.attention
    assert isinstance(spec, MemoryAttentionSpec)
    assert context.memory is not None
    assert context.memory_rows is not None
    hidden = context.hidden_size
    normed = norm(t, x, layer.norm, "cross_attn_layer_norm", hidden)
    attended = _attention(t, normed, context.memory, spec, context)
    middle = t.add(x, t.mul(_gate(t, GATES[0]), attended))
    t.touch(attended)
    normed = norm(t, middle, layer.norm, "post_attention_layernorm", hidden)
    fed = t.mul(context.memory_rows, feed_forward_of(t, normed, layer, context))
    t.touch(normed)
    out = t.add(middle, t.mul(_gate(t, GATES[1]), fed))
    t.touch(fed, middle)
    return out


def pass_over(t: Tape, stack: StackSpec, run: TrainedRun, context: StackContext) -> None:
    """Layers that the class passes over where it sees no pictures: their weights alone."""
    t.begin(f"{stack.name}.layers", part=ModelPart.LAYERS, repeat=run.count, frozen=run.frozen)
    t.segment.layer = run.layer
    assert isinstance(run.layer.attention, MemoryAttentionSpec)
    _declare_idle(t, run.layer, run.layer.attention, context.hidden_size)
    t.end(t.tensor(0, DType.FP32))


def _gate(t: Tape, name: str) -> Tensor:
    weight = t.parameter(f"layer.{name}", 1, role=WeightRole.OTHER)
    return t.elementwise(OperationKind.TANH, weight)


def _attention(
    t: Tape, x: Tensor, memory: Tensor, spec: MemoryAttentionSpec, context: StackContext
) -> Tensor:
    """Queries of the tokens, keys and values of the memory; queries and keys are normed head by head."""
    scores, hidden = spec.scores, context.hidden_size
    width, narrow = scores.num_heads * scores.head_dim, scores.num_kv_heads * scores.head_dim
    t.block = LayerBlock.CROSS_ATTENTION
    shape = Shape(context.batch, context.seq_len, context.memory_len, scores)
    if splits_heads(t, scores):
        shape = replace(shape, heads_split=True)

    def project(source: Tensor, name: str, outputs: int, heads: int, role: WeightRole) -> Tensor:
        made = linear(t, source, f"cross_attn.{name}", hidden, outputs, role=role)
        return as_heads(t, made, heads) if shape.heads_split else made

    matched, plain = WeightRole.QUERY_KEY, WeightRole.MATRIX
    query = project(x, "q_proj", width, scores.num_heads, matched)
    query = norm(t, query, spec.norm, "cross_attn.q_norm", scores.head_dim)
    key = project(memory, "k_proj", narrow, scores.num_kv_heads, matched)
    value = project(memory, "v_proj", narrow, scores.num_kv_heads, plain)
    key = norm(t, key, spec.norm, "cross_attn.k_norm", scores.head_dim)
    out = attend(t, query, key, value, shape, context.memory_mask)
    last = WeightRole.ATTENTION_OUTPUT
    out = linear(t, out, "cross_attn.o_proj", width, hidden, role=last)
    t.touch(query, key, value, x)
    t.block = LayerBlock.NETWORK
    return out


def _declare_idle(t: Tape, layer: LayerSpec, spec: MemoryAttentionSpec, hidden: int) -> None:
    """The weights of a layer that nothing runs through."""
    network = layer.feed_forward
    assert isinstance(network, FeedForwardSpec)
    scores, inner = spec.scores, network.intermediate_size
    width, narrow = scores.num_heads * scores.head_dim, scores.num_kv_heads * scores.head_dim
    t.block = LayerBlock.CROSS_ATTENTION
    for name, inputs, outputs in (
        ("cross_attn.q_proj", hidden, width), ("cross_attn.k_proj", hidden, narrow),
        ("cross_attn.v_proj", hidden, narrow), ("cross_attn.o_proj", width, hidden),
        ("mlp.gate_proj", hidden, inner), ("mlp.up_proj", hidden, inner),
        ("mlp.down_proj", inner, hidden),
    ):  # fmt: skip
        idle_linear(t, t.matrix(f"{name}.weight", outputs, inputs))
    t.block = LayerBlock.NETWORK
    for name, size in (
        ("cross_attn.q_norm", scores.head_dim), ("cross_attn.k_norm", scores.head_dim),
        ("cross_attn_layer_norm", hidden), ("post_attention_layernorm", hidden),
    ):  # fmt: skip
        t.parameter(f"{name}.weight", size, role=WeightRole.NORM).unused = True
    for name in GATES:
        t.parameter(f"layer.{name}", 1, role=WeightRole.OTHER).unused = True
