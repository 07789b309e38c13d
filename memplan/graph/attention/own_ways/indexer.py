"""DeepSeek-V3.2's indexer: which earlier tokens each token attends to.

It runs without autograd, so nothing it makes outlives the layer but the mask. Its scores are a
product of every row with all keys, for which torch writes the keys of more than one sequence out
once for each row (``torch.matmul`` expands its second operand, and merges its dimensions).
"""

from memplan.dtypes import DType, promote
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.counted import idle_linear
from memplan.model.latent import IndexerSpec
from memplan.model.parameters import WeightRole

PREFIX = "self_attn.indexer"
"""The module's name in a layer."""


def masked_but(
    t: Tape, chosen: Tensor, pairs: int, mask: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mask of the chosen tokens alone, and what the caller's frame still holds."""
    ones = _made(t, OperationKind.NEW_ONES, pairs, DType.BOOL)
    places = _made(t, OperationKind.TO, chosen.numel, DType.INT64, chosen)
    left_out = _made(t, OperationKind.SCATTER, pairs, DType.BOOL, ones, places)
    if mask.dtype is DType.BOOL:
        inverse = _made(t, OperationKind.BITWISE_NOT, pairs, DType.BOOL, left_out)
        return _made(t, OperationKind.BITWISE_AND, pairs, DType.BOOL, mask, inverse), (
            chosen,
            left_out,
        )
    return _made(t, OperationKind.MASKED_FILL, pairs, mask.dtype, mask, left_out), (
        chosen,
        left_out,
    )


def chosen_tokens(
    t: Tape,
    x: Tensor,
    narrow_query: Tensor,
    spec: IndexerSpec,
    sizes: tuple[int, int, int, int],
) -> Tensor:
    """``DeepseekV32Indexer.forward``: the best-scored tokens of each row."""
    batch, length, hidden_size, narrow = sizes
    tokens = batch * length
    held = _queries_and_keys(t, x, narrow_query, spec, (tokens, hidden_size, narrow))
    scores = _scores(t, held[-2], held[-1], spec, batch, length)
    positive = _made(t, OperationKind.RELU, scores.numel, scores.dtype, scores)
    weights = _linear(t, x, "weights_proj", spec.num_heads, hidden_size)
    weights = _cast(t, weights, DType.FP32)
    weights = _made(t, OperationKind.MUL_SCALAR, weights.numel, DType.FP32, weights)
    factor = _cast(t, weights, t.autocast or DType.FP32)
    summed = _made(t, OperationKind.MATMUL, tokens * length, factor.dtype, factor, positive)
    masked = _made(t, OperationKind.MASKED_FILL, tokens * length, summed.dtype, summed)
    count = tokens * min(spec.top_k, length)
    values, places = t.tensor(count, masked.dtype), t.tensor(count, DType.INT64)
    t.record(OperationKind.TOPK, (masked,), (values, places))
    chosen = _made(t, OperationKind.TO, count, DType.INT32, places)
    t.touch(*held, positive, weights, masked)
    return chosen


def _scores(
    t: Tape, query: Tensor, key: Tensor, spec: IndexerSpec, batch: int, length: int
) -> Tensor:
    """Every head's query times every key, in fp32 or in autocast's dtype."""
    full = [_cast(t, part, DType.FP32) for part in (query, key)]
    factors = [_cast(t, part, t.autocast or DType.FP32) for part in full]
    dtype = factors[0].dtype
    second = factors[1]
    if batch > 1:
        second = _made(t, OperationKind.CLONE, second.numel * length, dtype, second)
    scores = _made(
        t, OperationKind.MATMUL, batch * length * spec.num_heads * length, dtype, factors[0], second, *full,
        flops=2 * query.numel * length,
    )  # fmt: skip
    t.touch(*factors)
    return _made(t, OperationKind.MUL_SCALAR, scores.numel, dtype, scores)


def _queries_and_keys(
    t: Tape, x: Tensor, narrow_query: Tensor, spec: IndexerSpec, sizes: tuple[int, int, int]
) -> tuple[Tensor, ...]:
    """Both through their layers and the rotary embedding; the two results come last."""
    _, hidden_size, narrow = sizes
    query = _linear(t, narrow_query, "wq_b", spec.num_heads * spec.head_dim, narrow)
    key = _linear(t, x, "wk", spec.head_dim, hidden_size)
    weights = [
        _weight(t, f"k_norm.{part}", spec.head_dim, role=WeightRole.NORM)
        for part in ("weight", "bias")
    ]
    if t.autocast is not None:
        key = _cast(t, key, DType.FP32)
    normed = _made(t, OperationKind.LAYER_NORM, key.numel, key.dtype, key, *weights)
    turned = [_rotated(t, part, spec) for part in (query, normed)]
    joined = [
        _made(t, OperationKind.CAT, part.numel, rotated.dtype, part, rotated)
        for part, rotated in zip((query, normed), turned, strict=True)
    ]
    return query, normed, *turned, *joined


def _rotated(t: Tape, x: Tensor, spec: IndexerSpec) -> Tensor:
    """The first numbers of each head, turned; two products are alive beside the result."""
    numel = x.numel // spec.head_dim * spec.rotary_dim
    dtype = promote(x.dtype, t.compute)
    return _made(t, OperationKind.ROTARY, numel, dtype, x, scratch=2 * numel * dtype.num_bytes)


def _linear(t: Tape, x: Tensor, name: str, out_features: int, in_features: int) -> Tensor:
    weight = _weight(t, f"{name}.weight", out_features, in_features)
    idle_linear(t, weight)
    factor = t.cast_weight(weight)
    if t.autocast is not None:
        x = _cast(t, x, t.autocast)
    rows = x.numel // in_features
    flops = 2 * rows * weight.numel
    return _made(t, OperationKind.LINEAR, rows * out_features, x.dtype, x, factor, flops=flops)


def _weight(t: Tape, name: str, *shape: int, role: WeightRole = WeightRole.MATRIX) -> Parameter:
    """A weight that no gradient reaches: choosing tokens has no derivative."""
    weight = t.parameter(f"{PREFIX}.{name}", *shape, role=role)
    weight.unused = True
    return weight


def _cast(t: Tape, x: Tensor, dtype: DType) -> Tensor:
    return x if x.dtype is dtype else _made(t, OperationKind.TO, x.numel, dtype, x)


def _made(
    t: Tape,
    kind: OperationKind,
    numel: int,
    dtype: DType,
    *reads: Tensor,
    scratch: int = 0,
    flops: int = 0,
) -> Tensor:
    """A tensor made without autograd."""
    out = t.tensor(numel, dtype)
    t.record(
        kind, reads, (out,), gradients=(Gradient.NONE,) * len(reads),
        forward_scratch_bytes=scratch, flops=flops,
    )  # fmt: skip
    out.requires_grad = False
    return out
