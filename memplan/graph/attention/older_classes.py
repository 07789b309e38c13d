"""Attention of classes that compute their scores themselves, in steps of their own.

GPT, GPT-Neo, GPT-J, CodeGen, BLOOM, MPT and XGLM never call transformers' shared attention
functions, so the choice of kernel does not reach them: all of them make s x s tensors. Each
function writes down what one class of transformers 5.23 does.
"""

from collections.abc import Callable
from dataclasses import field, replace

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.attention.eager import heads_product
from memplan.graph.attention.head_layout import Shape, as_heads, batched_matmul
from memplan.graph.attention.projections import idle_projection, project
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.products import linear
from memplan.graph.operations.rotary import rotary
from memplan.graph.segments import RESULT, Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor, allocated_bytes
from memplan.model.attention import AttentionForm, AttentionSpec, PositionBias
from memplan.model.parameters import WeightRole


@dataclass(slots=True)
class Frame:
    """What the variables of the functions hold until they return."""

    inner: list[Tensor] = field(default_factory=list)
    """Until the values are weighted: ``_attn``."""
    outer: list[Tensor] = field(default_factory=list)
    """Until the output projection is done: ``forward``."""


Scores = Callable[[Tape, Tensor, Tensor, Shape, StackContext, Frame], Tensor]
"""Queries and keys to attention weights, before dropout."""

FOLDING = frozenset({AttentionForm.ALIBI_PRODUCT, AttentionForm.CLAMPED_SCORES})
"""Forms that fold the heads into the batch before anything else."""
VIEWED = frozenset(
    {
        AttentionForm.FP32_SCORES_MASKED,
        AttentionForm.MASK_PRODUCT,
        AttentionForm.ALIBI_SUM,
        AttentionForm.PLAIN_SCORES,
        AttentionForm.PLAIN_SCORES_PROJECTED,
        AttentionForm.CLAMPED_SCORES,
    }
)
"""Forms whose heads are views that nothing but the products reads: what is copied back into rows is
copied when the view's turn comes."""
TURNED = frozenset({AttentionForm.FP32_SCORES, AttentionForm.FP32_SCORES_DIVIDED})
"""Forms whose queries and keys are cut to be turned, so that their gradients are written in rows."""
UNCAST = frozenset(
    {
        AttentionForm.MASK_PRODUCT,
        AttentionForm.CLAMPED_SCORES,
        AttentionForm.PLAIN_SCORES,
        AttentionForm.PLAIN_SCORES_PROJECTED,
    }
)
"""Forms that leave the weights in the dtype of their softmax."""


def own_attention(t: Tape, x: Tensor, spec: AttentionSpec, context: StackContext) -> Tensor:
    """Queries, keys and values, the class's own scores, the weighted values, the output."""
    shape = Shape(context.batch, context.seq_len, context.seq_len, spec)
    held: list[Tensor] = []
    if spec.form is AttentionForm.MASK_PRODUCT:
        x = t.flatten(x)  # ``Conv1D``: a product of flat rows
    if spec.form in VIEWED:
        shape = replace(shape, heads_split=True)
    query, key, value = project(t, x, spec, context, shape, held=held)
    if spec.form in VIEWED and spec.is_projected_first:
        query, key, value = _viewed(t, query, key, value, spec)
    if spec.form in TURNED:
        shape = replace(shape, heads_split=True)
        value = as_heads(t, value, spec.num_heads)
    for name in spec.idle_projections:
        idle_projection(t, f"self_attn.{name}", context.hidden_size)
    named = spec.form is not AttentionForm.CLAMPED_SCORES
    frame = Frame(outer=[*held, query, key, value] if named else held)
    if spec.paired_rotary_dim:
        query, key = _turned_pairs(t, query, key, spec, context, frame)
    if spec.form in FOLDING:
        query, key, value = (_folded(t, each, shape) for each in (query, key, value))
    frame.outer += [query, key, value]
    weights = _SCORES[spec.form](t, query, key, shape, context, frame)
    if spec.form not in UNCAST:
        weights = t.cast(weights, value.dtype)
    probabilities, weights = weights, dropout(t, weights, spec.dropout)
    product = _weighted(t, weights, value, shape)
    t.touch(weights, *frame.inner)
    out = t.contiguous(product) if shape.batch == 1 else t.scale(product, OperationKind.CLONE)
    _name_weights(t, probabilities, weights, spec, frame)
    merged, width = out, spec.num_heads * spec.head_dim
    if spec.output_apart and spec.form is AttentionForm.PLAIN_SCORES:
        t.touch(*frame.outer)
        frame.outer = [merged]
        context.attention_frame = (merged, x)
    out = linear(
        t,
        out,
        "self_attn.o_proj",
        width,
        context.hidden_size,
        bias=spec.output_bias,
        role=WeightRole.ATTENTION_OUTPUT,
    )
    if spec.form is AttentionForm.MASK_PRODUCT:
        frame.outer.append(product)  # a list of results holds it (``attn_outputs``)
    context.attention_variables = (*frame.outer, x)
    t.touch(*context.attention_variables)
    if spec.form is AttentionForm.ALIBI_PRODUCT:
        # The layer's own variable for x lives through the sum as well.
        context.attention_frame = (*frame.outer, merged, x)
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


def _name_weights(
    t: Tape, probabilities: Tensor, weights: Tensor, spec: AttentionSpec, frame: Frame
) -> None:
    """Hold the weights as long as the class's variables do."""
    form = spec.form
    if not spec.names_weights:
        frame.outer.append(weights)
    elif form is AttentionForm.CLAMPED_SCORES:
        frame.outer.append(weights)
        t.linger(probabilities)
    elif form is not AttentionForm.MASK_PRODUCT:
        t.linger(weights)
        if spec.hands_on_weights:
            t.carry(weights)


def _folded(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """``reshape(batch * heads, rows, columns)``: a copy unless there is one sequence."""
    out = t.contiguous(x) if shape.batch > 1 else t.reshaped(x)
    out.by_head = True
    return out


def _weighted(t: Tape, weights: Tensor, value: Tensor, shape: Shape) -> Tensor:
    numel = shape.rows * shape.spec.num_heads * shape.spec.head_dim
    return heads_product(t, weights, value, shape, numel, shape.keys, first_merged=True)


def _product(t: Tape, query: Tensor, key: Tensor, shape: Shape) -> Tensor:
    return heads_product(t, query, key, shape, shape.scores, shape.spec.head_dim)


def _wide_product(t: Tape, query: Tensor, key: Tensor, shape: Shape, frame: Frame) -> Tensor:
    """The product of fp32 copies, which autocast takes back to 16 bits."""
    query, key = t.cast(query, DType.FP32), t.cast(key, DType.FP32)
    frame.inner += [query, key]
    return _product(t, query, key, shape)


def _masked(t: Tape, scores: Tensor, context: StackContext) -> Tensor:
    return scores if context.mask is None else t.add(scores, context.mask)


def _softmax(t: Tape, scores: Tensor) -> Tensor:
    weights = softmax(t, scores)
    t.touch(scores)
    return weights


def _fp32_scores(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext, frame: Frame
) -> Tensor:
    """``GPTJAttention._attn``: divided, then masked."""
    scores = t.scale(_wide_product(t, query, key, shape, frame), OperationKind.DIV)
    return _softmax(t, _masked(t, scores, context))


def _fp32_scores_divided(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext, frame: Frame
) -> Tensor:
    """``CodeGenAttention._attn``: masked, then divided."""
    scores = _masked(t, _wide_product(t, query, key, shape, frame), context)
    return _softmax(t, t.scale(scores, OperationKind.DIV))


def _fp32_scores_masked(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext, frame: Frame
) -> Tensor:
    """``GPTNeoSelfAttention._attn``: ``where`` with a buffer, then the mask as well."""
    t.buffer(shape.spec.buffer_positions**2, DType.BOOL, before="self_attn")
    scores = t.scale(_wide_product(t, query, key, shape, frame), OperationKind.WHERE)
    return _softmax(t, _masked(t, scores, context))


def _mask_product(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext, frame: Frame
) -> Tensor:
    """GPT's ``_attn``: times a buffer of ones and zeros, plus its complement."""
    del context, frame
    buffer = t.buffer(shape.spec.buffer_positions**2, t.compute, before="self_attn")
    pattern = t.view(buffer, shape.queries * shape.keys)
    scores = t.scale(_product(t, query, key, shape), OperationKind.DIV)
    product = t.mul(scores, pattern)
    complement = t.scale(t.shift(pattern))
    summed = t.add(product, complement)
    t.touch(scores)
    return _softmax(t, summed)


def _alibi_product(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext, frame: Frame
) -> Tensor:
    """``BloomAttention``: one ``baddbmm`` of bias, queries and keys; all names live to the end.

    Either factor's gradient is a product, then that times ``alpha`` (torch's derivatives.yaml,
    ``baddbmm_maybe_multiply``).
    """
    product = allocated_bytes(query.numel, query.dtype)
    scores = batched_matmul(
        t, query, key, shape.scores, shape.spec.head_dim,
        backward_scratch_bytes=() if t.decomposed else (product, RESULT, ~0, product, RESULT),
    )  # fmt: skip
    summed = _masked(t, scores, context)
    frame.outer += [scores, summed]
    return softmax(t, summed, dtype=DType.FP32)


def _alibi_sum(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext, frame: Frame
) -> Tensor:
    """``MptAttention``: an fp32 bias is added, masked scores are filled."""
    scores = t.scale(_product(t, query, key, shape))
    if context.alibi is not None:
        bias = t.view(context.alibi, shape.spec.num_heads * shape.keys)
        scores = t.add(scores, bias)
    filled = _filled(t, scores, context)
    frame.outer.append(filled)
    return softmax(t, t.cast(filled, DType.FP32))


def _filled(t: Tape, scores: Tensor, context: StackContext) -> Tensor:
    """``masked_fill``: keeps the mask."""
    if context.mask is None:
        return scores
    out = t.tensor(scores.numel, scores.dtype)
    t.record(
        OperationKind.MASKED_FILL, (scores, context.mask), (out,), saves=(context.mask,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def _clamped_scores(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext, frame: Frame
) -> Tensor:
    """``XGLMAttention``: ``torch.max`` with the lowest number keeps the masked scores.

    Its gradient is halved where both are equal and zero where the scores are lower: the half and a
    comparison before the result, a second comparison behind it (torch's derivatives.yaml, ``maximum``).
    """
    del frame
    product = batched_matmul(t, query, key, shape.scores, shape.spec.head_dim)
    scores = _masked(t, product, context)
    clamped = t.tensor(scores.numel, scores.dtype)
    equal = allocated_bytes(clamped.numel, DType.BOOL)
    t.record(
        OperationKind.MAXIMUM, (scores,), (clamped,), saves=(scores,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(clamped.storage.num_bytes, equal, RESULT, equal),
    )  # fmt: skip
    return _softmax(t, clamped)


def _plain_scores(
    t: Tape, query: Tensor, key: Tensor, shape: Shape, context: StackContext, frame: Frame
) -> Tensor:
    """``RemBertSelfAttention`` and ``MPNetSelfAttention``: divided, a bias added in place.

    The scores have a name until the function returns.
    """
    scores = t.scale(_product(t, query, key, shape), OperationKind.DIV)
    if shape.spec.position_bias is PositionBias.STACK and context.bias is not None:
        scores = _added_in_place(t, scores, context.bias)
    scores = _masked(t, scores, context)
    frame.outer.append(scores)
    return softmax(t, scores)


def _added_in_place(t: Tape, scores: Tensor, bias: Tensor) -> Tensor:
    out = t.view(scores, scores.numel)
    out.requires_grad = True
    of_bias = Gradient.ALIAS if bias.dtype is scores.dtype else Gradient.FRESH
    t.record(
        OperationKind.ADD_IN_PLACE, (scores, bias), (out,), gradients=(Gradient.ALIAS, of_bias)
    )
    return out


def _turned_pairs(
    t: Tape,
    query: Tensor,
    key: Tensor,
    spec: AttentionSpec,
    context: StackContext,
    frame: Frame,
) -> tuple[Tensor, Tensor]:
    """Neighbouring pairs of the first dimensions, with tables that each layer makes for itself."""
    dim = spec.paired_rotary_dim
    table = _sines(t, spec, context, key.dtype, frame)
    cut: list[tuple[Tensor, Tensor]] = []
    for x in (key, query):
        numel = x.numel // spec.head_dim * dim
        cut.append((t.slice(x, numel), t.slice(x, x.numel - numel)))
    turned = []
    for part, _ in cut:
        cos, sin = (_repeated(t, table) for _ in range(2))
        turned.append(rotary(t, part, cos, sin))
        t.touch(cos, sin)
    passing = (each for _, each in cut)
    key, query = (t.concatenate(*parts) for parts in zip(turned, passing, strict=True))
    frame.outer += [*turned, table]
    return query, key


def _sines(
    t: Tape, spec: AttentionSpec, context: StackContext, dtype: DType, frame: Frame
) -> Tensor:
    """Sines and cosines of the positions: GPT-J gathers them out of a copy of its table."""
    dim = spec.paired_rotary_dim
    t.buffer(spec.buffer_positions * dim, DType.FP32, before="self_attn")
    rows = t.tensor(context.seq_len * dim, DType.FP32)
    if spec.form is not AttentionForm.FP32_SCORES:
        t.record(OperationKind.INDEX, (), (rows,))
        return rows
    copy = t.tensor(spec.buffer_positions * dim, DType.FP32)
    ids = t.tensor(context.seq_len * dim, DType.INT64)
    t.record(OperationKind.REPEAT, (), (copy, ids))
    t.record(OperationKind.GATHER, (copy, ids), (rows,))
    frame.outer += [copy, ids]
    return t.cast(rows, dtype)


def _repeated(t: Tape, table: Tensor) -> Tensor:
    """``repeat_interleave`` of one half of the table."""
    out = t.tensor(table.numel, table.dtype)
    t.record(OperationKind.REPEAT_INTERLEAVE, (table,), (out,))
    return out


_SCORES: dict[AttentionForm, Scores] = {
    AttentionForm.FP32_SCORES: _fp32_scores,
    AttentionForm.FP32_SCORES_MASKED: _fp32_scores_masked,
    AttentionForm.FP32_SCORES_DIVIDED: _fp32_scores_divided,
    AttentionForm.MASK_PRODUCT: _mask_product,
    AttentionForm.ALIBI_PRODUCT: _alibi_product,
    AttentionForm.ALIBI_SUM: _alibi_sum,
    AttentionForm.CLAMPED_SCORES: _clamped_scores,
    AttentionForm.PLAIN_SCORES: _plain_scores,
    AttentionForm.PLAIN_SCORES_PROJECTED: _plain_scores,
}
