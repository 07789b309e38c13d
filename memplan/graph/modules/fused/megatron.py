"""Megatron-core's own functions on handles: what each keeps, what it takes on its way, and what ranks send inside.

Megatron-core 0.16.1, core/tensor_parallel/layers.py (``LinearWithGradAccumulationAndAsyncCommunication``), mappings.py and
cross_entropy.py, core/fusions, core/transformer/dot_product_attention.py and moe/moe_utils.py.
"""

from collections.abc import Sequence
from functools import partial

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient, Operation
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layouts import Straightened, always, in_rows
from memplan.graph.modules.run import Run
from memplan.graph.modules.strides import Shape
from memplan.graph.operations.lookups import behind_copy, embedding_backward_scratch
from memplan.training.splitting.exchange import NO_SENDS, ExchangeKind, Group, Send, Sends
from memplan.training.splitting.megatron import LossFusion, MegatronLayers, TransformerImpl

ONE_OF_TWO = 0.5
"""Of a product's backward pass, the gradient of its input, or that of its weight."""
FRESH = Gradient.FRESH


def settings_of(run: Run) -> MegatronLayers:
    """Megatron's settings."""
    settings = run.options.megatron
    assert settings is not None
    return settings


def tensor_ranks(run: Run) -> int:
    """Ranks that split the layers."""
    group = run.options.tensor_parallel
    return 1 if group is None else group.degree


def sequence_ranks(run: Run) -> int:
    """Ranks of which each has a share of every sequence between the split blocks."""
    group = run.options.tensor_parallel
    return group.degree if group is not None and group.sequence else 1


def use_global_buffer(run: Run, numel: int) -> None:
    """Take a tensor out of the global buffer, which is made anew where it is too small.

    (core/utils.py, ``GlobalMemoryBuffer.get_tensor``)
    """
    size = allocated_bytes(numel, run.compute)
    if size > max(run.buffers_in_use, default=0):
        run.buffers_in_use += (size,)


def apply(
    kind: OperationKind,
    given: Sequence[Handle],
    made: Sequence[Handle],
    saves: Sequence[Handle] = (),
    gradients: Sequence[int] = (FRESH,),
    *,
    forward: Sequence[int] = (),
    backward: Sequence[int] = (),
    flops: int = 0,
    sends: Sends = NO_SENDS,
    in_python: bool = True,
) -> None:
    """Record an ``autograd.Function``, or what of torch's has a rule of its own here.

    ``forward`` and ``backward`` are blocks that come and go on its way, before its results where these are not among them.
    """
    inputs, outputs, kept = ([each.record for each in some] for some in (given, made, saves))
    given[0].run.record(
        kind, inputs, outputs, saves=kept, gradients=gradients, flops=flops, sends=sends,
        forward_scratch_bytes=_before_results(forward), in_python=in_python,
        backward_scratch_bytes=_before_results(backward),
    )  # fmt: skip


def _before_results(blocks: Sequence[int]) -> Sequence[int]:
    return blocks if not blocks or RESULT in blocks else (*blocks, RESULT)


# -- products ------------------------------------------------------------------------------------------


def weight_gradient(run: Run) -> Gradient:
    """How a product's weight gets its gradient: written into the main gradients, while autograd is handed a tensor that all
    weights of its shape share (TransformerEngine's ``get_dummy_wgrad``), or a new one."""
    settings = settings_of(run)
    fuses = settings.gradient_accumulation_fusion and settings.wrap_with_ddp
    is_local = settings.transformer_impl is TransformerImpl.LOCAL
    return Gradient.FUSED if fuses and not is_local else FRESH


def product(
    x: Handle,
    weight: Handle,
    length: int,
    *,
    bias: Handle | None = None,
    forward: Sequence[int] = (),
    backward: Sequence[int] = (),
    sends: Sends = NO_SENDS,
) -> Handle:
    """A product of so many tokens that keeps what it is given."""
    run, (columns, width) = x.run, weight.shape[-2:]
    made = empty(run, (length, *x.shape[1:-1], columns), run.compute)
    given = [x, weight] if bias is None else [x, weight, bias]
    gradients = (FRESH, weight_gradient(run), FRESH)[: len(given)]
    flops = 2 * max(x.numel // width, made.numel // columns) * width * columns
    apply(
        OperationKind.LINEAR, given, [made], [x, weight], gradients,
        forward=forward, backward=backward, flops=flops, sends=sends,
    )  # fmt: skip
    return made


def column_product(x: Handle, weight: Handle, bias: Handle | None = None) -> Handle:
    """With this rank's columns, of all tokens.

    With sequence parallelism the input is gathered into the global buffer, in backward again; its gradient is made whole, and
    added up into a share. A bias is added to the product.
    """
    run, ranks, (columns, width) = x.run, sequence_ranks(x.run), weight.shape
    numel = x.numel * ranks
    if ranks > 1:
        use_global_buffer(run, numel)
    whole = allocated_bytes(numel // width * columns, run.compute)
    return product(
        x, weight, x.shape[0] * ranks, bias=bias, forward=(whole,) * (bias is not None),
        backward=(x.record.storage.num_bytes * ranks,) * (ranks > 1),
        sends=column_sends(run, numel),
    )  # fmt: skip


def row_product(x: Handle, weight: Handle) -> Handle:
    """With this rank's rows, then the sum over the ranks: whole, or each its share."""
    return reduced(product(x, weight, x.shape[0]))


def row_product_added_up(x: Handle, weight: Handle) -> Handle:
    """The same at once (Megatron-Kwai's)."""
    run, ranks, (columns, width) = x.run, sequence_ranks(x.run), weight.shape
    numel = x.numel // width * columns
    whole = (allocated_bytes(numel, run.compute),) * (ranks > 1)
    return product(x, weight, x.shape[0] // ranks, forward=whole, sends=row_sends(run, numel))


def _beside_products(run: Run) -> float:
    """Of a product, the share beside which what it reads is gathered, or what it makes added up.

    (Kwai's ``overlap-sp-ag``, ``overlap-sp-rs``)
    """
    return float(settings_of(run).transformer_impl is TransformerImpl.KWAI)


def column_sends(run: Run, numel: int) -> Sends:
    """What a product with columns sends: the tokens' rows, and in backward their gradients, of so many numbers.

    Backward each runs beside one of its two products.
    """
    if tensor_ranks(run) == 1:
        return NO_SENDS
    size = numel * run.compute.num_bytes
    if sequence_ranks(run) == 1:
        return Sends(backward=(Send(ExchangeKind.ALL_REDUCE, size, Group.SPLIT, ONE_OF_TWO),))
    gathers, scatters = (
        Send(kind, size, Group.SPLIT, ONE_OF_TWO)
        for kind in (ExchangeKind.ALL_GATHER, ExchangeKind.REDUCE_SCATTER)
    )
    return Sends((gathers._replace(beside=_beside_products(run)),), (gathers, scatters))


def row_sends(run: Run, numel: int) -> Sends:
    """What a product with rows sends: partial results, which are added up."""
    if tensor_ranks(run) == 1:
        return NO_SENDS
    size, beside = numel * run.compute.num_bytes, _beside_products(run)
    if sequence_ranks(run) == 1:
        return Sends(forward=(Send(ExchangeKind.ALL_REDUCE, size, Group.SPLIT),))
    return Sends(
        forward=(Send(ExchangeKind.REDUCE_SCATTER, size, Group.SPLIT, beside),),
        backward=(Send(ExchangeKind.ALL_GATHER, size, Group.SPLIT, beside * ONE_OF_TWO),),
    )


# -- exchanges that are operations by themselves ---------------------------------------------------------


def exchanged(kind: OperationKind, x: Handle, shape: Shape, sends: Sends = NO_SENDS) -> Handle:
    """What ranks gather, scatter or send one another, or cut off: a new tensor, and in backward too."""
    made = empty(x.run, shape, x.dtype)
    apply(kind, [x], [made], sends=sends, in_python=False)
    return made


def reduced(x: Handle) -> Handle:
    """Partial results of all tokens added up: where they lie, or scattered into shares."""
    ranks = sequence_ranks(x.run)
    if ranks > 1:
        return scattered(x, ranks)
    return x if tensor_ranks(x.run) == 1 else all_reduced(x)


def all_reduced(x: Handle) -> Handle:
    """Added up over the ranks where it lies."""
    made = Handle(x.run, x.run.view(x.record, x.numel), x.shape)
    apply(OperationKind.ALL_REDUCE, [x], [made], gradients=(Gradient.ALIAS,), in_python=False)
    return made


def scattered(x: Handle, ranks: int, group: Group | None = None) -> Handle:
    """Added up into shares; in backward gathered."""
    shape = x.shape[0] // ranks, *x.shape[1:]
    kinds = ExchangeKind.REDUCE_SCATTER, ExchangeKind.ALL_GATHER
    sends = NO_SENDS if group is None else _there_and_back(*kinds, x, x.numel, group)
    return exchanged(OperationKind.REDUCE_SCATTER, x, shape, sends)


def gathered(x: Handle, ranks: int, group: Group) -> Handle:
    """All ranks' shares; in backward added up into shares."""
    shape = x.shape[0] * ranks, *x.shape[1:]
    kinds = ExchangeKind.ALL_GATHER, ExchangeKind.REDUCE_SCATTER
    sends = _there_and_back(*kinds, x, x.numel * ranks, group)
    return exchanged(OperationKind.ALL_GATHER, x, shape, sends)


def _there_and_back(
    there: ExchangeKind, back: ExchangeKind, x: Handle, numel: int, group: Group
) -> Sends:
    size = numel * x.dtype.num_bytes
    return Sends((Send(there, size, group),), (Send(back, size, group),))


# -- the embedding, norms, what is fused element by element ------------------------------------------------


def own_ids(run: Run, shape: Shape) -> tuple[Handle, Handle]:
    """Which ids are other ranks' rows, and numbers of this one's."""
    foreign, ids = empty(run, shape, DType.BOOL), empty(run, shape, DType.INT64)
    run.record(OperationKind.INDICES, (), (foreign.record, ids.record))
    return foreign, ids


def looked_up(table: Handle, shape: Shape, ids: Handle | None) -> Handle:
    """Rows of this rank's part of the table, of which the gradient is."""
    run, width, count = table.run, table.shape[1], shape[0] * shape[1]
    made = empty(run, (*shape, width), table.dtype)
    reads = [] if ids is None else [ids]
    apply(
        OperationKind.EMBEDDING, [table, *reads], [made], reads,
        (FRESH, Gradient.NONE)[: 1 + len(reads)], in_python=False,
        backward=embedding_backward_scratch(run, count, table.numel, width, table.dtype),
    )  # fmt: skip
    copies = partial(_copy_gradient_first, run.segment.operations[-1], made.record)
    return table.leads_to(made, in_rows(table.shape), Straightened(copies))


def _copy_gradient_first(lookup: Operation, made: Tensor) -> None:
    """Sequences that were turned behind it hand it a gradient that is laid into rows first."""
    lookup.backward_scratch = behind_copy(made.storage.num_bytes, tuple(lookup.backward_scratch))


def norm(x: Handle, norms: Sequence[Handle]) -> Handle:
    """apex's norms and TransformerEngine's: keep their input, and in fp32 a row's root, of a layer norm also its mean."""
    made, statistics = empty(x.run, x.shape, x.dtype), statistics_of(x, norms)
    kind = OperationKind.LAYER_NORM if len(norms) > 1 else OperationKind.RMS_NORM
    gradients = (FRESH,) * (1 + len(norms))
    apply(kind, [x, *norms], [made, *statistics], [x, *statistics, norms[0]], gradients)
    return made


def statistics_of(x: Handle, norms: Sequence[Handle]) -> list[Handle]:
    """One number a row for each of a norm's weights, of which a layer norm has two."""
    return [empty(x.run, (x.numel // norms[0].numel,), DType.FP32) for _ in norms]


def bias_dropout_add(x: Handle, bias: Handle | None, residual: Handle, *, drops: bool) -> Handle:
    """``residual + dropout(x + bias)`` as one kernel: a one-byte mask where anything is dropped (fused_bias_dropout.py)."""
    made = empty(x.run, residual.shape, residual.dtype)
    mask = [empty(x.run, x.shape, DType.BOOL)] if drops else []
    given = [x, residual] if bias is None else [x, residual, bias]
    gradients = (FRESH if drops else Gradient.ALIAS, Gradient.ALIAS, FRESH)[: len(given)]
    apply(OperationKind.BIAS_DROPOUT_ADD, given, [*mask, made], mask, gradients)
    return made


def bias_gelu(x: Handle, bias: Handle) -> Handle:
    """GELU of ``x + bias`` as one kernel, which keeps x (fused_bias_gelu.py)."""
    made, given = empty(x.run, x.shape, x.dtype), [x, bias]
    apply(
        OperationKind.GELU, given, [made], given, (FRESH, Gradient.SUMMED),
        forward=_steps(made, GELU_FORWARD), backward=_steps(made, GELU_BACKWARD),
    )  # fmt: skip
    return made


def bias_swiglu(x: Handle, bias: Handle | None) -> Handle:
    """``silu(x1) * x2`` of the two halves of ``x + bias``, which it keeps (fused_bias_swiglu.py)."""
    made = empty(x.run, (*x.shape[:-1], x.shape[-1] // 2), x.dtype)
    given = [x] if bias is None else [x, bias]
    apply(
        OperationKind.FUSED_GATE, given, [made], given, (FRESH, Gradient.SUMMED)[: len(given)],
        forward=_steps(made, (MADE, RESULT)), backward=_steps(made, SWIGLU_BACKWARD),
    )  # fmt: skip
    return made


def weighted_swiglu(x: Handle, weights: Handle) -> Handle:
    """The same times a weight for each row, which it keeps too (``weighted_bias_swiglu_impl``)."""
    made = empty(x.run, (*x.shape[:-1], x.shape[-1] // 2), x.dtype)
    apply(OperationKind.FUSED_GATE, [x, weights], [made], [x, weights], (FRESH, FRESH))
    return made


MADE = 1
"""A temporary of the result's size, in the lists below."""
# x + bias; a half of it; scaled; a cube in three steps; the tanh's argument; the tanh; one plus it.
GELU_FORWARD = (
    MADE, MADE, MADE, MADE, MADE, ~3, MADE, ~4, MADE, ~2, ~6, MADE, ~8, MADE, ~11, RESULT, ~0,
)  # fmt: skip
_CURVE = (MADE, MADE, MADE, MADE, ~2, MADE, ~3, MADE, ~1, ~5, MADE, ~7)
"""x + bias (0), and the tanh (10)."""
GELU_BACKWARD = (
    *_CURVE, MADE, MADE, MADE, ~13, MADE, MADE, ~16, MADE, ~17, MADE, ~14, ~19, MADE, ~12, ~21,
    MADE, MADE, ~27, MADE, ~24, ~28, RESULT,
)  # fmt: skip
# sigmoid, times the gradient; one less it, times x1, plus one; the product, times x2; silu; its product.
SWIGLU_BACKWARD = (
    MADE, MADE, ~0, MADE, MADE, ~3, MADE, ~4, MADE, ~6, MADE, ~1, ~8, MADE, ~10, MADE, MADE, ~15,
    RESULT,
)  # fmt: skip


def _steps(made: Handle, steps: tuple[int, ...]) -> tuple[int, ...]:
    """What fake tensors make of a compiled kernel, with the bytes of the result's size."""
    size = made.record.storage.num_bytes
    return tuple(size if step == MADE else step for step in steps) if made.run.decomposed else ()


# -- scores --------------------------------------------------------------------------------------------


def scores(query: Handle, key: Handle) -> Handle:
    """``baddbmm`` of (tokens, heads, width) into a new tensor beside a blank one of the global buffer.

    Each gradient is a product, and then the product scaled; as it lies it is turned back.
    """
    run, (length, heads, width), keys = query.run, query.shape, key.shape[0]
    made = empty(run, (heads, length, keys), run.compute)
    use_global_buffer(run, made.numel)
    one, other = (allocated_bytes(each.numel, run.compute) for each in (query, key))
    apply(
        OperationKind.BADDBMM, [query, key], [made], [query, key], (FRESH, FRESH), in_python=False,
        backward=(one, RESULT, ~0, other, RESULT), flops=2 * made.numel * width,
    )  # fmt: skip
    query.leads_to(made, always((width, length * width, 1)))
    key.leads_to(made, always((1, keys * width, keys)))
    return made


def scaled_masked_softmax(x: Handle) -> Handle:
    """Scale, mask and softmax in one kernel, whose backward pass writes over the gradient it is given (fused_softmax.py)."""
    made = x.like(x.run.tensor(x.numel, x.dtype))
    gradient = FRESH if x.run.decomposed else Gradient.ALIAS
    apply(OperationKind.FUSED_SOFTMAX, [x], [made], [made], (gradient,))
    return made


def view_filled_where(x: Handle, mask: Handle) -> Handle:
    """``masked_fill_`` of a view: autograd copies the gradient, and a slice of that (torch 2.13,
    csrc/autograd/functions/tensor.cpp, ``CopySlices``)."""
    size, made = x.record.storage.num_bytes, x.like(x.run.view(x.record, x.numel))
    apply(
        OperationKind.MASKED_FILL_IN_PLACE, [x, mask], [made], [mask], (FRESH, Gradient.NONE),
        backward=(RESULT, size, size), in_python=False,
    )  # fmt: skip
    return made


# -- the router ------------------------------------------------------------------------------------------


def router_logits(x: Handle, weight: Handle) -> Handle:
    """In fp32 of a copy (moe_utils.py, ``RouterGatingLinearFunction``)."""
    experts, width = weight.shape
    made, wide = empty(x.run, (x.numel // width, experts), DType.FP32), 4 * x.numel
    apply(
        OperationKind.ROUTER_LOGITS, [x, weight], [made], [x, weight], (FRESH, FRESH),
        forward=(wide,), backward=(wide,), flops=2 * x.numel * experts,
    )  # fmt: skip
    return made


def permuted(x: Handle, weights: Handle, which: Handle, rows: int) -> tuple[Handle, Handle]:
    """Rows sorted by expert with their weights; a map of rows is kept (``fused_permute_with_probs``).

    So is the table that says ``which`` experts each token has: the dispatcher's.
    """
    run, width, (tokens, experts) = x.run, x.shape[-1], weights.shape
    places = empty(run, (tokens, 2 * experts + 1), DType.INT32)
    made, chances = empty(run, (rows, width), x.dtype), empty(run, (rows,), DType.FP32)
    apply(
        OperationKind.INDEX, [x, weights, which], [places, made, chances], [places, which],
        (FRESH, FRESH, Gradient.NONE),
    )  # fmt: skip
    return made, chances


# -- the loss --------------------------------------------------------------------------------------------


def cross_entropy(logits: Handle) -> Handle:
    """The loss of every token, over a split vocabulary.

    TransformerEngine's kernel writes the gradient of the logits over them (TransformerEngine 2.11,
    pytorch/triton/cross_entropy.py). Megatron's own, of fp32 ones, has their softmax, and in backward their gradient, in
    one storage.
    """
    run, shape = logits.run, logits.shape[:-1]
    losses = empty(run, shape, DType.FP32)
    if is_by_engine(settings_of(run)):
        kind, kept = OperationKind.CROSS_ENTROPY, [empty(run, (3, *shape), DType.FP32)]
        saves = [logits]
    else:
        kind = OperationKind.VOCAB_PARALLEL_CROSS_ENTROPY
        kept = [empty(run, shape, dtype) for dtype in (DType.INT64, DType.BOOL)]
        saves = [logits, *kept]
    # Of every token the greatest logit, the target's, and the sum of exponentials, from all ranks.
    each = Send(ExchangeKind.ALL_REDUCE, losses.record.storage.num_bytes, Group.SPLIT)
    sends = NO_SENDS if tensor_ranks(run) == 1 else Sends((each,) * 3)
    apply(kind, [logits], [losses, *kept], saves, (Gradient.SAVED,), sends=sends)
    return losses


def is_by_engine(settings: MegatronLayers) -> bool:
    """Whether TransformerEngine's kernel computes the loss."""
    fused = settings.cross_entropy_loss_fusion
    return fused and settings.cross_entropy_fusion_impl is LossFusion.TE
