"""Attention over sequences that ranks share head by head: DeepSpeed-Ulysses, around an attention function.

(DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py, ``UlyssesSPAttentionHF``)
"""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.graph.attention.exchange import check_heads
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.run import Run
from memplan.training.splitting.exchange import ExchangeKind, Group, both_ways

Attended = tuple[Handle, Handle | None]
Attend = Callable[[Handle, Handle, Handle, Handle | None, float], Attended]


def exchanged(attend: Attend, degree: int) -> Attend:
    """A function that gives ``attend`` some heads of whole sequences: ``UlyssesSPAttentionHF.forward``.

    What it makes raises ``SetupError`` for heads that ``degree`` does not divide.
    """

    def forward(
        query: Handle, key: Handle, value: Handle, mask: Handle | None, probability: float
    ) -> Attended:
        batch, num_heads, length, _ = query.shape
        check_heads(num_heads, key.shape[1], degree)
        copies = max(1, degree // key.shape[1])
        query, key, value = (each.permute(2, 0, 1, 3) for each in (query, key, value))
        positions = _positions(query.run, degree, batch * length)
        query = _combined(query, degree, 1)
        key, value = (_combined(each, degree, copies) for each in (key, value))
        query = query.permute(1, 2, 0, 3).contiguous()
        key = key.permute(1, 2, 0, 3).contiguous()
        value = value.permute(1, 2, 0, 3).contiguous()
        context, weights = attend(query, key, value, mask, probability)
        context = context.permute(1, 0, 2, 3)
        context = context.reshape(degree * length, batch, -1)
        output = _partitioned(context, degree)
        output = output.permute(1, 0, 2)
        output = output.reshape(batch, length, -1)
        del positions
        return output, weights

    return forward


def _combined(x: Handle, degree: int, copies: int) -> Handle:
    """``combine_sequence``: of a share of the tokens all heads become of all tokens a share of the heads."""
    length, batch, _, width = x.shape
    x = _repeated(x, copies)
    x = x.reshape(length, batch, degree, -1, width)
    x = x.permute(2, 0, 1, 3, 4).contiguous()
    output = _all_to_all(x)
    output = output.reshape(degree * length, batch, -1, width).contiguous()
    return output  # noqa: RET504  (a name of the source's)


def _repeated(x: Handle, copies: int) -> Handle:
    """Key/value heads of which there are fewer than ranks (``repeat_interleave``)."""
    if copies == 1:
        return x
    length, batch, heads, width = x.shape
    made = empty(x.run, (length, batch, heads * copies, width), x.dtype)
    x.run.record(OperationKind.REPEAT_KV, (x.record,), (made.record,), gradients=(Gradient.FRESH,))
    return made


def _partitioned(x: Handle, degree: int) -> Handle:
    """``_partition_global_sequence``: back to a share of the tokens."""
    length, batch, width = x.shape
    x = x.reshape(degree, length // degree, batch, width).contiguous()
    output = _all_to_all(x)
    output = output.permute(1, 2, 0, 3)
    output = output.reshape(length // degree, batch, -1)
    return output  # noqa: RET504  (a name of the source's)


def _all_to_all(x: Handle) -> Handle:
    """``_DimZeroAllToAll``: in backward the gradient is copied into the ranks' order first."""
    run, made = x.run, empty(x.run, x.shape, x.dtype)
    size = made.record.storage.num_bytes
    run.record(
        OperationKind.ALL_TO_ALL, (x.record,), (made.record,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(size, RESULT),
        sends=both_ways(ExchangeKind.ALL_TO_ALL, x.numel * x.dtype.num_bytes, Group.SHARED),
    )  # fmt: skip
    return made


def _positions(run: Run, degree: int, tokens: int) -> list[Handle]:
    """A rank's position ids, and those of all."""
    found = [empty(run, (tokens * degree,), DType.INT64) for _ in range(2)]
    run.record(OperationKind.ALL_GATHER, (), [each.record for each in found])
    return found
