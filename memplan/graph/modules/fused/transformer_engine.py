"""TransformerEngine's functions on handles: norm and product in one, products in 16 bits or 8, rotary embeddings, attention over
sequences that several ranks share.

TransformerEngine 2.11, pytorch/module/layernorm_linear.py (``_LayerNormLinear``), linear.py (``_Linear``), attention/rope.py
(``FusedRoPEFunc``), attention/dot_product_attention/context_parallel.py (``AttnFuncWithCPAndKVP2P``,
``flash_attn_a2a_communicate``); Megatron-core 0.16.1, core/fusions/fused_mla_yarn_rope_apply.py. Userbuffers
(``tp_comm_overlap``) are off.
"""

from collections.abc import Sequence

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import Shape as Sizes
from memplan.graph.attention.ring import ring_sends
from memplan.graph.attention.scratch import cudnn_backward_scratch, flash_backward_scratch
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tensors import allocated_bytes
from memplan.graph.modules.fused.megatron import (
    FRESH,
    apply,
    column_sends,
    product,
    row_sends,
    sequence_ranks,
    statistics_of,
    weight_gradient,
)
from memplan.graph.modules.fused.narrow import (
    narrow_blocks,
    narrow_formats,
    narrow_product,
    narrow_sends,
)
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.strides import Shape
from memplan.training.choices_of_kernels.sdpa import ScoreKernel
from memplan.training.splitting.exchange import ExchangeKind, Group, both_ways


def norm_product(
    x: Handle, weight: Handle, norms: Sequence[Handle], bias: Handle | None = None
) -> Handle:
    """Keeps its input, the normed input and its statistics, which are this rank's share.

    With sequence parallelism the normed input is gathered for the product, and in backward again; the whole input gradient
    stays until the function returns. In 8 bits the normed input is there as codes alone, or in 16 bits until their scale is
    known.
    """
    run, (columns, width) = x.run, weight.shape
    ranks, own = sequence_ranks(run), x.record.storage.num_bytes
    rows, whole, is_gathered = x.numel // width * ranks, own * ranks, ranks > 1
    sends, formats = column_sends(run, rows * width), narrow_formats(run)
    if formats is None:
        kept, forward = empty(run, x.shape, x.dtype), [whole] * is_gathered
        backward = [whole, whole, own, ~0] if is_gathered else [whole]
    else:
        sends, share = narrow_sends(run, formats, sends), rows // ranks
        kept, codes, back = narrow_blocks(formats, weight, share, rows, is_gathered=is_gathered)
        forward = [own] * formats.scales_first + codes
        backward = [*back, whole] + [own] * is_gathered
    statistics = statistics_of(x, norms)
    made = empty(run, (x.shape[0] * ranks, x.shape[1], columns), run.compute)
    given = [x, *norms, weight] if bias is None else [x, *norms, weight, bias]
    gradients = (FRESH,) * (1 + len(norms)) + (weight_gradient(run), FRESH)
    apply(
        OperationKind.LINEAR, given, [kept, *statistics, made], [x, kept, *statistics, weight],
        gradients[: len(given)], forward=forward, backward=backward, sends=sends,
        flops=2 * rows * width * columns,
    )  # fmt: skip
    return made


def column_product(x: Handle, weight: Handle) -> Handle:
    """With this rank's columns, of what was normed elsewhere."""
    run, ranks, formats = x.run, sequence_ranks(x.run), narrow_formats(x.run)
    length, whole = x.shape[0] * ranks, (x.record.storage.num_bytes * ranks,) * (ranks > 1)
    sends = column_sends(run, x.numel * ranks)
    if formats is None:
        return product(x, weight, length, forward=whole, backward=whole * 2, sends=sends)
    return narrow_product(
        formats, x, weight, length, backward=whole, sends=sends, is_gathered=ranks > 1
    )


def row_product(x: Handle, weight: Handle) -> Handle:
    """With this rank's rows, added up; with sequence parallelism its gradient is gathered first."""
    run, (columns, width) = x.run, weight.shape
    ranks, formats, numel = sequence_ranks(run), narrow_formats(run), x.numel // width * columns
    whole = (allocated_bytes(numel, run.compute),) * (ranks > 1)
    length, sends = x.shape[0] // ranks, row_sends(run, numel)
    if formats is None:
        return product(x, weight, length, forward=whole, backward=whole, sends=sends)
    return narrow_product(formats, x, weight, length, forward=whole, sends=sends)


def own_product(x: Handle, weight: Handle) -> Handle:
    """Of a rank's own rows, with a weight that it has whole, or with those of its experts."""
    formats = narrow_formats(x.run)
    if formats is None:
        return product(x, weight, x.shape[0])
    return narrow_product(formats, x, weight, x.shape[0])


def turned(x: Handle, angles: Handle) -> Handle:
    """Rotary embeddings: one kernel into a new tensor, which keeps the angles alone."""
    made = empty(x.run, x.shape, x.dtype)
    apply(OperationKind.ROTARY, [x, angles], [made], [angles], (FRESH, Gradient.NONE))
    return made


def turned_in_place(query: Handle) -> Handle:
    """Latent attention's queries where they lie, and their gradient too."""
    made = query.like(query.run.view(query.record, query.numel))
    apply(OperationKind.ROTARY, [query], [made], gradients=(Gradient.ALIAS,))
    return made


def keys_and_values(
    wide: Handle, position: Handle, key: Shape, value: Shape
) -> tuple[Handle, Handle]:
    """Latent attention's, laid out anew, the keys with what is turned of them."""
    made = empty(wide.run, key, wide.dtype), empty(wide.run, value, wide.dtype)
    apply(OperationKind.ROTARY, [wide, position], made, gradients=(FRESH, FRESH))
    return made


def ring(
    kernel: ScoreKernel, query: Handle, key: Handle, value: Handle, sizes: Sizes, ranks: int
) -> Handle:
    """Keys and values of all ranks one after another, the partial results corrected and added up.

    Kept are the queries, the keys and values that came last, the output and its log-sums. The rank whose
    tokens see all others' is looked at: each of its partial results is whole (``AttnFuncWithCPAndKVP2P``).
    """
    run, spec = query.run, sizes.spec
    both = empty(run, (2, *key.shape), run.compute)
    made = empty(run, (*query.shape[:2], query.shape[2] * query.shape[3]), run.compute)
    sums = empty(run, query.shape[:3], DType.FP32)
    pair, partial = both.record.storage.num_bytes, made.record.storage.num_bytes
    kind = OperationKind.FLASH_ATTENTION
    inner: tuple[int, ...] = () if run.decomposed else flash_backward_scratch(sizes, made.record)
    if kernel is ScoreKernel.CUDNN:
        kind = OperationKind.CUDNN_ATTENTION
        inner = (cudnn_backward_scratch(run, sizes, key.record),)
    apply(
        kind, [query, key, value], [both, made, sums], [query, both, made, sums], (FRESH,) * 3,
        forward=((ranks - 1) * pair, ranks * partial),
        # Two buffers of keys, values and their gradients; a step's own gradients and its scratch.
        backward=(4 * pair, partial + pair, *filter(None, inner)),
        flops=4 * sizes.rows * sizes.queries * ranks * spec.num_heads * spec.head_dim,
        sends=ring_sends(pair, pair, ranks),
    )  # fmt: skip
    return made


def to_heads(ranks: int, *given: Handle) -> list[Handle]:
    """Some heads of all tokens in place of all heads of some: copies are sent, and what comes is sorted.

    What is sent stays until all of it has come (``flash_attn_a2a_communicate``).
    """
    made = []
    for each in given:
        length, batch, heads, width = each.shape
        made.append(empty(each.run, (length * ranks, batch, heads // ranks, width), each.dtype))
    sent = sum(each.record.storage.num_bytes for each in made)
    apply(
        OperationKind.ALL_TO_ALL, given, made, gradients=(FRESH,) * len(given), forward=(sent,),
        backward=(sent, *(RESULT,) * len(given)),
        sends=both_ways(ExchangeKind.ALL_TO_ALL, sent, Group.SHARED),
    )  # fmt: skip
    return made


def to_tokens(ranks: int, x: Handle) -> Handle:
    """Back: sorted, sent, and laid head by head of each token."""
    made = empty(x.run, (x.shape[0] // ranks, x.shape[1], x.shape[2] * ranks), x.dtype)
    size = made.record.storage.num_bytes
    apply(
        OperationKind.ALL_TO_ALL, [x], [made], forward=(size, size), backward=(size, size),
        sends=both_ways(ExchangeKind.ALL_TO_ALL, size, Group.SHARED),
    )  # fmt: skip
    return made
