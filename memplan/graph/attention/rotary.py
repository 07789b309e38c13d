"""Rotary position embeddings on queries and keys, in the forms that transformers' classes have.

All turn a vector by ``x * cos + turned(x) * sin``. They differ in the dtype it is done in, in where the
tables come from, and in whether the result is joined from parts.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import splits_heads
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.rotary import rotary, rotary_as_complex, rotary_in_place
from memplan.graph.stack_context import StackContext
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.training.choices_of_kernels.kernels import RotaryKernel


def rotate(
    t: Tape,
    query: Tensor,
    key: Tensor,
    spec: AttentionSpec,
    cos: Tensor,
    sin: Tensor,
    frame: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys, or the first dimensions of each of their heads, turned.

    Parts that the caller's own variables hold on to are appended to ``frame``.
    """
    form = spec.rotary
    if form is None:
        return query, key
    if t.kernels.rotary is not RotaryKernel.EAGER:
        return _by_kernel(t, query, key, spec, form, cos, sin)
    if form.complex_numbers:
        turned = list(rotary_as_complex(t, query, key, cos))
        t.touch(query, key)
        return turned[0], turned[1]
    if form.expanded_tables:
        cos, sin = _expanded(t, cos), _expanded(t, sin)
    sources = (query, key)
    parts = [t.cast(x, DType.FP32) if form.upcast else x for x in sources]
    cut = _cut_both(t, parts, form, spec.head_dim)
    if form.names_parts:
        halves = [(rotary(t, turning, cos, sin), passing) for turning, passing in cut]
        turned = [_joined(t, *each) for each in halves]
        if frame is not None:
            frame += [part for each in halves for part in each if part is not None]
    else:
        halves = [(rotary(t, each, cos, sin), passing) for each, passing in cut]
        turned = [_joined(t, *each) for each in halves]
    if form.upcast:
        rotated = [t.cast(x, source.dtype) for x, source in zip(turned, sources, strict=True)]
        t.touch(*parts, *turned)
    else:
        rotated = turned
    t.touch(query, key, cos, sin)
    return rotated[0], rotated[1]


def turns_heads(t: Tape, spec: AttentionSpec) -> bool:
    """Whether heads are turned by parts: the gradient of a slice is written head after head.

    (``slice_backward`` copies into zeros of its input's shape, whatever its input's strides, and
    autograd adds what else arrives to the first of them in place.)
    """
    if spec.rotary is None or spec.rotary.complex_numbers:
        return False
    return t.kernels.rotary is RotaryKernel.EAGER


_IN_PLACE = frozenset({RotaryKernel.LIGER, RotaryKernel.UNSLOTH})


def turned_in_place(t: Tape, spec: AttentionSpec) -> bool:
    """Whether a kernel turns queries and keys and lays their gradients row after row."""
    return spec.rotary is not None and t.kernels.rotary in _IN_PLACE


def _by_kernel(
    t: Tape,
    query: Tensor,
    key: Tensor,
    spec: AttentionSpec,
    form: RotarySpec,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Another code base's function in the place of the class's own, in all its steps."""
    sources = (query, key)
    if t.kernels.rotary in _IN_PLACE:
        by_row = t.kernels.rotary is RotaryKernel.LIGER and not splits_heads(t, spec)
        query, key = (rotary_in_place(t, x, cos, sin, by_row=by_row) for x in sources)
    else:
        cut = _cut_both(t, [query, key], form, spec.head_dim)
        turned = rotary_as_complex(t, cut[0][0], cut[1][0], cos)
        query, key = (_joined(t, x, rest) for x, (_, rest) in zip(turned, cut, strict=True))
    t.touch(*sources, cos, sin)
    return query, key


def _expanded(t: Tape, table: Tensor) -> Tensor:
    """The first half of each row, every number twice: made anew in each layer (GLM)."""
    out = t.tensor(table.numel, table.dtype)
    t.record(OperationKind.REPEAT_INTERLEAVE, (table,), (out,))
    return out


def _cut_both(
    t: Tape, parts: list[Tensor], form: RotarySpec, head_dim: int
) -> list[tuple[Tensor, Tensor | None]]:
    """What is turned of queries and keys; where heads are turned in part, also what stays as it is.

    Both are cut before either is turned.
    """
    if form.dim == head_dim and not form.joined:
        return [(x, None) for x in parts]
    cut: list[tuple[Tensor, Tensor | None]] = []
    for x in parts:
        turned = x.numel // head_dim * form.dim
        turning = t.alias(x) if form.dim == head_dim else t.slice(x, turned)
        cut.append((turning, t.slice(x, x.numel // head_dim * (head_dim - form.dim))))
    return cut


def _joined(t: Tape, turned: Tensor, passing: Tensor | None) -> Tensor:
    """Both parts in one tensor: ``cat`` writes head after head, whatever its inputs' strides."""
    if passing is None:
        return turned
    out = t.concatenate(turned, passing)
    out.by_head = True
    return out


def sectioned_tables(t: Tape, positions: int, dim: int, dtype: DType) -> tuple[Tensor, Tensor]:
    """Tables of three kinds of positions, for every sequence, joined to one (Qwen3.5)."""
    half = 3 * positions * (dim // 2)
    angles = t.tensor(half, DType.FP32)
    scratch = 3 * positions * DType.FP32.num_bytes
    t.record(OperationKind.MUL, (), (angles,), forward_scratch_bytes=scratch)
    curves = t.tensor(half, DType.FP32), t.tensor(half, DType.FP32)
    for curve in curves:
        t.record(
            OperationKind.COS, (angles,), (curve,), forward_scratch_bytes=curve.storage.num_bytes
        )
    joined = [t.concatenate(t.view(curve, positions * dim)) for curve in reversed(curves)]
    tables = t.cast(joined[1], dtype), t.cast(joined[0], dtype)
    t.touch(angles, *joined)
    for table in tables:
        t.hold(table)
    return tables


def turn_last(t: Tape, x: Tensor, spec: AttentionSpec, cos: Tensor, sin: Tensor) -> Tensor:
    """The last numbers of each head turned in fp32, by tables of half as many (DeepSeek-V4).

    Each number of the tables is repeated anew for every call.
    """
    form = spec.rotary
    assert form is not None
    tables = [_repeated(t, table) for table in (cos, sin)]
    turning = x.numel // spec.head_dim * form.dim
    plain, last = t.slice(x, x.numel - turning), t.slice(x, turning)
    straight = t.mul(t.cast(last, DType.FP32), tables[0])
    first, second = t.slice(last, turning // 2), t.slice(last, turning - turning // 2)
    across = t.concatenate(t.scale(second, OperationKind.NEG), first)
    turned = t.cast(t.add(straight, t.mul(t.cast(across, DType.FP32), tables[1])), x.dtype)
    out = t.concatenate(plain, turned)
    out.by_head = True
    t.touch(turned, x)
    return out


def _repeated(t: Tape, table: Tensor) -> Tensor:
    out = t.tensor(2 * table.numel, table.dtype)
    t.record(OperationKind.REPEAT_INTERLEAVE, (table,), (out,))
    return out


def half_tables(t: Tape, positions: int, width: int, dtype: DType) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each angle once, in fp32 and then cast."""
    angles, *curves = (t.tensor(positions * width, DType.FP32) for _ in range(3))
    t.record(OperationKind.MUL, (), (angles,))
    unscaled = (angles.storage.num_bytes, RESULT)
    for kind, curve in zip((OperationKind.COS, OperationKind.SIN), curves, strict=True):
        t.record(kind, (angles,), (curve,), forward_scratch_bytes=unscaled)
    tables = t.cast(curves[0], dtype), t.cast(curves[1], dtype)
    t.touch(angles, *curves)
    return tables


def both_half_tables(t: Tape, context: StackContext, width: int) -> None:
    """The stack's: of layers with and without compressed entries, held until it has run."""
    context.cos, context.sin = half_tables(t, context.seq_len, width, t.compute)
    context.local_cos, context.local_sin = half_tables(t, context.seq_len, width, t.compute)
    for table in (context.cos, context.sin, context.local_cos, context.local_sin):
        t.hold(table)


def scaled_by_position(
    t: Tape, query: Tensor, context: StackContext, dtype: DType | None = None
) -> Tensor:
    """Queries times one factor for each position, the same for all heads (Ministral 3, Llama 4)."""
    factors = t.tensor(context.seq_len, dtype or query.dtype)
    t.record(OperationKind.POSITION_FACTORS, (), (factors,))
    out = t.cast(t.mul(query, factors), query.dtype)
    out.by_head = query.by_head
    return out
