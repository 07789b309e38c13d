"""UPerNet's heads, as ``UperNetForSemanticSegmentation`` runs them."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.norms import layer_norm
from memplan.graph.towers.gridded.nets import batch_norm, resized
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.networks import Activation
from memplan.model.towers.gridded.parsing import (
    AuxiliaryHead,
    NormedLevelsBody,
    ParsersBody,
    ParsingBody,
)


def write_parsers(t: Tape, x: Tensor, body: ParsersBody, flow: Flow) -> Tensor:
    """The operations of one part."""
    match body:
        case NormedLevelsBody():
            return _normed_levels(t, x, body, flow)
        case ParsingBody():
            return _parsed(t, body, flow)


def _normed_levels(t: Tape, x: Tensor, body: NormedLevelsBody, flow: Flow) -> Tensor:
    levels = [*flow.levels, (x, flow.grid)]
    as_it_is = {number for number, module, _ in body.norms if not module}
    for number, (level, _) in enumerate(flow.levels):
        if number not in as_it_is:
            t.release(level)
    flow.levels = []
    out = x
    for number, module, size in body.norms:
        level, grid = levels[number]
        out = layer_norm(t, level, module, size) if module else level
        t.hold(out)
        flow.levels.append((out, grid))
    return out


def _convolved(t: Tape, x: Tensor, name: str, width: int, rows: int) -> Tensor:
    """``UperNetConvModule``."""
    made = convolution(t, x, f"{name}.conv", rows, bias=False)
    normed = batch_norm(t, made, f"{name}.batch_norm", width)
    out = activation(t, normed, Activation.RELU)
    t.touch(normed, x)
    return out


def _parsed(t: Tape, body: ParsingBody, flow: Flow) -> Tensor:
    width, last = body.width, len(body.channels) - 1
    rows = [flow.items * grid[0] * grid[1] for _, grid in flow.levels]
    laterals = [
        _convolved(t, flow.levels[number][0], f"lateral_convs.{number}", width, rows[number])
        for number in range(last)
    ]
    laterals.append(_pooled(t, flow.levels[-1][0], body, flow.items, rows[-1]))
    for number in range(last, 0, -1):
        larger = resized(t, laterals[number], rows[number - 1] * width)
        laterals[number - 1] = t.add(laterals[number - 1], larger)
    outs = [
        _convolved(t, laterals[number], f"fpn_convs.{number}", width, rows[number])
        for number in range(last)
    ]
    outs.append(laterals[-1])
    for number in range(last, 0, -1):
        outs[number] = resized(t, outs[number], rows[0] * width)
    joined = t.concatenate(*outs)
    t.touch(*outs)
    made = _convolved(t, joined, "fpn_bottleneck", width, rows[0])
    scores = convolution(t, made, "classifier", rows[0])
    t.touch(made, joined, *laterals)
    logits = _whole(t, scores, body, flow)
    found = [logits]
    if body.auxiliary is not None:
        found.append(_whole(t, _auxiliary(t, body.auxiliary, flow), body, flow))
    t.give_out(logits)
    t.returned.append(logits)
    labels = from_batch(t, flow.items * flow.picture[0] * flow.picture[1], DType.INT64)
    losses = [cross_entropy(t, each, labels) for each in found]
    for level, _ in flow.levels:
        t.release(level)
    t.touch(*found)
    return losses[0] if len(losses) == 1 else t.add(losses[0], t.scale(losses[1]))


def _whole(t: Tape, scores: Tensor, body: ParsingBody, flow: Flow) -> Tensor:
    return resized(t, scores, flow.items * flow.picture[0] * flow.picture[1] * body.num_classes)


def _pooled(t: Tape, x: Tensor, body: ParsingBody, items: int, rows: int) -> Tensor:
    """``UperNetPyramidPoolingModule``: of one number a picture, pooling is a mean that keeps nothing."""
    made = [x]
    for number, scale in enumerate(body.scales):
        smaller = t.tensor(items * scale**2 * body.channels[-1], x.dtype)
        saves = (x,) if scale > 1 else ()
        t.record(OperationKind.MEAN, (x,), (smaller,), saves=saves, gradients=(Gradient.FRESH,))
        name = f"psp_modules.{number}"
        seen = _convolved(t, smaller, name, body.width, items * scale**2)
        made.append(resized(t, seen, rows * body.width))
    joined = t.concatenate(*made)
    t.touch(*made)
    return _convolved(t, joined, "bottleneck", body.width, rows)


def _auxiliary(t: Tape, head: AuxiliaryHead, flow: Flow) -> Tensor:
    """``UperNetFCNHead``."""
    level, grid = flow.levels[head.level]
    rows, made = flow.items * grid[0] * grid[1], level
    for number in range(head.num_convolutions):
        made = _convolved(t, made, f"auxiliary.convs.{number}", head.width, rows)
    if head.joins_input:
        joined = t.concatenate(level, made)
        made = _convolved(t, joined, "auxiliary.conv_cat", head.width, rows)
    out = convolution(t, made, "auxiliary.classifier", rows)
    t.touch(made)
    return out
