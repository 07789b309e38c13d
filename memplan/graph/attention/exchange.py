"""Attention over some heads of whole sequences that several ranks share: DeepSpeed-Ulysses.

DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py, ``UlyssesSPAttentionHF``: queries, keys and
values go from shares of tokens to shares of heads and the result back, each through ``all_to_all`` on
copies that lie rank by rank.
"""

from collections.abc import Callable
from dataclasses import replace

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.attention.head_layout import Shape
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.model.attention import AttentionSpec
from memplan.training.splitting.context_parallel import ContextParallel
from memplan.training.splitting.exchange import ExchangeKind, Group, both_ways

Attention = Callable[[Tensor, Tensor, Tensor, Shape], Tensor]


def check_heads(num_heads: int, num_kv_heads: int, degree: int) -> None:
    """Raise ``SetupError`` for a number of ranks that does not divide the heads.

    >>> check_heads(32, 8, 16)
    """
    share, rest = divmod(num_heads, degree)
    if rest:
        msg = (
            f"context_parallel: {num_heads} heads cannot be shared evenly by {degree} ranks: "
            f"{num_heads} = {degree} x {share} + {rest}; ring attention needs not divide them"
        )
        raise SetupError(msg)
    if num_kv_heads % degree and degree % num_kv_heads:
        msg = (
            f"context_parallel: {num_kv_heads} key/value heads and {degree} ranks: neither divides the "
            "other; ring attention needs not divide them"
        )
        raise SetupError(msg)


def local_heads(spec: AttentionSpec, degree: int) -> AttentionSpec:
    """A rank's own heads; key/value heads fewer than ranks are copied.

    Raises ``SetupError`` for a degree that does not divide them.

    >>> local_heads(AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128), 16).num_kv_heads
    1
    """
    check_heads(spec.num_heads, spec.num_kv_heads, degree)
    return replace(
        spec,
        num_heads=spec.num_heads // degree,
        num_kv_heads=max(1, spec.num_kv_heads // degree),
    )


def exchanged_attention(
    t: Tape,
    group: ContextParallel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    attend: Attention,
) -> Tensor:
    """``UlyssesSPAttentionHF.forward``."""
    degree, length = group.degree, shape.queries * group.degree
    spec = local_heads(shape.spec, degree)
    whole = replace(shape, queries=length, keys=length, spec=spec)
    # Each rank's position ids, and all of them.
    positions = [t.tensor(shape.rows * degree, DType.INT64) for _ in range(2)]
    t.record(OperationKind.ALL_GATHER, (), positions)
    copies = max(1, degree // shape.spec.num_kv_heads)
    query = _to_heads(t, query)
    key, value = (_to_heads(t, _repeated(t, each, copies)) for each in (key, value))
    query = _by_head(t, query, whole, spec.num_heads)
    key, value = (_by_head(t, each, whole, spec.num_kv_heads) for each in (key, value))
    out = attend(query, key, value, whole)
    result = _to_tokens(t, out, whole)
    t.touch(*positions, out)
    if shape.batch > 1:
        return t.contiguous(result)
    return result


def _repeated(t: Tape, x: Tensor, copies: int) -> Tensor:
    """Key/value heads of which there are fewer than ranks (``repeat_interleave``)."""
    if copies == 1:
        return x
    out = t.tensor(x.numel * copies, x.dtype)
    t.record(OperationKind.REPEAT_KV, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def _to_heads(t: Tape, x: Tensor) -> Tensor:
    """``_combine_local_sequences``: a copy in the ranks' order, and what comes of the others."""
    return _exchanged(t, t.contiguous(x))


def _by_head(t: Tape, x: Tensor, shape: Shape, num_heads: int) -> Tensor:
    """Head by head: a copy, but for one head of one sequence, which lies so; then its gradient does too."""
    if num_heads > 1 or shape.batch > 1:
        x = t.contiguous(x)
    x.by_head = True
    return x


def _to_tokens(t: Tape, x: Tensor, shape: Shape) -> Tensor:
    """``_partition_global_sequence``."""
    if shape.batch > 1:
        x = t.contiguous(x)
    return t.contiguous(_exchanged(t, x))


def _exchanged(t: Tape, x: Tensor) -> Tensor:
    """``_dim_zero_all_to_all``; in backward the gradient is copied into the ranks' order first."""
    out = t.tensor(x.numel, x.dtype)
    size = out.storage.num_bytes
    t.record(
        OperationKind.ALL_TO_ALL, (x,), (out,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(size, RESULT),
        sends=both_ways(ExchangeKind.ALL_TO_ALL, x.numel * x.dtype.num_bytes, Group.SHARED),
    )  # fmt: skip
    return out
