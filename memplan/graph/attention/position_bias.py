"""What T5's position biases take while distances are sorted into buckets."""

from memplan.dtypes import DType
from memplan.graph.core.temporaries import Temporaries
from memplan.graph.core.tensors import allocated_bytes


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
