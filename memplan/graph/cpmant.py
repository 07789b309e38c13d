"""CPM-Ant: prompts before the tokens, segments, and a position bias that every layer adds.

``CpmAntModel.forward`` puts trained prompts before each sequence and cuts them off again behind the
last layer; its attention masks the scores before and after the softmax.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, batched_matmul, merged_heads
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.lookups import embedding, embedding_lookup
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.attention import AttentionSpec
from memplan.model.layers import PromptSpec, StackSpec
from memplan.model.parameters import WeightRole
from memplan.model.spec import ModelSpec

FRAME_IDS = 3
"""Rows of ids that the model's variables hold: contexts, positions and spans."""


def prompted_embeddings(
    t: Tape, model: ModelSpec, table: Parameter, spec: PromptSpec
) -> tuple[Tensor, Parameter]:
    """Prompts and tokens looked up, plus their segments."""
    count = t.options.batch_size * (t.options.seq_len + spec.length)
    ids, segments = _ids(t, count), _ids(t, count)
    for _ in range(FRAME_IDS):
        t.hold(_ids(t, count))
    states = embedding_lookup(t, table, count, ids)
    added = embedding(t, "segment_embedding", spec.num_segments, model.hidden_size, count, segments)
    t.hold(added)
    return t.add(states, added), table


def _ids(t: Tape, count: int) -> Tensor:
    made = t.tensor(count, DType.INT32)
    t.record(OperationKind.CAT, (), (made,))
    return made


def add_segment_bias(t: Tape, stack: StackSpec, spec: PromptSpec, context: StackContext) -> None:
    """The mask of all pairs, and a bias for every pair of positions or segments, for each head."""
    attention = stack.runs[0].layer.attention
    assert isinstance(attention, AttentionSpec)
    pairs = context.batch * context.seq_len**2
    context.mask = t.tensor(pairs, DType.INT32)
    t.record(OperationKind.BITWISE_AND, (), (context.mask,))
    t.hold(context.mask)
    buckets = t.tensor(pairs, DType.INT32)
    t.record(OperationKind.WHERE, (), (buckets,))
    rows = spec.num_segments**2 + spec.num_buckets
    table = t.parameter(
        "position_bias.relative_attention_bias", rows, attention.num_heads, role=WeightRole.TABLE
    )
    bias = t.tensor(pairs * attention.num_heads, table.dtype)
    t.record(
        OperationKind.EMBEDDING, (table, buckets), (bias,), saves=(buckets,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    context.bias = t.contiguous(bias)
    t.hold(context.bias)


def segment_attention(t: Tape, x: Tensor, spec: AttentionSpec, context: StackContext) -> Tensor:
    """Scores plus the bias, masked, normalized and masked again (``CpmAntAttention``)."""
    hidden, width = context.hidden_size, spec.num_heads * spec.head_dim
    query, key, value = (
        linear(t, x, f"self_attn.{name}_proj", hidden, width, role=role)
        for name, role in (
            ("q", WeightRole.QUERY_KEY),
            ("k", WeightRole.QUERY_KEY),
            ("v", WeightRole.MATRIX),
        )
    )
    shape = Shape(context.batch, context.seq_len, context.seq_len, spec)
    left, right = merged_heads(t, query, shape), merged_heads(t, key, shape)
    scores = t.scale(batched_matmul(t, left, right, shape.scores, spec.head_dim), OperationKind.DIV)
    assert context.bias is not None
    scores = t.add(scores, context.bias)
    weights = _masked(t, softmax(t, _masked(t, scores, context)), context)
    weights = dropout(t, weights, spec.dropout)
    product = batched_matmul(t, weights, merged_heads(t, value, shape), shape.outputs, shape.keys)
    out = t.contiguous(product) if shape.batch == 1 else t.scale(product, OperationKind.CLONE)
    out = linear(t, out, "self_attn.o_proj", width, hidden, role=WeightRole.ATTENTION_OUTPUT)
    t.touch(x, query, key, value)
    return out


def _masked(t: Tape, scores: Tensor, context: StackContext) -> Tensor:
    assert context.mask is not None
    pattern = t.tensor(context.mask.numel, DType.BOOL)
    t.record(OperationKind.EQ, (context.mask,), (pattern,))
    out = t.tensor(scores.numel, scores.dtype)
    t.record(
        OperationKind.MASKED_FILL, (scores, pattern), (out,), saves=(pattern,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    t.touch(scores)
    return out


def cut_prompts(t: Tape, x: Tensor, hidden_size: int) -> Tensor:
    """The tokens' states: of more than one sequence a copy."""
    batch = t.options.batch_size
    cut = t.slice(x, batch * t.options.seq_len * hidden_size)
    return cut if batch == 1 else t.contiguous(cut)
