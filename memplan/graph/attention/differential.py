"""Attention whose heads' outputs are subtracted from one another (``DiffLlamaAttention``).

Values are cut in halves of heads, each repeated; queries and keys attend to either half, and of the two
results, side by side, the second half of the heads is subtracted from the first, times a number that
four vectors make.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.paths import attend
from memplan.graph.attention.projections import project
from memplan.graph.attention.rotary import rotate
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.norms import norm_weightless
from memplan.graph.operations.products import linear
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.attention import AttentionSpec
from memplan.model.mixers import DifferentialSpec
from memplan.model.parameters import WeightRole


def differential_attention(
    t: Tape, x: Tensor, spec: DifferentialSpec, context: StackContext
) -> Tensor:
    """Two attention calls, their weighted difference, a norm without a weight, the output."""
    scores = spec.scores
    shape = Shape(context.batch, context.seq_len, context.seq_len, scores)
    query, key, value = project(t, x, scores, context, shape)
    cos, sin = context.tables(scores)
    query, key = rotate(t, query, key, scores, cos, sin)
    halves = [_repeated(t, half) for half in t.split(value, value.numel // 2, value.numel // 2)]
    made = [attend(t, query, key, half, shape, context.mask) for half in halves]
    whole = t.concatenate(*made)
    first, second = t.split(whole, whole.numel // 2, whole.numel // 2)
    numbers = [_number(t, scores, index, query.dtype) for index in (1, 2)]
    factor = t.shift(_less(t, *numbers))
    difference = _less(t, first, t.mul(factor, second))
    normed = t.scale(norm_weightless(t, difference, 2 * scores.head_dim))
    t.touch(difference)
    out = linear(
        t, normed, "self_attn.o_proj", scores.num_heads * scores.head_dim, context.hidden_size,
        bias=scores.output_bias, role=WeightRole.ATTENTION_OUTPUT,
    )  # fmt: skip
    t.touch(query, key, value, *halves, *made, *numbers, factor, x)
    return out


def _repeated(t: Tape, x: Tensor) -> Tensor:
    """Half of the value heads, twice in a row."""
    out = t.tensor(2 * x.numel, x.dtype)
    t.record(OperationKind.REPEAT, (x,), (out,), gradients=(Gradient.FRESH,))
    out.by_head = True
    return out


def _number(t: Tape, spec: AttentionSpec, index: int, dtype: DType) -> Tensor:
    """The exponential of two vectors' product."""
    left, right = (
        t.parameter(f"self_attn.lambda_{name}{index}", spec.head_dim) for name in ("q", "k")
    )
    total = t.tensor(1, DType.FP32)
    t.record(OperationKind.SUM, (t.mul(left, right),), (total,), gradients=(Gradient.FRESH,))
    return t.cast(t.elementwise(OperationKind.EXP, total), dtype)


def _less(t: Tape, left: Tensor, right: Tensor) -> Tensor:
    out = t.tensor(left.numel, left.dtype)
    t.record(OperationKind.SUB, (left, right), (out,), gradients=(Gradient.ALIAS, Gradient.FRESH))
    return out
