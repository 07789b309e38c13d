"""Keys and values that stand for windows of tokens, and the choice among them (DeepSeek-V4).

An entry is the weighted sum of its window's states, the weights a softmax of gates over the window, in
fp32. Where windows overlap each also has the one before, by projections of its own
(``DeepseekV4CSACompressor``). The indexer compresses once more, in narrower heads, and scores every
token's queries with the entries; nothing that is chosen has a gradient, so all it made goes when it
returns.
"""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import broadcast
from memplan.graph.attention.rotary import half_tables, turn_last
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.elementwise import softmax
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.stack_context import StackContext
from memplan.model.attention import AttentionSpec
from memplan.model.compressed import CompressedAttentionSpec, CompressorSpec
from memplan.model.latent import IndexerSpec
from memplan.model.norms import NormSpec

NAME = "self_attn.compressor"


def compressed_entries(
    t: Tape,
    x: Tensor,
    narrow: Tensor,
    compressor: CompressorSpec,
    spec: CompressedAttentionSpec,
    context: StackContext,
) -> tuple[Tensor, Tensor]:
    """The entries of every sequence, and which of them each token may see."""
    entries, held = _entries(t, x, NAME, compressor, spec.scores, spec.norm, context)
    count = windows_of(context, compressor)
    pairs = context.batch * context.seq_len * count
    if compressor.indexer is not None:
        chosen = _choice(t, x, narrow, compressor, compressor.indexer, spec, context)
        valid = t.tensor(chosen.numel, DType.BOOL)
        t.record(OperationKind.GE, (chosen,), (valid,))
        safe = t.tensor(chosen.numel, DType.INT64)
        scratch = safe.storage.num_bytes
        t.record(OperationKind.WHERE, (valid, chosen), (safe,), forward_scratch_bytes=scratch)
        bias = t.tensor(pairs + context.batch * context.seq_len, t.compute)
        t.record(OperationKind.SCATTER, (safe,), (bias,))
        t.touch(*held, chosen, valid, safe)
        return entries, bias
    blank, later = t.tensor(pairs, t.compute), t.tensor(context.seq_len * count, DType.BOOL)
    t.record(OperationKind.ZEROS, (), (blank,))
    t.record(OperationKind.GE, (), (later,))
    bias = t.tensor(pairs, t.compute)
    t.record(OperationKind.MASKED_FILL, (blank, later), (bias,))
    t.touch(*held)
    return entries, bias


def windows_of(context: StackContext, compressor: CompressorSpec) -> int:
    """Whole windows of a sequence; a shorter one is counted as one that fills a window."""
    return max(1, context.seq_len // compressor.rate)


def _entries(
    t: Tape,
    x: Tensor,
    name: str,
    compressor: CompressorSpec,
    scores: AttentionSpec,
    normed_by: NormSpec,
    context: StackContext,
) -> tuple[Tensor, list[Tensor]]:
    """One for each whole window, turned by where it begins; and what the module's variables hold."""
    hidden, head, rate = context.hidden_size, scores.head_dim, compressor.rate
    width = 2 * head if compressor.overlapping else head
    bias = t.parameter(f"{name}.position_bias", rate, width)
    states = linear(t, x, f"{name}.kv_proj", hidden, width)
    gate = linear(t, x, f"{name}.gate_proj", hidden, width)
    windows = context.batch * windows_of(context, compressor)
    cut = t.slice(states, windows * rate * width)
    summand = t.add(t.slice(gate, windows * rate * width), bias)
    held = [gate, states, summand]
    gates = summand
    if compressor.overlapping:
        cut, gates = (_with_previous(t, each, windows * 2 * rate * head) for each in (cut, summand))
        held.append(gates)
    weights = t.cast(softmax(t, gates, dtype=DType.FP32), cut.dtype)
    product = t.mul(cut, weights)
    total = t.tensor(windows * head, product.dtype)
    t.record(OperationKind.SUM, (product,), (total,), gradients=(Gradient.ALIAS,))
    made = norm(t, total, normed_by, f"{name}.kv_norm", head)
    assert scores.rotary is not None
    positions = t.tensor(windows, DType.INT64)
    t.record(OperationKind.ARANGE, (), (positions,))
    tables = half_tables(t, windows, scores.rotary.dim // 2, t.compute)
    turned = turn_last(t, made, scores, *tables)
    return turned, [*held, positions, *tables]


def _with_previous(t: Tape, x: Tensor, numel: int) -> Tensor:
    """Half of each window's states behind the other half of the window before, copied into blanks.

    Each of two copies hands its gradient on through a copy of the whole.
    """
    out = t.tensor(numel, x.dtype)
    size = out.storage.num_bytes
    t.record(
        OperationKind.COPY_SLICE, (x,), (out,), gradients=(Gradient.FRESH,),
        backward_scratch_bytes=(size, size, size // 2),
    )  # fmt: skip
    return out


def _choice(
    t: Tape,
    x: Tensor,
    narrow: Tensor,
    compressor: CompressorSpec,
    indexer: IndexerSpec,
    spec: CompressedAttentionSpec,
    context: StackContext,
) -> Tensor:
    """The entries that each token attends to: ``DeepseekV4Indexer``."""
    start = len(t.segment.operations)
    declared = len(t.segment.parameters)
    own = AttentionSpec(
        num_heads=indexer.num_heads, num_kv_heads=1, head_dim=indexer.head_dim,
        rotary=spec.scores.rotary,
    )  # fmt: skip
    name = f"{NAME}.indexer"
    entries, held = _entries(t, x, name, compressor, own, spec.norm, context)
    rotary = spec.scores.rotary
    assert rotary is not None
    tables = half_tables(t, context.seq_len, rotary.dim // 2, t.compute)
    query = linear(
        t, narrow, f"{name}.q_b_proj", spec.query_rank, indexer.num_heads * indexer.head_dim
    )
    query = turn_last(t, query, own, *tables)
    chosen = _best(t, x, query, entries, compressor, indexer, context)
    t.touch(*held, entries, *tables, query)
    _let_go(t, start, declared)
    return chosen


def _best(
    t: Tape,
    x: Tensor,
    query: Tensor,
    entries: Tensor,
    compressor: CompressorSpec,
    indexer: IndexerSpec,
    context: StackContext,
) -> Tensor:
    """Scores of all heads, weighted and added, and the largest of each row."""
    rows, count = context.batch * context.seq_len, windows_of(context, compressor)
    full = t.cast(query, DType.FP32), t.cast(entries, DType.FP32)
    # The product merges batch and rows: queries are copied into rows, keys once for each row.
    left = t.scale(full[0], OperationKind.CLONE)
    right = broadcast(t, full[1], full[1].numel * context.seq_len)
    if t.autocast is not None:
        left, right = t.cast(left, t.autocast), t.cast(right, t.autocast)
    products = t.tensor(rows * indexer.num_heads * count, left.dtype)
    t.record(
        OperationKind.MATMUL, (left, right), (products,), saves=(left, right),
        gradients=(Gradient.FRESH,) * 2, flops=2 * products.numel * indexer.head_dim,
    )  # fmt: skip
    t.touch(*full)
    positive = t.scale(t.elementwise(OperationKind.RELU, products))
    t.touch(products)
    weights = linear(
        t, x, f"{NAME}.indexer.scorer.weights_proj", context.hidden_size, indexer.num_heads
    )
    weights = t.scale(t.cast(weights, DType.FP32))
    weighted = t.mul(positive, weights)
    total = t.tensor(rows * count, weighted.dtype)
    t.record(OperationKind.SUM, (weighted,), (total,), gradients=(Gradient.ALIAS,))
    chosen = _largest(t, total, rows, indexer, context)
    t.touch(weights)
    return chosen


def _largest(
    t: Tape, total: Tensor, rows: int, indexer: IndexerSpec, context: StackContext
) -> Tensor:
    """The places of each row's largest scores among windows that are not later."""
    count = total.numel // rows
    later = t.tensor(context.seq_len * count, DType.BOOL)
    t.record(OperationKind.GE, (), (later,))
    masked = t.tensor(total.numel, total.dtype)
    t.record(
        OperationKind.MASKED_FILL, (total, later), (masked,), saves=(later,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    number = rows * min(indexer.top_k, count)
    best, places = t.tensor(number, masked.dtype), t.tensor(number, DType.INT64)
    t.record(
        OperationKind.TOPK, (masked,), (best, places), saves=(places,), gradients=(Gradient.NONE,)
    )
    invalid, chosen = t.tensor(number, DType.BOOL), t.tensor(number, DType.INT64)
    t.record(OperationKind.GE, (places,), (invalid,))
    scratch = chosen.storage.num_bytes
    t.record(OperationKind.WHERE, (invalid, places), (chosen,), forward_scratch_bytes=scratch)
    t.touch(masked, later, places, invalid)
    return chosen


def _let_go(t: Tape, start: int, declared: int) -> None:
    """Nothing of it has a gradient: what its operations kept stays until here, and no longer.

    A checkpointed layer's operations keep nothing in the first place.
    """
    operations = t.segment.operations[start:]
    made = {each.storage for operation in operations for each in operation.outputs}
    for operation in operations:
        for storage in operation.saved:
            if storage in made and not t.segment.checkpointed:
                storage.last_read = len(t.segment.operations) - 1
        operation.forget()
    for weight in t.segment.parameters[declared:]:
        weight.unused = True
