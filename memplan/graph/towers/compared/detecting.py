"""Patches compared with texts, and boxes of them (``Owlv2ForObjectDetection`` of transformers)."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.state import Flow
from memplan.model.networks import Activation
from memplan.model.towers.compared.contrast import PatchQueriesBody

BOX = 4
"""Numbers of a box."""


def patch_queries(
    t: Tape, x: Tensor, body: PatchQueriesBody, flow: Flow, given: dict[str, Tensor]
) -> Tensor:
    """Logits, chances and boxes of every patch; the class has no loss, so that their sum is taken."""
    patches = _merged(t, given["vision_model"], body, flow)
    logits = _logits(t, patches, _unit(t, x, body.width), body)
    apart = Tensor(patches.numel, patches.dtype, patches.storage)
    chances = _patch_head(t, apart, "objectness_head", body.size, 1)
    boxes = t.shift(_patch_head(t, patches, "box_head", body.size, BOX))
    boxes = t.elementwise(OperationKind.SIGMOID, boxes)
    sums = []
    for each in (logits, boxes, chances):
        t.returned.append(each)
        t.give_out(each)
        total = t.tensor(1, each.dtype)
        t.record(OperationKind.SUM, (each,), (total,), gradients=(Gradient.FRESH,))
        sums.append(total)
    return t.add(t.add(sums[0], sums[1]), sums[2])


def _merged(t: Tape, x: Tensor, body: PatchQueriesBody, flow: Flow) -> Tensor:
    """Each patch times its picture's first token, normed."""
    first = t.slice(x, flow.items * body.size)
    rest = t.slice(x, x.numel - first.numel)
    product = t.tensor(rest.numel, rest.dtype)
    t.record(
        OperationKind.MUL, (rest, first), (product,), saves=(rest, first),
        gradients=(Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    return layer_norm(t, product, "layer_norm", body.size)


def _unit(t: Tape, x: Tensor, width: int) -> Tensor:
    """Each row over its length and a little more."""
    length = t.tensor(x.numel // width, x.dtype if t.autocast is None else DType.FP32)
    t.record(
        OperationKind.VECTOR_NORM, (x,), (length,), saves=(x, length), gradients=(Gradient.FRESH,)
    )
    more = t.shift(length)
    out = t.tensor(x.numel, length.dtype)
    t.record(
        OperationKind.DIV, (x, more), (out,), saves=(x, more),
        gradients=(Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    return out


def _logits(t: Tape, x: Tensor, query: Tensor, body: PatchQueriesBody) -> Tensor:
    """``Owlv2ClassPredictionHead``: products, shifted and scaled for each patch, in fp32."""
    rows = x.numel // body.size
    own = linear(t, x, "class_head.dense0", body.size, body.width, bias=True)
    products = batched_matmul(t, _unit(t, own, body.width), query, rows, body.width)
    shift = linear(t, x, "class_head.logit_shift", body.size, 1, bias=True)
    scale = linear(t, x, "class_head.logit_scale", body.size, 1, bias=True)
    scale = t.shift(t.elementwise(OperationKind.EXPM1, scale))
    logits = t.mul(t.add(products, shift), scale)
    seen = t.tensor(rows, DType.BOOL)
    t.record(OperationKind.EQ, (), (seen,))
    out = t.tensor(rows, logits.dtype)
    t.record(
        OperationKind.WHERE, (logits, seen), (out,), saves=(seen,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    t.touch(own)
    return t.cast(out, DType.FP32)


def _patch_head(t: Tape, x: Tensor, name: str, size: int, outputs: int) -> Tensor:
    for number in range(2):
        raised = linear(t, x, f"{name}.dense{number}", size, size, bias=True)
        x = activation(t, raised, Activation.GELU)
    return linear(t, x, f"{name}.dense2", size, outputs, bias=True)
