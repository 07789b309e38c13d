"""Megatron-Kwai's functions on handles: flash-attention over keys and values gathered from all ranks.

kwai/Megatron-Kwai at its tag atc24ae, core/context_parallel/dattention.py and core/tensor_parallel/layers.py
(``LinearQKVWithGradAccumulationAndAsyncCommunication``), with ``overlap-sp-ag`` and ``overlap-sp-rs``: what is gathered in the
forward pass, and a row product's gradient, lie in TransformerEngine's userbuffers, which are not PyTorch's memory.
"""

from memplan.dtypes import DType
from memplan.fast_dataclass import replace
from memplan.graph.attention.head_layout import Shape as Sizes
from memplan.graph.attention.scratch import flash_backward_scratch
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import allocated_bytes
from memplan.graph.modules.fused.megatron import (
    FRESH,
    apply,
    column_sends,
    sequence_ranks,
    use_global_buffer,
    weight_gradient,
)
from memplan.graph.modules.handles import Handle, empty
from memplan.training.splitting.exchange import ExchangeKind, Group, Send, Sends


def gathered_pairs(x: Handle, weight: Handle, head_dim: int, ranks: int) -> tuple[Handle, Handle]:
    """Queries of a rank's tokens, and values and keys of all; these are gathered while the next product runs."""
    run, columns, shares = x.run, weight.shape[0], sequence_ranks(x.run)
    numel, length = x.numel * shares, x.shape[0] * shares
    shape = length, x.shape[1], columns // 3 // head_dim, head_dim
    query, pair = (
        empty(run, each, run.compute) for each in (shape, (2, length * ranks, *shape[1:]))
    )
    part, whole = query.record.storage.num_bytes, allocated_bytes(numel, run.compute)
    if shares > 1:
        use_global_buffer(run, numel)
    apply(
        OperationKind.LINEAR, [x, weight], [query, pair], [x, weight],
        (FRESH, weight_gradient(run)), forward=(part, part, part),  # values; keys, and turned
        # Of the keys and turned, of the values, of the whole input, of all three side by side.
        backward=(part, whole, part, part, ~0, 3 * part), flops=2 * numel * columns,
        sends=_pair_sends(column_sends(run, numel), pair),
    )  # fmt: skip
    return query, pair


def _pair_sends(own: Sends, pair: Handle) -> Sends:
    """Beside the tokens' rows keys and values, each while another product runs, and their gradients."""
    kinds, size = (ExchangeKind.ALL_GATHER, ExchangeKind.REDUCE_SCATTER), _size(pair)
    gathers, scatters = (Send(kind, size, Group.SHARED) for kind in kinds)
    return Sends(_beside((*own.forward, gathers)), _beside((*own.backward, scatters)))


def _beside(sent: tuple[Send, ...]) -> tuple[Send, ...]:
    return tuple(each._replace(beside=1 / len(sent)) for each in sent)


def _size(pair: Handle) -> int:
    return pair.numel * pair.dtype.num_bytes


def against_all(query: Handle, pair: Handle, sizes: Sizes, ranks: int) -> tuple[Handle, Handle]:
    """Two halves, early tokens and late ones, each of its own kernel; joined.

    Kept are the queries, the result and its log-sums. Keys and values come back as a gradient, through what is returned
    beside the result.
    """
    run, spec, (length, batch, *_) = query.run, sizes.spec, query.shape
    half = empty(run, (length // 2, *query.shape[1:]), query.dtype).record
    made = empty(run, (length, batch, query.shape[2] * query.shape[3]), query.dtype)
    sums, sent = (
        empty(run, query.shape[:3], DType.FP32),
        pair.like(run.view(pair.record, pair.numel)),
    )
    inner = replace(sizes, queries=sizes.queries // 2, keys=sizes.queries * ranks)
    shorter = pair.record.storage.num_bytes * _overlap(ranks) // (2 * ranks)
    apply(
        OperationKind.FLASH_ATTENTION, [query, pair], [made, sums, sent], [query, made, sums],
        (FRESH, FRESH), forward=(half.storage.num_bytes,) * 2,
        # The gradient of the shorter stretch of keys and values, which is added to the longer one's.
        backward=(RESULT, shorter, *flash_backward_scratch(inner, half)),
        flops=4 * sizes.rows * sizes.queries * ranks * spec.num_heads * spec.head_dim,
    )  # fmt: skip
    return made, sent


def _overlap(ranks: int) -> int:
    """Of the two stretches of keys that a rank's halves see the shorter one, in halves of a rank's
    tokens, on the rank where it is the longest."""
    return max(min(2 * rank + 1, 2 * (ranks - rank)) for rank in range(ranks))


def shard_saved(x: Handle, pair: Handle, ranks: int) -> Handle:
    """Keeps a clone of this rank's part of keys and values, from which backward gathers all of them again."""
    shard = empty(x.run, (pair.numel // ranks,), pair.dtype)
    made = x.like(x.run.view(x.record, x.numel))
    gathers = Send(ExchangeKind.ALL_GATHER, _size(pair), Group.SHARED)
    apply(
        OperationKind.CLONE, [x, pair], [made, shard], [shard], (Gradient.ALIAS, FRESH),
        sends=Sends(backward=(gathers,)),
    )  # fmt: skip
    return made
