"""Decoders that join a picture's sizes, as their classes write them out."""

from memplan.dtypes import DType
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.towers.gridded.nets import resized
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.towers.gridded.levels import (
    LevelBody,
    LevelsBody,
    SegmentedBody,
)


def write_levels(t: Tape, x: Tensor, body: LevelsBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case LevelBody():
            t.hold(x)
            flow.levels.append((x, flow.grid))
            return x
        case SegmentedBody():
            return _segmented(t, x, body, flow)


def _segmented(t: Tape, x: Tensor, body: SegmentedBody, flow: Flow) -> Tensor:
    """Classes of each pixel: scores are made as large as the picture, and their cross-entropy."""
    pixels = flow.items * flow.picture[0] * flow.picture[1]
    t.give_out(x)
    t.returned.append(x)
    whole = resized(t, x, pixels * body.num_classes)
    return cross_entropy(t, whole, from_batch(t, pixels, DType.INT64))
