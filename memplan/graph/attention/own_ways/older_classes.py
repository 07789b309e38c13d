"""Attention of encoders that compute their scores themselves: VisualBERT's, LXMERT's.

They never call transformers' shared attention functions, so the choice of kernel does not reach them: all of
them make s x s tensors.
"""

from memplan.graph.attention.eager import heads_product
from memplan.graph.attention.head_layout import Shape, as_heads
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
    hidden, width = context.hidden_size, spec.num_heads * spec.head_dim

    def projected(name: str, role: WeightRole, *, in_columns: bool = False) -> Tensor:
        made = linear(t, x, f"self_attn.{name}", hidden, width, bias=True, role=role)
        return as_heads(t, made, spec.num_heads, in_columns=in_columns)

    query = projected("q_proj", WeightRole.QUERY_KEY)
    # The gradient of a transposed factor comes in columns: a projection takes it so if there is one sequence.
    key = projected("k_proj", WeightRole.QUERY_KEY, in_columns=shape.batch == 1)
    value = projected("v_proj", WeightRole.MATRIX)
    product = heads_product(t, query, key, shape, shape.scores, spec.head_dim)
    scores = t.scale(product, OperationKind.DIV)
    if context.mask is not None:
        scores = t.add(scores, context.mask)
    weights = dropout(t, softmax(t, scores), spec.dropout)
    product = heads_product(
        t, weights, value, shape, shape.rows * width, shape.keys, first_merged=True
    )
    t.touch(weights)
    out = t.contiguous(product) if shape.batch == 1 else t.scale(product, OperationKind.CLONE)
    t.touch(query, key, value, scores, weights)
    context.attention_frame = (out, x)
    made = linear(
        t, out, "self_attn.o_proj", width, hidden, bias=True, role=WeightRole.ATTENTION_OUTPUT
    )
    t.touch(out, x)
    return made
