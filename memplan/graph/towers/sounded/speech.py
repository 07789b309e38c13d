"""What encoders of speech compute beside wav2vec 2.0's own parts."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.temporaries import Temporaries
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import dropout, softmax
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.norms import native_layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.towers.speech import (
    CollectedBody,
    DistancesBody,
    FrameClassesBody,
    SpeechBody,
    StackedPositionsBody,
)


def write_speech(t: Tape, x: Tensor, body: SpeechBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case StackedPositionsBody():
            return _stacked_positions(t, x, body, flow)
        case DistancesBody():
            _distances(t, body, flow)
            return x
        case CollectedBody():
            flow.collected = [x]
            t.hold(x)
            return x
        case FrameClassesBody():
            return _frame_classes(t, x, body, flow)


def _distances(t: Tape, body: DistancesBody, flow: Flow) -> None:
    """``WavLMAttention.compute_bias``: rows of a small table, written out for every clip."""
    pairs = flow.length**2
    distances, buckets = t.tensor(pairs, DType.INT64), t.tensor(pairs, DType.INT64)
    t.record(OperationKind.SUB, (), (distances,))
    t.record(
        OperationKind.RELATIVE_POSITION_BUCKET, (distances,), (buckets,),
        forward_scratch_bytes=_bucket_temporaries(pairs),
    )  # fmt: skip
    found = embedding_lookup(t, t.parameter(f"{body.table}.weight"), pairs, buckets)
    t.touch(distances)
    spread = t.tensor(found.numel * flow.items, found.dtype)
    t.record(OperationKind.REPEAT, (found,), (spread,), gradients=(Gradient.FRESH,))
    flow.share(t, spread)
    flow.distances = spread


def _bucket_temporaries(pairs: int) -> tuple[int, ...]:
    """What ``WavLMAttention._relative_positions_bucket`` makes and lets go, line by line (transformers 5.23,
    modeling_wavlm.py); the fp32 logarithms have a name, and stay until it returns."""
    whole, full, mark = (
        allocated_bytes(pairs, dtype) for dtype in (DType.INT64, DType.FP32, DType.BOOL)
    )
    made = Temporaries()
    positive, number = made.take(mark), made.take(whole)
    made.drop(positive)
    made.result()
    made.drop(number)
    distance, is_small = made.take(whole), made.take(mark)
    logarithm = made.take(full)
    for _ in range(4):  # divided, its logarithm, divided, multiplied
        following = made.take(full)
        made.drop(logarithm)
        logarithm = following
    moved = made.take(full)
    number = made.take(whole)
    made.drop(moved)
    limit, least = made.take(whole), made.take(whole)
    made.drop(limit, number)
    made.drop(made.take(whole))
    made.drop(distance, is_small, logarithm, least)
    return made.blocks


def _weighed(t: Tape, x: Tensor, weights: str, results: list[Tensor]) -> Tensor:
    """All layers' results in one tensor, times a share each, added up.

    Gradients count as a tensor each. Really they are parts of one, which goes when the first layer has
    read its own.
    """
    shares = t.parameter(weights)
    stacked = t.tensor(x.numel * shares.numel, x.dtype)
    t.record(OperationKind.CAT, results, (stacked,), gradients=(Gradient.FRESH,) * len(results))
    for each in results:
        t.release(each)
    product = t.mul(stacked, softmax(t, shares))
    out = t.tensor(x.numel, product.dtype)
    t.record(OperationKind.SUM, (product,), (out,), gradients=(Gradient.ALIAS,))
    t.touch(stacked)
    return out


def _frame_classes(t: Tape, x: Tensor, body: FrameClassesBody, flow: Flow) -> Tensor:
    """``Wav2Vec2ForAudioFrameClassification``; labels come as one number for each class."""
    if body.weights and flow.collected is not None:
        x = _weighed(t, x, body.weights, flow.collected)
    logits = linear(t, x, body.module, body.size, body.classes, bias=True)
    t.returned.append(logits)
    t.give_out(logits)
    rows = flow.items * flow.length
    from_batch(t, rows * body.classes, DType.INT64)
    labels = t.tensor(rows, DType.INT64)
    t.record(OperationKind.MAX, (), (labels,))
    return cross_entropy(t, logits, labels)


def _stacked_positions(t: Tape, x: Tensor, body: StackedPositionsBody, flow: Flow) -> Tensor:
    """``Data2VecAudioPositionalConvEmbedding``: a layer norm without weights behind each convolution."""
    found = x
    padded = flow.length + 2 * (body.kernel // 2) - body.kernel + 1
    for module in body.modules:
        given = found
        out = convolution(t, given, module, flow.items * padded)
        if padded != flow.length:
            out = t.slice(out, flow.items * flow.length * body.size)
        out = native_layer_norm(t, out, body.size, ())
        found = activation(t, out, body.activation)
        t.touch(out, given)
    return dropout(t, t.add(x, found), body.dropout)
