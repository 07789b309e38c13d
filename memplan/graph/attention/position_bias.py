"""T5's relative position bias: one number for each bucket of distances and each head.

``T5Attention.compute_bias`` (transformers 5.23) sorts the distance of every pair of positions into a
bucket and looks the buckets up in a small table, which gives a tensor of heads x queries x keys. The
first layer of a stack does that and the others read its result, so its gradient is the sum of all
layers'; UMT5's layers each have a table of their own. Cross attention has zeros instead.

Eager attention adds the bias to the scores. sdpa gets it as an additive mask
(``create_position_bias_mask``), which leaves only the memory-efficient and the math kernel where it is trained.
"""

from memplan.dtypes import DType
from memplan.errors import UnsupportedOperationError
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.lookups import embedding
from memplan.graph.segments import Gradient
from memplan.graph.tape import Tape
from memplan.graph.temporaries import Temporaries
from memplan.graph.tensors import Tensor, allocated_bytes
from memplan.model.attention import AttentionSpec, PositionBias


def learned_bias(
    t: Tape,
    spec: AttentionSpec,
    queries: int,
    keys: int,
    name: str,
    *,
    held: list[Tensor] | None = None,
) -> Tensor:
    """Look the bucket of every pair of positions up; the buckets are kept for backward.

    ``held`` is given what the class's function still holds when it has looked them up.
    """
    pairs = queries * keys
    distances = t.tensor(pairs, DType.INT64)
    t.record(OperationKind.SUB, (), (distances,))
    buckets = t.tensor(pairs, DType.INT64)
    t.record(
        OperationKind.RELATIVE_POSITION_BUCKET, (distances,), (buckets,),
        forward_scratch_bytes=bucket_temporaries(pairs, causal=spec.causal, named=False),
    )  # fmt: skip
    bias = embedding(
        t, f"{name}.relative_attention_bias", spec.relative_bias_buckets, spec.num_heads, pairs,
        buckets, turned=True,
    )  # fmt: skip
    t.touch(distances)
    if held is not None:
        held += [distances, buckets]
    return bias


def bucket_temporaries(pairs: int, *, causal: bool, named: bool) -> tuple[int, ...]:
    """What ``_relative_position_bucket`` makes and lets go, line by line.

    UMT5's gives the fp32 logarithms a name (``named``), so that they stay until it returns.
    """
    whole, full, mark = (
        allocated_bytes(pairs, dtype) for dtype in (DType.INT64, DType.FP32, DType.BOOL)
    )
    made = Temporaries()
    if causal:
        zeros, least = made.take(whole), made.take(whole)
        made.drop(zeros)
        distance = made.take(whole)
        made.drop(least)
    else:
        positive, number = made.take(mark), made.take(whole)
        made.drop(positive)
        half = made.take(whole)
        made.drop(number)
        made.result()
        made.drop(half)
        distance = made.take(whole)
    is_small = made.take(mark)
    logarithm = made.take(full)
    for _ in range(4):  # divided, its logarithm, divided, multiplied
        following = made.take(full)
        made.drop(logarithm)
        logarithm = following
    number = made.take(whole)
    if not named:
        made.drop(logarithm)
    large = made.take(whole)
    made.drop(number)
    limit, least = made.take(whole), made.take(whole)
    made.drop(limit, large)
    chosen = made.take(whole)
    if causal:
        made.result()
    made.drop(chosen, distance, is_small)
    if named:
        made.drop(logarithm)
    made.drop(least)
    return made.blocks


def zero_bias(t: Tape, spec: AttentionSpec, queries: int, keys: int, dtype: DType) -> Tensor:
    """The zeros of a layer without a table, in the queries' dtype.

    Under gradient checkpointing ``T5Attention`` lets them require a gradient, which nothing uses.
    """
    bias = t.tensor(spec.num_heads * queries * keys, dtype)
    t.record(OperationKind.ZEROS, (), (bias,))
    if spec.position_bias is PositionBias.FIRST_ZEROS and t.options.checkpointed_layers:
        t.leaf(bias)
    return bias


def bias_mask(t: Tape, bias: Tensor, spec: AttentionSpec, pairs: int) -> Tensor:
    """The additive mask that sdpa is given: causal where the kernel can no longer be.

    A looked-up bias has its heads innermost, so ``contiguous`` copies it in every layer.

    Raises ``UnsupportedOperationError`` for the flash-attention package, which takes no mask.
    """
    if t.kernels.attention.is_package:
        msg = "flash attention cannot add a position bias (T5); choose attention sdpa or eager"
        raise UnsupportedOperationError(msg)
    mask = pattern = bias
    if spec.causal:
        pattern = t.tensor(pairs, DType.BOOL)
        t.record(OperationKind.GE, (), (pattern,))
        mask = t.tensor(bias.numel, bias.dtype)
        t.record(
            OperationKind.WHERE, (pattern, bias), (mask,), saves=(pattern,),
            gradients=(Gradient.NONE, Gradient.FRESH),
        )  # fmt: skip
    if spec.position_bias in _LEARNED:
        mask = t.contiguous(mask)
    t.touch(pattern)
    return mask


_LEARNED = frozenset({PositionBias.FIRST_LEARNED, PositionBias.EARLIER_LEARNED})
