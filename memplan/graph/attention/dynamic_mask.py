"""Attention whose mask follows from the values (transformers 5.23, ``DogeAttention``).

A number for each key of each head is made from the values, and stands where the causal mask allows it in a
mask of every query, key and key/value head. Of more keys than a window holds only the largest are kept.
"""

from dataclasses import replace

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape, repeat_heads, splits_heads
from memplan.graph.attention.paths import attend
from memplan.graph.attention.projections import project
from memplan.graph.attention.rotary import rotate
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.products import linear
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.mixers import DynamicMaskSpec
from memplan.model.parameters import WeightRole


def dynamic_mask_attention(
    t: Tape, x: Tensor, spec: DynamicMaskSpec, context: StackContext
) -> Tensor:
    """Queries, keys and values, the mask of the values, attention, output projection."""
    scores = spec.scores
    shape = Shape(context.batch, context.seq_len, context.seq_len, scores)
    if splits_heads(t, scores):
        shape = replace(shape, heads_split=True)
    query, key, value = project(t, x, scores, context, shape)
    held = query, key
    cos, sin = context.tables(scores)
    query, key = rotate(t, query, key, scores, cos, sin)
    t.touch(*held)
    mask = _mask(t, _steps(t, value, spec), spec, context)
    wide = repeat_heads(t, mask, shape) if shape.groups > 1 else mask
    t.touch(mask)
    out = attend(t, query, key, value, shape, wide)
    out = linear(
        t, out, "self_attn.o_proj", scores.num_heads * scores.head_dim, context.hidden_size,
        bias=scores.output_bias, role=WeightRole.ATTENTION_OUTPUT,
    )  # fmt: skip
    t.touch(query, key, value, wide, x)
    return out


def _steps(t: Tape, value: Tensor, spec: DynamicMaskSpec) -> Tensor:
    """One number for each token and key/value head."""
    heads, head_dim = spec.scores.num_kv_heads, spec.scores.head_dim
    weight = t.parameter("self_attn.A", heads)
    made = linear(t, value, "self_attn.dt_proj", heads * head_dim, heads, bias=spec.step_bias)
    curve = t.elementwise(OperationKind.SOFTPLUS, made)
    return t.elementwise(OperationKind.EXP, t.mul(weight, curve))


def _mask(t: Tape, steps: Tensor, spec: DynamicMaskSpec, context: StackContext) -> Tensor:
    pairs = context.batch * context.seq_len**2
    heads = spec.scores.num_kv_heads
    causal = context.mask
    assert causal is not None
    held = [steps]
    if causal.dtype is DType.BOOL:
        written = t.tensor(pairs, t.compute)
        t.record(OperationKind.WHERE, (causal,), (written,))
        causal = written
        held.append(written)
    wide = t.view(steps, pairs * heads)
    t.record(OperationKind.EXPAND, (steps,), (wide,), gradients=(Gradient.FRESH,))
    out = _filled(t, wide, causal, pairs)
    if context.seq_len > spec.kept_keys:
        blank, spread = (t.tensor(out.numel, t.compute) for _ in range(2))
        t.record(OperationKind.ZEROS, (), (blank,))
        count = context.batch * heads * context.seq_len * spec.kept_keys
        best, places = t.tensor(count, out.dtype), t.tensor(count, DType.INT64)
        t.record(OperationKind.TOPK, (out,), (best, places), gradients=(Gradient.NONE,))
        t.record(OperationKind.SCATTER, (blank, places), (spread,))
        narrowed = _filled(t, out, spread, spread.numel)
        t.touch(out)
        held += [spread, places]
        out = narrowed
    t.touch(*held)
    return out


def _filled(t: Tape, x: Tensor, given: Tensor, elements: int) -> Tensor:
    """The lowest number where ``given`` says so: keeps where."""
    where, out = t.tensor(elements, DType.BOOL), t.tensor(x.numel, x.dtype)
    t.record(OperationKind.EQ, (given,), (where,))
    t.record(
        OperationKind.MASKED_FILL, (x, where), (out,), saves=(where,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out
