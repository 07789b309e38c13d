"""Rotary position embeddings on queries and keys, in the forms that transformers' classes have.

All turn a vector by ``x * cos + turned(x) * sin``. They differ in the dtype it is done in, in where the
tables come from, and in whether the result is joined from parts.
"""

from memplan.graph.attention.head_layout import splits_heads
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.rotary import rotary_as_complex, rotary_in_place
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.training.choices_of_kernels.kernels import RotaryKernel

_IN_PLACE = frozenset({RotaryKernel.LIGER, RotaryKernel.UNSLOTH})


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
