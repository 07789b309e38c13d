"""Pegasus-X's encoder: blocks of tokens that attend to themselves and to a few global tokens.

The global tokens are a stream of their own, which every layer reads and makes anew with the same weights.
Every other layer pads tokens by half a block on either side, so that blocks overlap
(transformers 5.23, models/pegasus_x/modeling_pegasus_x.py).
"""

from memplan.dtypes import DType
from memplan.graph.contraction import Turned, contraction
from memplan.graph.feed_forward import feed_forward
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.lookups import embedding
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.segments import Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor
from memplan.model.attention import GlobalTokensSpec
from memplan.model.layers import LayerSpec
from memplan.model.networks import FeedForwardSpec
from memplan.model.parameters import LayerBlock, WeightRole
from memplan.units import round_up

_PLAIN = Turned()


def begin_with_global_tokens(
    t: Tape, x: Tensor, spec: GlobalTokensSpec, context: StackContext
) -> Tensor:
    """Tokens up to whole blocks, a mask of padding, and the table of global tokens beside them."""
    tokens, hidden = context.batch * context.seq_len, context.hidden_size
    mask = t.tensor(tokens, t.compute)
    t.record(OperationKind.MASK, (), (mask,), forward_scratch_bytes=2 * mask.storage.num_bytes)
    whole = round_up(context.seq_len, spec.block_size)
    if whole != context.seq_len:
        x = _padded(t, x, context.batch * whole * hidden)
        mask = _padded(t, mask, context.batch * whole)
        context.seq_len = whole
    t.hold(mask)
    numbers = t.tensor(spec.num_tokens, DType.INT64)
    t.record(OperationKind.ARANGE, (), (numbers,))
    rows = context.batch * spec.num_tokens
    context.mask = mask
    context.hand_on(t, embedding(t, "embed_global", spec.num_tokens, hidden, rows, numbers))
    return x


def without_padding(t: Tape, x: Tensor, context: StackContext, length: int) -> Tensor:
    """The tokens that were given."""
    context.seq_len = length
    return t.slice(x, context.batch * length * context.hidden_size)


def _padded(t: Tape, x: Tensor, numel: int) -> Tensor:
    out = t.tensor(numel, x.dtype)
    t.record(OperationKind.PAD, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


def global_layer(
    t: Tape, x: Tensor, layer: LayerSpec, spec: GlobalTokensSpec, context: StackContext
) -> Tensor:
    """Attention of both streams, their sums, and the one network that both pass."""
    assert context.beside is not None
    assert isinstance(layer.feed_forward, FeedForwardSpec)
    others, hidden = context.beside, context.hidden_size
    t.block = LayerBlock.ATTENTION
    normed = norm(t, x, layer.norm, "self_attn_layer_norm", hidden)
    besides = norm(t, others, layer.norm, "global_self_attn_layer_norm", hidden)
    attended, seen = _attention(t, normed, besides, spec, context)
    t.block = LayerBlock.NETWORK
    middle = _residual(t, x, attended, layer)
    beside = _residual(t, others, seen, layer)
    out = _network(t, middle, layer, layer.feed_forward, hidden)
    with t.declared_weights():
        following = _network(t, beside, layer, layer.feed_forward, hidden)
    context.hand_on(t, following)
    return out


def _residual(t: Tape, x: Tensor, made: Tensor, layer: LayerSpec) -> Tensor:
    dropped = dropout(t, made, layer.dropout)
    out = t.add(x, dropped)
    t.touch(dropped)
    return out


def _network(t: Tape, x: Tensor, layer: LayerSpec, spec: FeedForwardSpec, hidden: int) -> Tensor:
    normed = norm(t, x, layer.norm, "final_layer_norm", hidden)
    return _residual(t, x, feed_forward(t, normed, spec, hidden), layer)


def _attention(
    t: Tape, x: Tensor, others: Tensor, spec: GlobalTokensSpec, context: StackContext
) -> tuple[Tensor, Tensor]:
    """What tokens and global tokens attend to; tokens first."""
    assert context.mask is not None
    hidden, mask, length = context.hidden_size, context.mask, context.seq_len
    given = x
    if spec.staggered:
        length += spec.block_size
        given = _padded(t, x, context.batch * length * hidden)
        mask = _padded(t, mask, context.batch * length)
        t.touch(x)
    local = [_heads(t, given, name, hidden) for name in "qkv"]
    with t.declared_weights():
        whole = [_heads(t, others, name, hidden) for name in "qkv"]
    seen = _global(t, local, whole, spec, context, mask)
    read = _local(t, local, whole, spec, mask)
    role = WeightRole.ATTENTION_OUTPUT
    rows = t.contiguous(seen)
    t.touch(seen)
    ahead = linear(t, rows, "self_attn.o_proj", hidden, hidden, role=role)
    rows = t.contiguous(read)
    t.touch(read)
    with t.declared_weights():
        out = linear(t, rows, "self_attn.o_proj", hidden, hidden, role=role)
    t.touch(*local, *whole, mask)
    if spec.staggered:
        out = t.slice(out, x.numel)
    return out, ahead


def _heads(t: Tape, x: Tensor, name: str, hidden: int) -> Tensor:
    """A projection, of queries scaled, copied head by head."""
    role = WeightRole.MATRIX if name == "v" else WeightRole.QUERY_KEY
    made = linear(t, x, f"self_attn.{name}_proj", hidden, hidden, role=role)
    scaled = t.scale(made) if name == "q" else made
    if scaled is not made:
        t.touch(made)
    out = t.scale(scaled, OperationKind.CLONE)
    t.touch(scaled)
    return out


def _global(
    t: Tape,
    local: list[Tensor],
    whole: list[Tensor],
    spec: GlobalTokensSpec,
    context: StackContext,
    mask: Tensor,
) -> Tensor:
    """Global tokens to all of a sequence's, themselves among them."""
    keys = t.concatenate(whole[1], local[1])
    values = t.concatenate(whole[2], local[2])
    length = keys.numel // (context.batch * context.hidden_size)
    longer = _padded(t, mask, context.batch * length)
    pairs = whole[0].numel // spec.head_dim * length
    scores = contraction(t, whole[0], keys, pairs, spec.head_dim, _PLAIN)
    masked = t.add(scores, longer)
    t.touch(scores)
    weights = dropout(t, softmax(t, masked), spec.dropout)
    out = contraction(t, weights, values, whole[0].numel, length, _PLAIN)
    t.touch(longer, masked, weights, keys, values)
    return out


def _local(
    t: Tape, local: list[Tensor], whole: list[Tensor], spec: GlobalTokensSpec, mask: Tensor
) -> Tensor:
    """Tokens to their block and to the global ones."""
    rows, width = local[0].numel // spec.head_dim, spec.num_tokens + spec.block_size
    beside = _padded(t, mask, mask.numel // spec.block_size * width)
    outer = contraction(t, local[0], whole[1], rows * spec.num_tokens, spec.head_dim, _PLAIN)
    inner = contraction(t, local[0], local[1], rows * spec.block_size, spec.head_dim, _PLAIN)
    scores = t.concatenate(outer, inner)
    masked = t.add(scores, beside)
    t.touch(scores)
    weights = dropout(t, softmax(t, masked), spec.dropout)
    parts = (rows * spec.num_tokens, rows * spec.block_size)
    first, second = t.slice(weights, parts[0]), t.slice(weights, parts[1])
    ahead = contraction(t, first, whole[2], local[0].numel, spec.num_tokens, _PLAIN)
    own = contraction(t, second, local[2], local[0].numel, spec.block_size, _PLAIN)
    out = t.add(ahead, own)
    t.touch(beside, outer, inner, masked, weights, ahead, own)
    return out
