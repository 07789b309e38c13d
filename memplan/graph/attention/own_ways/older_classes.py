"""Attention of encoders that compute their scores themselves: Funnel's, VisualBERT's, LXMERT's.

They never call transformers' shared attention functions, so the choice of kernel does not reach them: all of
them make s x s tensors.
"""

from memplan.graph.attention.eager import heads_product
from memplan.graph.attention.head_layout import Shape, as_heads
from memplan.graph.attention.projections import project
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.attention import AttentionSpec
from memplan.model.parameters import WeightRole


def own_attention(t: Tape, x: Tensor, spec: AttentionSpec, context: StackContext) -> Tensor:
    """Queries, keys and values, the class's own scores, the weighted values, the output."""
    shape = Shape(context.batch, context.seq_len, context.seq_len, spec, heads_split=True)
    query, key, value = project(t, x, spec, context, shape)
    if spec.is_projected_first:
        query, key, value = _viewed(t, query, key, value, spec)
    frame = [query, key, value]
    weights = _plain_scores(t, query, key, shape, context, frame)
    weights = dropout(t, weights, spec.dropout)
    numel = shape.rows * spec.num_heads * spec.head_dim
    product = heads_product(t, weights, value, shape, numel, shape.keys, first_merged=True)
    t.touch(weights)
    out = t.contiguous(product) if shape.batch == 1 else t.scale(product, OperationKind.CLONE)
    if not spec.names_weights:
        frame.append(weights)
    else:
        t.linger(weights)
        t.carry(weights)
    if spec.output_apart:
        t.touch(*frame)
        frame = [out]
        context.attention_frame = (out, x)
    out = linear(
        t,
        out,
        "self_attn.o_proj",
        spec.num_heads * spec.head_dim,
        context.hidden_size,
        bias=spec.output_bias,
        role=WeightRole.ATTENTION_OUTPUT,
    )
    context.attention_variables = (*frame, x)
    t.touch(*context.attention_variables)
    return out


def _viewed(
    t: Tape, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """What was projected as heads, in the class's order.

    Keys get their gradient column by column: their projection copies it into rows, where it has to.
    """
    heads = spec.num_heads
    if not spec.query_viewed_last:
        query = as_heads(t, query, heads)
    key, value = as_heads(t, key, heads, in_columns=True), as_heads(t, value, heads)
    if spec.query_viewed_last:
        query = as_heads(t, query, heads)
    return query, key, value


def _masked(t: Tape, scores: Tensor, context: StackContext) -> Tensor:
    return scores if context.mask is None else t.add(scores, context.mask)


def _plain_scores(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext, frame: list[Tensor]
) -> Tensor:
    """Divided and masked; the scores have a name until the function returns."""
    product = heads_product(t, query, key, shape, shape.scores, shape.spec.head_dim)
    scores = t.scale(product, OperationKind.DIV)
    scores = _masked(t, scores, context)
    frame.append(scores)
    return softmax(t, scores)
