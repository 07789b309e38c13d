"""Funnel Transformer: blocks of layers, each on half the tokens of the one before, and a decoder on all.

transformers 5.23, models/funnel/modeling_funnel.py, with relative positions by shifting and queries alone pooled.
Every result of the encoder's layers waits in a tuple until the model returns.
"""

from memplan.dtypes import DType
from memplan.graph.contraction import Turned, contraction
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient, Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import dropout, dropout_probability
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.funnel import FunnelSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole


class _Inputs:
    """What all layers of an encoder or a decoder are handed beside the states."""

    def __init__(self, t: Tape, spec: FunnelSpec, context: StackContext) -> None:
        batch, length, dtype = context.batch, context.seq_len, t.compute
        hidden, half = context.hidden_size, 4 * length * (context.hidden_size // 2)
        self.spans = spec.distances(length)
        self.held: list[Tensor] = []
        """What goes when the encoder or the decoder returns."""
        angles, sines, cosines = (t.tensor(half, dtype) for _ in range(3))
        t.record(OperationKind.MUL, (), (angles,))
        scratch = angles.storage.num_bytes
        if dropout_probability(t, spec.dropout):
            scratch += allocated_bytes(half, DType.BOOL)
        for kind, made in ((OperationKind.SIN, sines), (OperationKind.COS, cosines)):
            t.record(kind, (angles,), (made,), forward_scratch_bytes=scratch)
        table = t.tensor(2 * half, dtype)
        t.record(OperationKind.CAT, (sines, cosines), (table,))
        self.places: list[tuple[Tensor | None, Tensor]] = []
        for pair in self.spans:
            found = [self._gathered(t, table, count * hidden) if count else None for count in pair]
            self.held += [each for each in found if each is not None]
            assert found[1] is not None
            self.places.append((found[0], found[1]))
        t.touch(angles, sines, cosines, table)
        pairs = t.tensor(batch * length**2, DType.BOOL)
        t.record(OperationKind.EQ, (), (pairs,), forward_scratch_bytes=2 * pairs.storage.num_bytes)
        self.same = pairs
        self.apart: Tensor | None = None
        if spec.keeps_first:
            self.apart = t.tensor(length**2, dtype)
            t.record(OperationKind.PAD, (), (self.apart,))
        for each in (pairs, self.apart):
            if each is not None:
                self._hold(t, each)

    def _hold(self, t: Tape, tensor: Tensor) -> None:
        t.hold(tensor)
        self.held.append(tensor)

    def let_go(self, t: Tape) -> None:
        """Nothing holds them any more when the present segment is over."""
        for each in self.held:
            t.release(each)

    @staticmethod
    def _gathered(t: Tape, table: Tensor, numel: int) -> Tensor:
        out = t.tensor(numel, table.dtype)
        t.record(OperationKind.GATHER, (table,), (out,))
        t.hold(out)
        return out

    def pool(self, t: Tape, batch: int, rows: int, columns: int, *, keeps_first: bool) -> None:
        """Rows or columns of the masks, every other one: a view of what the first is joined to."""
        if not keeps_first:
            return
        longer = t.tensor(batch * rows * columns, DType.BOOL)
        t.record(OperationKind.CAT, (self.same,), (longer,))
        self.same = longer
        self._hold(t, longer)
        if self.apart is not None:
            wider = t.tensor(rows * columns, self.apart.dtype)
            t.record(OperationKind.CAT, (self.apart,), (wider,))
            self.apart = wider
            self._hold(t, wider)


def run_funnel(t: Tape, spec: FunnelSpec, x: Tensor, context: StackContext) -> Tensor:
    """The encoder's blocks, and the decoder's layers where there are some; the embeddings are there."""
    inputs = _Inputs(t, spec, context)
    t.end(x)
    lengths = spec.lengths(context.seq_len)
    number, first = 0, x
    for block, (size, repeats) in enumerate(zip(spec.block_sizes, spec.block_repeats, strict=True)):
        for place in range(size):
            owner: Segment | None = None
            for turn in range(repeats):
                _begin(t, "encoder.layers", number, x, owner)
                pools = not place and not turn and lengths[block] != lengths[max(block - 1, 0)]
                keys = lengths[block - 1] if pools else lengths[block]
                x = _encoder_layer(t, x, spec, context, inputs, block, (lengths[block], keys))
                owner = owner or t.segment
                t.cache(x)
                t.end(x)
            number += 1
        first = x if not block else first
    inputs.let_go(t)
    x = _upsampled(t, x, first, spec, lengths)
    context.seq_len = lengths[0]
    inputs = _Inputs(t, spec, context)
    t.end(x)
    for _ in range(spec.decoder_layers):
        _begin(t, "decoder.layers", number, x, None)
        x = _layer(
            t,
            x,
            x,
            spec,
            context,
            inputs,
            (inputs.places[0][1], inputs.spans[0][1]),
            (lengths[0],) * 2,
        )
        t.end(x)
        number += 1
    t.release_cache()
    t.cached.clear()
    return x


def _begin(t: Tape, name: str, number: int, x: Tensor, again: Segment | None) -> None:
    freeze = t.options.freeze
    frozen = freeze.encoder or freeze.freezes_layer(number)
    t.begin(name, part=ModelPart.LAYERS, frozen=frozen, again=again, x=x)


def _encoder_layer(
    t: Tape,
    x: Tensor,
    spec: FunnelSpec,
    context: StackContext,
    inputs: _Inputs,
    block: int,
    lengths: tuple[int, int],
) -> Tensor:
    """A layer, before whose first one of a block queries are pooled, and behind it what is beside them."""
    rows, columns = lengths
    before, among = inputs.places[block]
    spans = inputs.spans[block]
    if rows == columns:
        return _layer(t, x, x, spec, context, inputs, (among, spans[1]), lengths)
    assert before is not None
    extra = 1 if spec.keeps_first else 0
    inputs.pool(t, context.batch, columns + extra, columns, keeps_first=spec.keeps_first)
    pooled = _pooled(t, x, spec, context, rows)
    out = _layer(t, pooled, x, spec, context, inputs, (before, spans[0]), lengths)
    inputs.pool(t, context.batch, rows, columns + extra, keeps_first=spec.keeps_first)
    return out


def _pooled(t: Tape, x: Tensor, spec: FunnelSpec, context: StackContext, rows: int) -> Tensor:
    """The average of every two tokens, the first of which stays alone."""
    given = x
    if spec.keeps_first:
        first = t.slice(x, context.batch * context.hidden_size)
        rest = t.slice(x, x.numel - first.numel) if spec.truncates else x
        given = t.concatenate(first, rest)
    out = t.tensor(context.batch * rows * context.hidden_size, x.dtype)
    t.record(
        OperationKind.AVERAGE_POOL, (given,), (out,), saves=(given,), gradients=(Gradient.FRESH,)
    )
    return out


def _upsampled(t: Tape, x: Tensor, first: Tensor, spec: FunnelSpec, lengths: list[int]) -> Tensor:
    """Every token as often as it stands for others, cut to length, plus what the first block gave."""
    t.begin("decoder.embed", part=ModelPart.OTHER, x=x)
    stride = 2 ** (len(spec.block_sizes) - 1)
    if stride > 1:
        row = x.numel // lengths[-1]
        rest = x
        if spec.keeps_first:
            rest = t.slice(x, x.numel - row)
        repeated = t.tensor(rest.numel * stride, x.dtype)
        t.record(OperationKind.REPEAT_INTERLEAVE, (rest,), (repeated,), gradients=(Gradient.FRESH,))
        wanted = (lengths[0] - spec.keeps_first) * row
        if spec.keeps_first and spec.truncates:
            padded = t.tensor(repeated.numel + (stride - 1) * row, x.dtype)
            t.record(OperationKind.PAD, (repeated,), (padded,), gradients=(Gradient.FRESH,))
            repeated = padded
        cut = t.slice(repeated, wanted)
        x = t.concatenate(t.slice(x, row), cut) if spec.keeps_first else cut
        t.hold(x)
    return t.add(x, first)


def _layer(
    t: Tape,
    query: Tensor,
    key: Tensor,
    spec: FunnelSpec,
    context: StackContext,
    inputs: _Inputs,
    distances: tuple[Tensor, int],
    lengths: tuple[int, int],
) -> Tensor:
    """Attention and the network, each with a sum and a norm behind it."""
    hidden = context.hidden_size
    t.block = LayerBlock.ATTENTION
    attended = _attention(t, query, key, spec, context, inputs, distances, lengths)
    t.block = LayerBlock.NETWORK
    up = linear(t, attended, "mlp.up_proj", hidden, spec.network.intermediate_size, bias=True)
    middle = activation(t, up, spec.network.activation)
    t.touch(up)
    middle = dropout(t, middle, spec.network.activation_dropout)
    down = linear(t, middle, "mlp.down_proj", spec.network.intermediate_size, hidden, bias=True)
    dropped = dropout(t, down, spec.dropout)
    t.touch(down)
    out = norm(t, t.add(attended, dropped), spec.norm, "final_layer_norm", hidden)
    t.touch(dropped)
    return out


def _attention(
    t: Tape,
    x: Tensor,
    key_states: Tensor,
    spec: FunnelSpec,
    context: StackContext,
    inputs: _Inputs,
    distances: tuple[Tensor, int],
    lengths: tuple[int, int],
) -> Tensor:
    """Scores of contents, of distances and of segments, added up."""
    hidden, width = context.hidden_size, spec.num_heads * spec.head_dim
    rows, columns = lengths
    several = context.batch > 1
    plain = linear(t, x, "self_attn.q_proj", hidden, width, role=WeightRole.QUERY_KEY)
    key = linear(
        t, key_states, "self_attn.k_proj", hidden, width, bias=True, role=WeightRole.QUERY_KEY
    )
    value = linear(t, key_states, "self_attn.v_proj", hidden, width, bias=True)
    query = t.scale(plain)
    t.touch(plain)
    pairs = context.batch * spec.num_heads * rows * columns
    word_bias = t.scale(_vector(t, "r_w_bias", spec))
    shifted = t.add(query, word_bias)
    contents = contraction(
        t, shifted, key, pairs, spec.head_dim, Turned(first=several, second=several)
    )
    t.touch(shifted)
    positional = _positions(t, query, spec, hidden, distances, rows, context.batch, pairs)
    positional = _apart(t, positional, inputs.apart)
    segments = _segments(t, query, spec, inputs.same, context.batch * rows, pairs)
    segments = _apart(t, segments, inputs.apart)
    both = t.add(contents, positional)
    scores = t.add(both, segments)
    t.touch(both)
    full = t.cast(scores, DType.FP32)
    if full is not scores:
        t.touch(scores)
    masked = t.tensor(full.numel, DType.FP32)
    t.record(OperationKind.SUB, (full,), (masked,), gradients=(Gradient.ALIAS,))
    t.touch(full)
    narrow = t.cast(masked, scores.dtype)
    soft = t.tensor(narrow.numel, narrow.dtype)
    t.record(
        OperationKind.SOFTMAX, (narrow,), (soft,), saves=(soft,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=0 if t.decomposed else soft.storage.num_bytes,
    )  # fmt: skip
    weights = dropout(t, soft, spec.attention_dropout)
    out = contraction(
        t, weights, value, context.batch * rows * width, columns, Turned(second=several)
    )
    laid = t.scale(out, OperationKind.CLONE)
    made = linear(
        t, laid, "self_attn.o_proj", width, hidden, bias=True, role=WeightRole.ATTENTION_OUTPUT
    )
    dropped = dropout(t, made, spec.dropout)
    t.touch(made)
    result = norm(t, t.add(x, dropped), spec.norm, "self_attn_layer_norm", hidden)
    t.touch(
        query, key, value, word_bias, contents, positional, segments, masked, weights, out, dropped
    )
    return result


def _vector(t: Tape, name: str, spec: FunnelSpec) -> Parameter:
    return t.parameter(
        f"self_attn.{name}",
        spec.num_heads,
        spec.head_dim,
        module="self_attn",
        role=WeightRole.OTHER,
    )


def _positions(
    t: Tape,
    query: Tensor,
    spec: FunnelSpec,
    hidden: int,
    distances: tuple[Tensor, int],
    rows: int,
    batch: int,
    pairs: int,
) -> Tensor:
    """Queries against projected distances, shifted until each pair has its own."""
    table, span = distances
    bias = t.scale(_vector(t, "r_r_bias", spec))
    kernel = t.parameter(
        "self_attn.r_kernel", hidden, spec.num_heads, spec.head_dim, module="self_attn"
    )
    width = spec.num_heads * spec.head_dim
    heads = contraction(t, table, t.cast_weight(kernel), span * width, hidden, Turned())
    biased = t.add(query, bias)
    numel = batch * spec.num_heads * rows * span
    found = contraction(t, biased, heads, numel, spec.head_dim, Turned())
    t.touch(bias)
    return t.slice(t.slice(found, numel - rows * batch * spec.num_heads), pairs)


def _segments(
    t: Tape, query: Tensor, spec: FunnelSpec, same: Tensor, rows: int, pairs: int
) -> Tensor:
    """One of two scores for each pair: whether both are of one segment."""
    bias = t.scale(_vector(t, "r_s_bias", spec))
    table = t.parameter("self_attn.seg_embed", 2, spec.num_heads, spec.head_dim, module="self_attn")
    biased = t.add(query, bias)
    scores = contraction(
        t, biased, t.cast_weight(table), rows * spec.num_heads * 2, spec.head_dim, Turned()
    )
    half = scores.numel // 2
    other, own = t.split(scores, half, half)
    out = t.tensor(pairs, scores.dtype)
    whole = out.storage.num_bytes
    t.record(
        OperationKind.WHERE, (same, own, other), (out,), saves=(same,),
        gradients=(Gradient.NONE, whole, whole),
    )  # fmt: skip
    t.touch(bias, scores)
    return out


def _apart(t: Tape, scores: Tensor, mask: Tensor | None) -> Tensor:
    """Times a mask of the first token, in place."""
    if mask is None:
        return scores
    out = t.view(scores, scores.numel)
    t.record(
        OperationKind.MUL_IN_PLACE, (scores, mask), (out,), saves=(mask,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out
