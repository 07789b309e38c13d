"""Megatron-core's own functions: what each keeps for backward, what it takes on its way, and what ranks send inside.

Megatron-core 0.16.1, core/tensor_parallel/layers.py (``LinearWithGradAccumulationAndAsyncCommunication``), mappings.py and
cross_entropy.py, core/fusions, core/transformer/dot_product_attention.py and moe/moe_utils.py.
"""

from collections.abc import Sequence

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor, allocated_bytes
from memplan.graph.operations.lookups import embedding_backward_scratch
from memplan.training.splitting.exchange import (
    NO_SENDS,
    ExchangeKind,
    Group,
    Send,
    Sends,
    both_ways,
)
from memplan.training.splitting.megatron import LossFusion, MegatronLayers, TransformerImpl

ONE_OF_TWO = 0.5
"""Of a product's backward pass, the gradient of its input, or that of its weight."""


def settings_of(t: Tape) -> MegatronLayers:
    """Megatron's settings."""
    settings = t.options.megatron
    assert settings is not None
    return settings


def tensor_ranks(t: Tape) -> int:
    """Ranks that split the layers."""
    group = t.options.tensor_parallel
    return 1 if group is None else group.degree


def sequence_ranks(t: Tape) -> int:
    """Ranks of which each has a share of every sequence between the split blocks."""
    group = t.options.tensor_parallel
    return group.degree if group is not None and group.sequence else 1


def use_global_buffer(t: Tape, numel: int) -> None:
    """Take a tensor out of the global buffer, which is made anew where it is too small.

    (core/utils.py, ``GlobalMemoryBuffer.get_tensor``)
    """
    size = allocated_bytes(numel, t.compute)
    if size > max(t.buffers_in_use, default=0):
        t.buffers_in_use += (size,)


# -- products ------------------------------------------------------------------------------------------


def weight_gradient(t: Tape) -> Gradient:
    """How a product's weight gets its gradient: written into the main gradients, while autograd is handed a tensor that all
    weights of its shape share (TransformerEngine's ``get_dummy_wgrad``), or a new one."""
    settings = settings_of(t)
    fuses = settings.gradient_accumulation_fusion and settings.wrap_with_ddp
    is_local = settings.transformer_impl is TransformerImpl.LOCAL
    return Gradient.FUSED if fuses and not is_local else Gradient.FRESH


def sizes_of(weight: Parameter) -> tuple[int, int]:
    """Columns and width of a product with it; of stacked experts, of one of them."""
    experts = 1 if weight.experts is None else weight.experts.num_experts
    return weight.shape[0] // experts, weight.shape[1]


def product(
    t: Tape,
    x: Tensor,
    weight: Parameter,
    rows: int,
    *,
    bias: Parameter | None = None,
    forward: Sequence[int] = (),
    backward: Sequence[int] = (),
    sends: Sends = NO_SENDS,
) -> Tensor:
    """A product with so many rows that keeps what it is given.

    ``forward`` and ``backward`` are blocks that come and go on its way: what is gathered, or not yet added up.
    """
    columns, width = sizes_of(weight)
    out = t.tensor(rows * columns, t.compute)
    inputs: tuple[Tensor, ...] = (x, weight)
    gradients: tuple[int, ...] = (Gradient.FRESH, weight_gradient(t))
    if bias is not None:
        inputs, gradients = (*inputs, bias), (*gradients, Gradient.FRESH)
    t.record(
        OperationKind.LINEAR, inputs, (out,), saves=(x, weight), gradients=gradients,
        forward_scratch_bytes=(*forward, RESULT) if forward else (),
        backward_scratch_bytes=(*backward, RESULT) if backward else (),
        flops=2 * max(rows, x.numel // width) * width * columns, in_python=True, sends=sends,
    )  # fmt: skip
    return out


def column_product(t: Tape, x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """With this rank's columns, of all tokens.

    With sequence parallelism the input is gathered into the global buffer, in backward again; its gradient is made whole, and
    added up into a share.
    """
    ranks, (columns, width) = sequence_ranks(t), sizes_of(weight)
    rows = x.numel // width * ranks
    if ranks > 1:
        use_global_buffer(t, rows * width)
    return product(
        t, x, weight, rows, bias=bias,
        forward=(allocated_bytes(rows * columns, t.compute),) if bias is not None else (),
        backward=(x.storage.num_bytes * ranks,) if ranks > 1 else (),
        sends=column_sends(t, rows * width),
    )  # fmt: skip


def row_product(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """With this rank's rows, added up at once (Megatron-Kwai's)."""
    columns, width = sizes_of(weight)
    ranks, tokens = sequence_ranks(t), x.numel // width
    whole = allocated_bytes(tokens * columns, t.compute)
    return product(
        t, x, weight, tokens // ranks, forward=(whole,) if ranks > 1 else (),
        sends=row_sends(t, tokens * columns),
    )  # fmt: skip


def _beside_products(t: Tape) -> float:
    """Of a product, the share beside which what it reads is gathered, or what it makes added up.

    (Kwai's ``overlap-sp-ag``, ``overlap-sp-rs``)
    """
    return float(settings_of(t).transformer_impl is TransformerImpl.KWAI)


def column_sends(t: Tape, numel: int) -> Sends:
    """What a product with columns sends: the tokens' rows, and in backward their gradients, of so many numbers.

    Backward each runs beside one of its two products.
    """
    if tensor_ranks(t) == 1:
        return NO_SENDS
    size = numel * t.compute.num_bytes
    if sequence_ranks(t) == 1:
        return Sends(backward=(Send(ExchangeKind.ALL_REDUCE, size, Group.SPLIT, ONE_OF_TWO),))
    gathers, scatters = (
        Send(kind, size, Group.SPLIT, ONE_OF_TWO)
        for kind in (ExchangeKind.ALL_GATHER, ExchangeKind.REDUCE_SCATTER)
    )
    return Sends((gathers._replace(beside=_beside_products(t)),), (gathers, scatters))


def row_sends(t: Tape, numel: int) -> Sends:
    """What a product with rows sends: partial results, which are added up."""
    if tensor_ranks(t) == 1:
        return NO_SENDS
    size, beside = numel * t.compute.num_bytes, _beside_products(t)
    if sequence_ranks(t) == 1:
        return Sends(forward=(Send(ExchangeKind.ALL_REDUCE, size, Group.SPLIT),))
    return Sends(
        forward=(Send(ExchangeKind.REDUCE_SCATTER, size, Group.SPLIT, beside),),
        backward=(Send(ExchangeKind.ALL_GATHER, size, Group.SPLIT, beside * ONE_OF_TWO),),
    )


# -- exchanges that are operations by themselves ---------------------------------------------------------


def all_reduced(t: Tape, x: Tensor) -> Tensor:
    """Added up over the ranks where it lies."""
    out = t.view(x, x.numel)
    t.record(OperationKind.ALL_REDUCE, (x,), (out,), gradients=(Gradient.ALIAS,))
    return out


def scattered(t: Tape, x: Tensor, ranks: int, *, sends: Sends = NO_SENDS) -> Tensor:
    """Partial results added up into shares."""
    out = t.tensor(x.numel // ranks, x.dtype)
    t.record(OperationKind.REDUCE_SCATTER, (x,), (out,), gradients=(Gradient.FRESH,), sends=sends)
    return out


def gathered(t: Tape, x: Tensor, ranks: int, group: Group) -> Tensor:
    """All ranks' shares; in backward added up into shares."""
    out = t.tensor(x.numel * ranks, x.dtype)
    sends = there_and_back(
        ExchangeKind.ALL_GATHER, ExchangeKind.REDUCE_SCATTER, out.numel * out.dtype.num_bytes, group
    )
    t.record(OperationKind.ALL_GATHER, (x,), (out,), gradients=(Gradient.FRESH,), sends=sends)
    return out


def there_and_back(there: ExchangeKind, back: ExchangeKind, num_bytes: int, group: Group) -> Sends:
    """One kind in forward, the other in backward."""
    return Sends((Send(there, num_bytes, group),), (Send(back, num_bytes, group),))


def sent_to_experts(t: Tape, x: Tensor) -> Tensor:
    """As much comes as goes."""
    out = t.tensor(x.numel, x.dtype)
    sends = both_ways(ExchangeKind.ALL_TO_ALL, x.numel * x.dtype.num_bytes, Group.SPREAD)
    t.record(OperationKind.ALL_TO_ALL, (x,), (out,), gradients=(Gradient.FRESH,), sends=sends)
    return out


def cut(t: Tape, x: Tensor, ranks: int) -> Tensor:
    """A rank's share, cloned lest it hold the whole; its gradient is gathered."""
    out = t.tensor(x.numel // ranks, x.dtype)
    t.record(OperationKind.CLONE, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


# -- the embedding, norms, what is fused element by element ------------------------------------------------


def own_ids(t: Tape, count: int) -> tuple[Tensor, Tensor]:
    """Which ids are other ranks' rows, and the others as numbers of this one's."""
    foreign, ids = t.tensor(count, DType.BOOL), t.tensor(count, DType.INT64)
    t.record(OperationKind.INDICES, (), (foreign, ids))
    return foreign, ids


def looked_up(t: Tape, table: Parameter, count: int, ids: Tensor | None) -> Tensor:
    """Rows of this rank's part of the table, of which the gradient is."""
    width = table.shape[1]
    out = t.tensor(count * width, table.dtype)
    reads = () if ids is None else (ids,)
    t.record(
        OperationKind.EMBEDDING, (table, *reads), (out,), saves=reads,
        gradients=(Gradient.FRESH, Gradient.NONE)[: 1 + len(reads)],
        backward_scratch_bytes=embedding_backward_scratch(t, count, table.numel, width, table.dtype),
    )  # fmt: skip
    return out


def norm(t: Tape, x: Tensor, weights: Sequence[Parameter]) -> Tensor:
    """apex's norms and TransformerEngine's: keep their input, and in fp32 a row's root, of a layer norm also its mean."""
    out = t.tensor(x.numel, x.dtype)
    statistics = statistics_of(t, x, weights)
    kind = OperationKind.LAYER_NORM if len(weights) > 1 else OperationKind.RMS_NORM
    t.record(
        kind, (x, *weights), (out, *statistics), saves=(x, *statistics, weights[0]),
        gradients=(Gradient.FRESH,) * (1 + len(weights)), in_python=True,
    )  # fmt: skip
    return out


def statistics_of(t: Tape, x: Tensor, weights: Sequence[Parameter]) -> list[Tensor]:
    """One number a row for each of a norm's weights, of which a layer norm has two."""
    return [t.tensor(x.numel // weights[0].shape[0], DType.FP32) for _ in weights]


def bias_dropout_add(
    t: Tape, x: Tensor, bias: Parameter | None, residual: Tensor, *, drops: bool
) -> Tensor:
    """``residual + dropout(x + bias)`` as one kernel: a one-byte mask where anything is dropped (fused_bias_dropout.py)."""
    out = t.tensor(residual.numel, residual.dtype)
    mask = (t.tensor(x.numel, DType.BOOL),) if drops else ()
    inputs: tuple[Tensor, ...] = (x, residual)
    gradients: tuple[int, ...] = (Gradient.FRESH if drops else Gradient.ALIAS, Gradient.ALIAS)
    if bias is not None:
        inputs, gradients = (*inputs, bias), (*gradients, Gradient.FRESH)
    t.record(
        OperationKind.BIAS_DROPOUT_ADD, inputs, (*mask, out), saves=mask, gradients=gradients,
        in_python=True,
    )  # fmt: skip
    return out


def bias_gelu(t: Tape, x: Tensor, bias: Parameter) -> Tensor:
    """GELU of ``x + bias`` as one kernel, which keeps x (fused_bias_gelu.py)."""
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.GELU, (x, bias), (out,), saves=(x, bias),
        gradients=(Gradient.FRESH, Gradient.SUMMED),
        forward_scratch_bytes=_steps(out, GELU_FORWARD) if t.decomposed else (),
        backward_scratch_bytes=_steps(out, GELU_BACKWARD) if t.decomposed else (),
        in_python=True,
    )  # fmt: skip
    return out


def bias_swiglu(t: Tape, x: Tensor, bias: Parameter | None) -> Tensor:
    """``silu(x1) * x2`` of the two halves of ``x + bias``, which it keeps (fused_bias_swiglu.py)."""
    out = t.tensor(x.numel // 2, x.dtype)
    inputs = (x,) if bias is None else (x, bias)
    t.record(
        OperationKind.FUSED_GATE, inputs, (out,), saves=inputs,
        gradients=(Gradient.FRESH, Gradient.SUMMED)[: len(inputs)],
        forward_scratch_bytes=(out.storage.num_bytes, RESULT) if t.decomposed else (),
        backward_scratch_bytes=_steps(out, SWIGLU_BACKWARD) if t.decomposed else (),
        in_python=True,
    )  # fmt: skip
    return out


def weighted_swiglu(t: Tape, x: Tensor, weights: Tensor) -> Tensor:
    """The same times a weight for each row, which it keeps too (``weighted_bias_swiglu_impl``)."""
    out = t.tensor(x.numel // 2, x.dtype)
    t.record(
        OperationKind.FUSED_GATE, (x, weights), (out,), saves=(x, weights),
        gradients=(Gradient.FRESH, Gradient.FRESH), in_python=True,
    )  # fmt: skip
    return out


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


def _steps(out: Tensor, steps: tuple[int, ...]) -> tuple[int, ...]:
    """The same with the bytes of the result's size."""
    size = out.storage.num_bytes
    return tuple(size if step == MADE else step for step in steps)


# -- scores --------------------------------------------------------------------------------------------


def scores(t: Tape, query: Tensor, key: Tensor, rows: int, *, head_dim: int) -> Tensor:
    """``baddbmm`` into a new tensor beside a blank one of the global buffer; of so many numbers.

    Each gradient is a product, and then the product scaled.
    """
    use_global_buffer(t, rows)
    out = t.tensor(rows, t.compute)
    sizes = [allocated_bytes(each.numel, t.compute) for each in (query, key)]
    t.record(
        OperationKind.BADDBMM, (query, key), (out,), saves=(query, key),
        gradients=(Gradient.FRESH, Gradient.FRESH), flops=2 * rows * head_dim,
        backward_scratch_bytes=(sizes[0], RESULT, ~0, sizes[1], RESULT),
    )  # fmt: skip
    return out


def scaled_masked_softmax(t: Tape, x: Tensor) -> Tensor:
    """Scale, mask and softmax in one kernel, whose backward pass writes over the gradient it is given (fused_softmax.py)."""
    out = t.tensor(x.numel, x.dtype)
    gradient = Gradient.FRESH if t.decomposed else Gradient.ALIAS
    t.record(
        OperationKind.FUSED_SOFTMAX, (x,), (out,), saves=(out,), gradients=(gradient,),
        in_python=True,
    )  # fmt: skip
    return out


def causal_mask(t: Tape, length: int) -> Tensor:
    """``torch.triu(torch.ones(...)).bool()`` (fused_softmax.py, ``get_default_causal_mask``)."""
    mask = t.tensor(length * length, DType.BOOL)
    wide = allocated_bytes(mask.numel, DType.FP32)
    t.record(OperationKind.TRIU, (), (mask,), forward_scratch_bytes=(wide, wide, ~0, RESULT))
    return mask


def view_filled_where(t: Tape, x: Tensor, mask: Tensor) -> Tensor:
    """``masked_fill_`` of a view: autograd copies the gradient, and a slice of that (torch 2.13,
    csrc/autograd/functions/tensor.cpp, ``CopySlices``)."""
    size, out = x.storage.num_bytes, t.view(x, x.numel)
    t.record(
        OperationKind.MASKED_FILL_IN_PLACE, (x, mask), (out,), saves=(mask,),
        gradients=(Gradient.FRESH, Gradient.NONE), backward_scratch_bytes=(RESULT, size, size),
    )  # fmt: skip
    return out


# -- the router ------------------------------------------------------------------------------------------


def router_logits(t: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """In fp32 of a copy (moe_utils.py, ``RouterGatingLinearFunction``)."""
    experts, width = weight.shape
    out = t.tensor(x.numel // width * experts, DType.FP32)
    wide = x.numel * DType.FP32.num_bytes
    t.record(
        OperationKind.ROUTER_LOGITS, (x, weight), (out,), saves=(x, weight),
        gradients=(Gradient.FRESH, Gradient.FRESH), forward_scratch_bytes=(wide, RESULT),
        backward_scratch_bytes=(wide, RESULT), flops=2 * x.numel * experts, in_python=True,
    )  # fmt: skip
    return out


def permuted(
    t: Tape, x: Tensor, weights: Tensor, which: Tensor, rows: int, width: int
) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert with their weights; a map of rows is kept (``fused_permute_with_probs``).

    So is the table that says ``which`` experts each token has: the dispatcher's.
    """
    tokens = x.numel // width
    places = t.tensor(2 * weights.numel + tokens, DType.INT32)
    out, chances = t.tensor(rows * width, x.dtype), t.tensor(rows, DType.FP32)
    t.record(
        OperationKind.INDEX, (x, weights, which), (places, out, chances), saves=(places, which),
        gradients=(Gradient.FRESH, Gradient.FRESH, Gradient.NONE), in_python=True,
    )  # fmt: skip
    return out, chances


def unpermuted(t: Tape, x: Tensor, numel: int) -> Tensor:
    """Back, those of each token added up."""
    out = t.tensor(numel, x.dtype)
    t.record(OperationKind.INDEX_ADD_IN_PLACE, (x,), (out,), gradients=(Gradient.FRESH,))
    return out


# -- the loss --------------------------------------------------------------------------------------------


def cross_entropy(t: Tape, logits: Tensor, rows: int) -> Tensor:
    """The loss of every token, over a split vocabulary.

    TransformerEngine's kernel writes the gradient of the logits over them (TransformerEngine 2.11,
    pytorch/triton/cross_entropy.py). Megatron's own, of fp32 ones, has their softmax, and in backward their gradient, in
    one storage.
    """
    losses = t.tensor(rows, DType.FP32)
    if is_by_engine(settings_of(t)):
        kind, kept = OperationKind.CROSS_ENTROPY, [t.tensor(3 * rows, DType.FP32)]
        saves: list[Tensor] = [logits]
    else:
        kind = OperationKind.VOCAB_PARALLEL_CROSS_ENTROPY
        kept = [t.tensor(rows, dtype) for dtype in (DType.INT64, DType.BOOL)]
        saves = [logits, *kept]
    t.record(
        kind, (logits,), (losses, *kept), saves=saves, gradients=(Gradient.SAVED,), in_python=True,
        sends=_row_sums(t, losses),
    )  # fmt: skip
    return losses


def is_by_engine(settings: MegatronLayers) -> bool:
    """Whether TransformerEngine's kernel computes the loss."""
    fused = settings.cross_entropy_loss_fusion
    return fused and settings.cross_entropy_fusion_impl is LossFusion.TE


def _row_sums(t: Tape, losses: Tensor) -> Sends:
    """Of every token the greatest logit, the target's, and the sum of exponentials, from all ranks."""
    if tensor_ranks(t) == 1:
        return NO_SENDS
    each = Send(ExchangeKind.ALL_REDUCE, losses.storage.num_bytes, Group.SPLIT)
    return Sends((each, each, each))
