"""Megatron-Kwai's layers: local products around flash-attention over keys and values gathered from all.

kwai/Megatron-Kwai at its tag atc24ae, core/tensor_parallel/layers.py (``LinearQKVWithGradAccumulationAnd
AsyncCommunication``, ``LinearWithGradAccumulationAndAsyncCommunication``), core/context_parallel/
dattention.py, model/transformer.py (``ParallelMLP``, ``ParallelAttention``), with ``overlap-sp-ag`` and
``overlap-sp-rs``: what is gathered in the forward pass, and a row product's gradient, lie in
TransformerEngine's userbuffers, which are not PyTorch's memory.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape
from memplan.graph.attention.scratch import flash_backward_scratch
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.megatron.context import MegatronContext
from memplan.graph.megatron.parallel import column_sends, multiplied, row_sends
from memplan.graph.megatron.transformer_engine import turned
from memplan.model.attention import AttentionSpec
from memplan.training.splitting.exchange import ExchangeKind, Group, Send, Sends


def gathered_attention(
    c: MegatronContext, query: Tensor, pair: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of a rank's tokens against keys and values of all; behind it the queries as they were
    turned, and the keys and values, of which one clones its own part and lets go (``shard_saved``)."""
    query = turned(c, query)
    out, pair = _attended(c, query, pair, spec)
    c.tape.touch(query)
    return out, query, pair


def gathered(c: MegatronContext, normed: Tensor, weight: Parameter) -> tuple[Tensor, Tensor]:
    """Values, keys, and, while they are gathered, queries."""
    t = c.tape
    rows, width = weight.shape
    own = c.tokens * rows // 3
    query = t.tensor(own, c.dtype)
    pair = t.tensor(2 * own * c.context, c.dtype)
    part = query.storage.num_bytes
    if c.sequence:
        c.use_global_buffer(c.tokens * width)
    whole = t.tensor(c.tokens * width, c.dtype).storage.num_bytes
    t.record(
        OperationKind.LINEAR, (normed, weight), (query, pair), saves=(normed, weight),
        gradients=(Gradient.FRESH, c.weight_gradient),
        # The values; the keys, and turned.
        forward_scratch_bytes=(part, part, part, RESULT),
        # Of the keys and turned, of the values, of the whole input, of all three side by side.
        backward_scratch_bytes=(part, whole, part, part, ~0, 3 * part, RESULT),
        flops=2 * c.tokens * width * rows, in_python=True, sends=_gather_sends(c, width, pair),
    )  # fmt: skip
    return query, pair


def _gather_sends(c: MegatronContext, width: int, pair: Tensor) -> Sends:
    """Beside the tokens' rows keys and values, each while another product runs, and their gradients."""
    own = column_sends(c, width)
    size = pair.numel * pair.dtype.num_bytes
    gathers = Send(ExchangeKind.ALL_GATHER, size, Group.SHARED)
    scatters = Send(ExchangeKind.REDUCE_SCATTER, size, Group.SHARED)
    forward, backward = (*own.forward, gathers), (*own.backward, scatters)
    return Sends(
        tuple(each._replace(beside=1 / len(forward)) for each in forward),
        tuple(each._replace(beside=1 / len(backward)) for each in backward),
    )


def _attended(
    c: MegatronContext, query: Tensor, pair: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Two halves, early tokens and late ones, each of its own kernel; joined.

    Kept are the queries, the result and its log-sums. Keys and values come back as a gradient.
    """
    t = c.tape
    halves = [t.tensor(query.numel // 2, query.dtype) for _ in range(2)]
    out = t.tensor(query.numel, query.dtype)
    sums = t.tensor(c.tokens * spec.num_heads, DType.FP32)
    sent = t.view(pair, pair.numel)
    sizes = [each.storage.num_bytes for each in halves]
    shape = Shape(c.batch, c.seq_len // 2, c.seq_len * c.context, spec)
    inner = flash_backward_scratch(shape, halves[0])
    shorter = pair.storage.num_bytes * _overlap(c.context) // (2 * c.context)
    t.record(
        OperationKind.FLASH_ATTENTION, (query, pair), (out, sums, sent), saves=(query, out, sums),
        gradients=(Gradient.FRESH,) * 2, in_python=True, forward_scratch_bytes=(*sizes, RESULT),
        # The gradient of the shorter stretch of keys and values, which is added to the longer one's.
        backward_scratch_bytes=(RESULT, shorter, *inner),
        flops=4 * c.tokens * c.seq_len * c.context * spec.num_heads * spec.head_dim,
    )  # fmt: skip
    return out, sent


def _overlap(context: int) -> int:
    """Of the two stretches of keys that a rank's halves see the shorter one, in halves of a rank's
    tokens, on the rank where it is the longest."""
    return max(min(2 * rank + 1, 2 * (context - rank)) for rank in range(context))


def gate(c: MegatronContext, x: Tensor) -> Tensor:
    """``silu(x1) * x2`` in torch's steps, each of which keeps what it reads."""
    t = c.tape
    first, second = t.split(x, x.numel // 2, x.numel // 2)
    out = t.mul(t.elementwise(OperationKind.SILU, first), second)
    t.touch(x)
    return out


def row_product(c: MegatronContext, x: Tensor, weight: Parameter) -> Tensor:
    """A product with this rank's rows, added up at once."""
    out_features, in_features = weight.shape
    whole = allocated_bytes(c.tokens * out_features, c.dtype)
    return multiplied(
        c, x, weight, c.stream_tokens * out_features,
        flops=2 * c.tokens * in_features * out_features,
        forward_scratch_bytes=(whole, RESULT) if c.sequence else (), sends=row_sends(c, out_features),
    )  # fmt: skip


def shard_saved(c: MegatronContext, x: Tensor, pair: Tensor) -> Tensor:
    """Keeps a clone of this rank's part, from which backward gathers all of them again."""
    t = c.tape
    shard = t.tensor(pair.numel // c.context, pair.dtype)
    size = pair.numel * pair.dtype.num_bytes
    out = t.view(x, x.numel)
    t.record(
        OperationKind.CLONE, (x, pair), (out, shard), saves=(shard,),
        gradients=(Gradient.ALIAS, Gradient.FRESH), in_python=True,
        sends=Sends(backward=(Send(ExchangeKind.ALL_GATHER, size, Group.SHARED),)),
    )  # fmt: skip
    return out
