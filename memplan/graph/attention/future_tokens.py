"""ProphetNet's decoder: beside its tokens, streams that each predict one of the next few.

transformers 5.23, models/prophetnet/modeling_prophetnet.py. The streams lie behind the tokens in one long
sequence. Tokens attend to one another; each stream attends to the tokens and to itself, so that its keys and
values are both, joined. The bias of distances is gathered out of a product of the hidden states.
"""

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.attention.turned import copied_linear
from memplan.graph.contraction import Turned, contraction
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.segments import RESULT, Gradient
from memplan.graph.stack_context import StackContext
from memplan.graph.stacks import output_matrix
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor, allocated_bytes
from memplan.model.attention import FutureTokensSpec
from memplan.model.layers import EmbeddingSpec
from memplan.model.parameters import WeightRole
from memplan.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Stream:
    """What the scores of the tokens, or of all streams together, are given."""

    numel: int
    """Scores of all heads."""
    keys: int
    buckets: Tensor
    mask: Tensor
    casts_mask: bool = False
    """The mask is written out in the scores' dtype where its own is another."""


def embed_streams(
    t: Tape,
    embedding: EmbeddingSpec,
    spec: FutureTokensSpec,
    context: StackContext,
    table: Parameter,
    ids: Tensor | None,
) -> Tensor:
    """Tokens with their positions, and behind them each stream's vector with the positions that follow.

    From here on the context's sequences are as long as both; it is given masks and buckets for the layers.
    """
    tokens, hidden = context.seq_len, context.hidden_size
    x = embedding_lookup(t, table, context.batch * tokens, ids)
    t.embedded(x, table)
    t.hold(x)
    positions = t.parameter(
        "embed_positions.weight", embedding.num_positions, hidden, role=WeightRole.TABLE
    )
    numbers = t.tensor(context.batch * tokens, DType.INT64)
    t.record(OperationKind.CUMSUM, (), (numbers,))
    own = embedding_lookup(t, positions, numbers.numel, numbers)
    t.hold(own)
    context.stream_buckets = _buckets(t, spec, context.batch, tokens)
    later = t.tensor(numbers.numel, DType.INT64)
    t.record(OperationKind.ADD_SCALAR, (numbers,), (later,))
    following = embedding_lookup(t, positions, later.numel, later)
    t.hold(following)
    x = t.add(x, own)
    vectors = t.parameter(
        "ngram_embeddings.weight", spec.num_streams, hidden, role=WeightRole.TABLE
    )
    streams = []
    for _ in range(spec.num_streams):
        vector = t.slice(vectors, hidden)
        streams.append(t.add(vector, following))
        t.hold(streams[-1])
    context.mask, context.stream_mask = _token_mask(t, tokens), _stream_mask(t, spec, tokens, x)
    x = t.concatenate(x, *streams)
    context.seq_len = tokens * (1 + spec.num_streams)
    if embedding.norm is not None:
        x = norm(t, x, embedding.norm, "layernorm_embedding", hidden)
    return dropout(t, x, embedding.dropout)


def _buckets(t: Tape, spec: FutureTokensSpec, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Buckets of all positions' distances, of which those of the sequence are copied."""
    length = spec.num_positions - 1
    positions = t.tensor(length, DType.INT64)
    t.record(OperationKind.ARANGE, (), (positions,))
    tables = []
    relative = [_distances(t, length, length), _distances(t, length, 2 * length)]
    for each in relative:
        tables.append(_bucket_table(t, each))
    t.touch(*relative)
    main = t.tensor(batch * tokens * tokens, DType.INT32)
    t.record(OperationKind.REPEAT, (tables[0],), (main,))
    joined = t.tensor(2 * tokens * tokens, DType.INT32)
    t.record(OperationKind.CAT, (tables[1],), (joined,))
    streams = t.tensor(batch * joined.numel, DType.INT32)
    t.record(OperationKind.REPEAT, (joined,), (streams,))
    t.touch(tables[1], positions)
    t.hold(main)
    t.hold(streams)
    return main, streams


def _distances(t: Tape, rows: int, columns: int) -> Tensor:
    out = t.tensor(rows * columns, DType.INT64)
    repeated = (out.storage.num_bytes, RESULT)
    t.record(OperationKind.SUB, (), (out,), forward_scratch_bytes=repeated)
    return out


def _bucket_table(t: Tape, relative: Tensor) -> Tensor:
    """``compute_relative_buckets``: distances turned round, those that are small, logarithms of the others."""
    out = t.tensor(relative.numel, DType.INT32)
    wide, four = relative.storage.num_bytes, out.storage.num_bytes
    small = allocated_bytes(relative.numel, DType.BOOL)
    distances = (wide, wide, wide, ~1, ~0, small)
    logarithms = (four, four, ~6, four, ~7, four, ~9, four, ~11, four, ~13)
    bounded = (four, four, ~17, four, ~18, four, ~20, ~15)
    chosen = (four, four, ~25, RESULT)
    t.record(
        OperationKind.RELATIVE_POSITION_BUCKET, (relative,), (out,),
        forward_scratch_bytes=(*distances, *logarithms, *bounded, *chosen),
    )  # fmt: skip
    return out


def _token_mask(t: Tape, tokens: int) -> Tensor:
    full, mask = t.tensor(tokens * tokens, t.compute), t.tensor(tokens * tokens, t.compute)
    t.record(OperationKind.MASK, (), (full,))
    t.record(OperationKind.TRIU, (full,), (mask,))
    t.hold(mask)
    return mask


def _stream_mask(t: Tape, spec: FutureTokensSpec, tokens: int, x: Tensor) -> Tensor:
    """``ngram_attention_bias`` of all positions, of which those of the sequence are copied."""
    pairs = spec.num_positions**2
    half = spec.num_streams * pairs
    differences = allocated_bytes(pairs, DType.INT64)
    allowed, diagonal = allocated_bytes(half, DType.BOOL), allocated_bytes(pairs, DType.BOOL)
    block = allocated_bytes(half, x.dtype)
    row = allocated_bytes(spec.num_positions, DType.INT64)
    whole = t.tensor(2 * half, x.dtype)
    t.record(
        OperationKind.WHERE, (), (whole,),
        forward_scratch_bytes=(
            row, row, differences, allowed, ~2, allowed, ~3, diagonal, block, block, RESULT,
        ),
    )  # fmt: skip
    mask = t.tensor(2 * spec.num_streams * tokens * tokens, x.dtype)
    t.record(OperationKind.CAT, (whole,), (mask,))
    t.hold(mask)
    return mask


def future_tokens(t: Tape, x: Tensor, spec: FutureTokensSpec, context: StackContext) -> Tensor:
    """Attention of the tokens, then that of all streams at once, through the same projections."""
    hidden, streams, heads = context.hidden_size, spec.num_streams, spec.num_heads
    tokens = context.seq_len // (1 + streams)
    query, key, value = _heads(t, x, context)
    parts, rows = 1 + streams, context.batch * tokens
    piece = rows * hidden
    main_hidden, *stream_hidden = t.split(x, *(piece,) * parts)
    main_query, *stream_queries = t.split(query, *(piece,) * parts)
    main_key, *stream_keys = t.split(key, *(piece,) * parts)
    main_value, *stream_values = t.split(value, *(piece,) * parts)
    assert context.stream_buckets is not None
    assert context.mask is not None
    assert context.stream_mask is not None
    buckets, masks = context.stream_buckets, (context.mask, context.stream_mask)
    of_tokens = Stream(rows * heads * tokens, tokens, buckets[0], masks[0])
    scores = contraction(t, main_query, main_key, of_tokens.numel, spec.head_dim, Turned())
    plain = context.batch == 1 or t.autocast is not None
    product = linear if plain else copied_linear
    bias = product(t, main_hidden, _BIAS, hidden, spec.bias_width, bias=True)
    index = _index(t, of_tokens)
    found = _gathered(t, t.scale(bias, OperationKind.CLONE), index, of_tokens)
    weights, held = _weights(t, scores, found, of_tokens, spec)
    out = contraction(t, weights, main_value, piece, tokens, Turned())
    alike = context.batch == 1
    out = t.contiguous(out) if alike else t.scale(out, OperationKind.CLONE)
    main = linear(t, out, _OUTPUT, hidden, hidden, bias=True, role=WeightRole.ATTENTION_OUTPUT)
    held += [query, key, value, main]

    of_streams = Stream(
        2 * streams * of_tokens.numel, 2 * tokens, buckets[1], masks[1],
        casts_mask=True,
    )  # fmt: skip
    queries = t.concatenate(*stream_queries)
    keys = _joined(t, main_key, stream_keys)
    states = t.concatenate(*stream_hidden)
    values = _joined(t, main_value, stream_values)
    scores = contraction(t, queries, keys, of_streams.numel, spec.head_dim, Turned())
    with t.declared_weights():
        bias = copied_linear(t, states, _BIAS, hidden, spec.bias_width, bias=True)
    laid = t.scale(bias, OperationKind.CLONE)
    found = _gathered(t, laid, _index(t, of_streams), of_streams)
    weights, kept = _weights(t, scores, found, of_streams, spec)
    held += [queries, keys, states, values, *kept]
    numel = streams * piece
    out = contraction(t, weights, values, numel, of_streams.keys, Turned(second=True))
    out = t.scale(out, OperationKind.CLONE)
    with t.declared_weights():
        ahead = linear(t, out, _OUTPUT, hidden, hidden, bias=True, role=WeightRole.ATTENTION_OUTPUT)
    held.append(ahead)
    context.attention_frame = tuple(held)
    return t.concatenate(main, ahead)


_BIAS, _OUTPUT = "self_attn.relative_positions", "self_attn.o_proj"


def _heads(t: Tape, x: Tensor, context: StackContext) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, scaled, keys and values, each copied to lie head by head."""
    hidden, role = context.hidden_size, WeightRole.QUERY_KEY
    query = linear(t, x, "self_attn.q_proj", hidden, hidden, bias=True, role=role)
    key = linear(t, x, "self_attn.k_proj", hidden, hidden, bias=True, role=role)
    value = linear(t, x, "self_attn.v_proj", hidden, hidden, bias=True)
    query = t.scale(query, OperationKind.DIV)
    query, key, value = (t.scale(each, OperationKind.CLONE) for each in (query, key, value))
    return query, key, value


def _joined(t: Tape, main: Tensor, streams: list[Tensor]) -> Tensor:
    """For each stream those of the tokens and its own."""
    pairs = [t.concatenate(main, each) for each in streams]
    out = t.concatenate(*pairs)
    t.touch(*pairs)
    return out


def _index(t: Tape, stream: Stream) -> Tensor:
    """Buckets of all heads, widened."""
    repeated, index = (t.tensor(stream.numel, dtype) for dtype in (DType.INT32, DType.INT64))
    t.record(OperationKind.REPEAT, (stream.buckets,), (repeated,))
    t.record(OperationKind.TO, (repeated,), (index,))
    return index


def _gathered(t: Tape, products: Tensor, index: Tensor, stream: Stream) -> Tensor:
    """Of all buckets' products each pair's own."""
    out = t.tensor(stream.numel, products.dtype)
    scratch = products.storage.num_bytes if t.decomposed else 0
    t.record(
        OperationKind.GATHER, (products, index), (out,), saves=(products, index),
        gradients=(Gradient.FRESH, Gradient.NONE), backward_scratch_bytes=scratch,
    )  # fmt: skip
    return out


def _weights(
    t: Tape, scores: Tensor, bias: Tensor, stream: Stream, spec: FutureTokensSpec
) -> tuple[Tensor, list[Tensor]]:
    """Scores with bias and mask, their fp32 softmax cast back, dropout; what variables hold meanwhile."""
    biased = t.add(scores, bias)
    t.touch(scores)
    mask, held = stream.mask, [bias]
    if stream.casts_mask and mask.dtype is not biased.dtype:
        cast = t.tensor(stream.numel, biased.dtype)
        t.record(OperationKind.TO, (mask,), (cast,))
        mask = cast
        held.append(cast)
    masked = t.add(biased, mask)
    t.touch(biased)
    weights = t.cast(softmax(t, masked, dtype=DType.FP32), masked.dtype)
    weights = dropout(t, weights, spec.dropout)
    t.linger(weights)
    return weights, [*held, masked]


def stream_loss(
    t: Tape, model: ModelSpec, spec: FutureTokensSpec, x: Tensor, table: Parameter
) -> Tensor:
    """Logits of all streams but the tokens' own, and their mean loss."""
    several = t.options.batch_size > 1 and spec.num_streams > 1
    rows = x.numel // (1 + spec.num_streams) * spec.num_streams
    states = t.slice(x, rows)
    if t.options.batch_size > 1:
        states = t.contiguous(states)
    logits = output_matrix(t, model, model.head, states, table)
    first = t.view(logits, logits.numel // spec.num_streams)
    if several:
        first = t.tensor(first.numel, logits.dtype)
        t.record(OperationKind.CLONE, (logits,), (first,))
    labels = t.tensor(logits.numel // model.vocab_size, DType.INT64)
    t.record(OperationKind.ZEROS, (), (labels,))
    turned = logits
    if several:
        turned = t.scale(logits, OperationKind.CLONE)
    loss = cross_entropy(t, t.cast(turned, DType.FP32), labels)
    t.returned.append(logits)
    t.touch(turned, first, logits)
    return loss
