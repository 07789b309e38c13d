"""Pictures compared with texts: CLIP's and SigLIP's heads with their losses."""

from memplan.dtypes import DType
from memplan.graph.attention.head_layout import batched_matmul
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.experts.routing import divided, summed_rows
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.products import linear
from memplan.model.towers.compared.contrast import Contrast, ContrastBody


def contrast(t: Tape, body: ContrastBody, given: dict[str, Tensor]) -> Tensor:
    """Every picture's product with every text's, and the loss."""
    pictures, texts = given[body.image], given[body.text]
    if body.image_projection:
        size = body.image_size
        pictures = linear(t, pictures, body.image_projection, size, body.width)
    if body.text_projection:
        texts = linear(t, texts, body.text_projection, body.text_size, body.width)
    pictures, texts = _unit(t, pictures, body.width), _unit(t, texts, body.width)
    rows, columns = texts.numel // body.width, pictures.numel // body.width
    products = batched_matmul(t, texts, pictures, rows * columns, body.width)
    logits = _scaled(t, products, body)
    if body.shift:
        logits = t.add(logits, t.parameter(body.shift))
    t.returned += [texts, pictures, logits]
    t.give_out(logits)
    if body.kind is Contrast.SIGMOID:
        return _sigmoid_loss(t, logits)
    labels = [t.tensor(rows, DType.INT64) for _ in range(2)]
    for each in labels:
        t.record(OperationKind.ARANGE, (), (each,))
    first = cross_entropy(t, logits, labels[0])
    second = cross_entropy(t, t.alias(logits), labels[1])
    return t.scale(t.add(first, second), OperationKind.DIV)


def _scaled(t: Tape, products: Tensor, body: ContrastBody) -> Tensor:
    weight = t.parameter(body.scale)
    if not body.divides:
        return t.mul(products, t.elementwise(OperationKind.EXP, weight))
    out = t.tensor(products.numel, products.dtype)
    t.record(
        OperationKind.DIV, (products, weight), (out,), saves=(products, weight),
        gradients=(Gradient.FRESH, Gradient.FRESH),
    )  # fmt: skip
    return out


def _unit(t: Tape, x: Tensor, width: int) -> Tensor:
    """Each row over its length (``_get_vector_norm``)."""
    # Autocast has powers and sums made in fp32.
    given = x if t.autocast is None else t.cast(x, DType.FP32)
    squares = t.square(given)
    total = summed_rows(t, squares, x.numel // width)
    length = t.square(total)
    t.touch(squares, total)
    return divided(t, x, length, in_place=False)


def _sigmoid_loss(t: Tape, logits: Tensor) -> Tensor:
    """A log-sigmoid of the logits times plus or minus one (``SiglipModel.forward``)."""
    signs = t.tensor(logits.numel, logits.dtype)
    t.record(OperationKind.EYE, (), (signs,))
    product = t.mul(logits, signs)
    out = t.tensor(product.numel, product.dtype)
    t.record(
        OperationKind.LOG_SIGMOID, (product,), (out,), saves=(product,),
        gradients=(Gradient.FRESH,),
    )  # fmt: skip
    return t.scale(t.mean(out, out.numel), OperationKind.NEG)
