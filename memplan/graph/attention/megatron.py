"""Attention over sequences that several ranks share, as TransformerEngine's and Megatron-Kwai's functions run it.

TransformerEngine 2.11, pytorch/attention/dot_product_attention/context_parallel.py (``AttnFuncWithCPAndKVP2P``,
``flash_attn_a2a_communicate``); kwai/Megatron-Kwai at its tag atc24ae, core/context_parallel/dattention.py and
core/tensor_parallel/layers.py (``LinearQKVWithGradAccumulationAndAsyncCommunication``), with ``overlap-sp-ag`` and
``overlap-sp-rs``: what is gathered in the forward pass, and a row product's gradient, lie in TransformerEngine's userbuffers,
which are not PyTorch's memory.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.ring import ring_sends
from memplan.graph.attention.scratch import cudnn_backward_scratch, flash_backward_scratch
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.operations.megatron import (
    column_sends,
    sequence_ranks,
    use_global_buffer,
    weight_gradient,
)
from memplan.training.choices_of_kernels.sdpa import ScoreKernel
from memplan.training.splitting.exchange import ExchangeKind, Group, Send, Sends, both_ways


def ring(
    t: Tape,
    kernel: ScoreKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Shape,
    ranks: int,
) -> Tensor:
    """Keys and values of all ranks one after another, the partial results corrected and added up.

    Kept are the queries, the keys and values that came last, the output and its log-sums. The rank whose
    tokens see all others' is looked at: each of its partial results is whole (``AttnFuncWithCPAndKVP2P``).
    """
    spec, tokens = shape.spec, shape.batch * shape.queries
    both = t.tensor(key.numel + value.numel, t.compute)
    out, sums = t.tensor(query.numel, t.compute), t.tensor(tokens * spec.num_heads, DType.FP32)
    pair, partial = both.storage.num_bytes, out.storage.num_bytes
    kind = OperationKind.FLASH_ATTENTION
    inner: tuple[int, ...] = () if t.decomposed else flash_backward_scratch(shape, out)
    if kernel is ScoreKernel.CUDNN:
        kind, inner = OperationKind.CUDNN_ATTENTION, (cudnn_backward_scratch(t, shape, key),)
    t.record(
        kind, (query, key, value), (both, out, sums), saves=(query, both, out, sums),
        gradients=(Gradient.FRESH,) * 3, in_python=True,
        forward_scratch_bytes=((ranks - 1) * pair, ranks * partial, RESULT),
        # Two buffers of keys, values and their gradients; a step's own gradients and its scratch.
        backward_scratch_bytes=(4 * pair, partial + pair, *filter(None, inner), RESULT),
        flops=4 * tokens * shape.queries * ranks * spec.num_heads * spec.head_dim,
        sends=ring_sends(pair, pair, ranks),
    )  # fmt: skip
    return out


def to_heads(t: Tape, *given: Tensor) -> tuple[Tensor, ...]:
    """Some heads of all tokens in place of all heads of some: copies are sent, and what comes is sorted.

    What is sent stays until all of it has come (``flash_attn_a2a_communicate``).
    """
    outs = tuple(t.tensor(each.numel, each.dtype) for each in given)
    sent = sum(each.storage.num_bytes for each in outs)
    t.record(
        OperationKind.ALL_TO_ALL, given, outs, gradients=(Gradient.FRESH,) * len(given),
        forward_scratch_bytes=(sent, RESULT), backward_scratch_bytes=(sent, *(RESULT,) * len(given)),
        in_python=True, sends=both_ways(ExchangeKind.ALL_TO_ALL, sent, Group.SHARED),
    )  # fmt: skip
    return outs


def to_tokens(t: Tape, x: Tensor) -> Tensor:
    """Back: sorted, sent, and laid head by head of each token."""
    out = t.tensor(x.numel, x.dtype)
    size = out.storage.num_bytes
    t.record(
        OperationKind.ALL_TO_ALL, (x,), (out,), gradients=(Gradient.FRESH,),
        forward_scratch_bytes=(size, size, RESULT), backward_scratch_bytes=(size, size, RESULT),
        in_python=True, sends=both_ways(ExchangeKind.ALL_TO_ALL, size, Group.SHARED),
    )  # fmt: skip
    return out


# -- Kwai's ----------------------------------------------------------------------------------------------


def gathered_pairs(t: Tape, normed: Tensor, weight: Parameter, ranks: int) -> tuple[Tensor, Tensor]:
    """Queries of a rank's tokens, and values and keys of all; these are gathered while the next product runs."""
    columns, width = weight.shape
    tokens = normed.numel // width * sequence_ranks(t)
    own = tokens * columns // 3
    query, pair = t.tensor(own, t.compute), t.tensor(2 * own * ranks, t.compute)
    part = query.storage.num_bytes
    if sequence_ranks(t) > 1:
        use_global_buffer(t, tokens * width)
    whole = allocated_bytes(tokens * width, t.compute)
    t.record(
        OperationKind.LINEAR, (normed, weight), (query, pair), saves=(normed, weight),
        gradients=(Gradient.FRESH, weight_gradient(t)),
        # The values; the keys, and turned.
        forward_scratch_bytes=(part, part, part, RESULT),
        # Of the keys and turned, of the values, of the whole input, of all three side by side.
        backward_scratch_bytes=(part, whole, part, part, ~0, 3 * part, RESULT),
        flops=2 * tokens * width * columns, in_python=True,
        sends=_pair_sends(column_sends(t, tokens * width), pair),
    )  # fmt: skip
    return query, pair


def _pair_sends(own: Sends, pair: Tensor) -> Sends:
    """Beside the tokens' rows keys and values, each while another product runs, and their gradients."""
    size = pair.numel * pair.dtype.num_bytes
    gathers = Send(ExchangeKind.ALL_GATHER, size, Group.SHARED)
    scatters = Send(ExchangeKind.REDUCE_SCATTER, size, Group.SHARED)
    forward, backward = (*own.forward, gathers), (*own.backward, scatters)
    return Sends(
        tuple(each._replace(beside=1 / len(forward)) for each in forward),
        tuple(each._replace(beside=1 / len(backward)) for each in backward),
    )


def against_all(
    t: Tape, query: Tensor, pair: Tensor, shape: Shape, ranks: int
) -> tuple[Tensor, Tensor]:
    """Two halves, early tokens and late ones, each of its own kernel; joined.

    Kept are the queries, the result and its log-sums. Keys and values come back as a gradient, through what is returned
    beside the result.
    """
    spec, tokens = shape.spec, shape.batch * shape.queries
    halves = [t.tensor(query.numel // 2, query.dtype) for _ in range(2)]
    out = t.tensor(query.numel, query.dtype)
    sums, sent = t.tensor(tokens * spec.num_heads, DType.FP32), t.view(pair, pair.numel)
    half = Shape(shape.batch, shape.queries // 2, shape.queries * ranks, spec)
    shorter = pair.storage.num_bytes * _overlap(ranks) // (2 * ranks)
    t.record(
        OperationKind.FLASH_ATTENTION, (query, pair), (out, sums, sent), saves=(query, out, sums),
        gradients=(Gradient.FRESH,) * 2, in_python=True,
        forward_scratch_bytes=(*(each.storage.num_bytes for each in halves), RESULT),
        # The gradient of the shorter stretch of keys and values, which is added to the longer one's.
        backward_scratch_bytes=(RESULT, shorter, *flash_backward_scratch(half, halves[0])),
        flops=4 * tokens * shape.queries * ranks * spec.num_heads * spec.head_dim,
    )  # fmt: skip
    return out, sent


def _overlap(ranks: int) -> int:
    """Of the two stretches of keys that a rank's halves see the shorter one, in halves of a rank's
    tokens, on the rank where it is the longest."""
    return max(min(2 * rank + 1, 2 * (ranks - rank)) for rank in range(ranks))


def shard_saved(t: Tape, x: Tensor, pair: Tensor, ranks: int) -> Tensor:
    """Keeps a clone of this rank's part of keys and values, from which backward gathers all of them again."""
    shard = t.tensor(pair.numel // ranks, pair.dtype)
    size, out = pair.numel * pair.dtype.num_bytes, t.view(x, x.numel)
    t.record(
        OperationKind.CLONE, (x, pair), (out, shard), saves=(shard,),
        gradients=(Gradient.ALIAS, Gradient.FRESH), in_python=True,
        sends=Sends(backward=(Send(ExchangeKind.ALL_GATHER, size, Group.SHARED),)),
    )  # fmt: skip
    return out
