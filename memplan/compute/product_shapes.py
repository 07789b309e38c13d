"""The shape of an operation's product of matrices, read off its operands."""

from typing import TypeGuard

from memplan.compute.products import Shape, shape_of
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Operation
from memplan.graph.core.tensors import Parameter, Tensor


def product_shape(operation: Operation) -> Shape:
    """Of its forward pass."""
    first, out, second = operation.inputs[0], operation.outputs[0], second_operand(operation)
    if out.dtype is DType.FP8:
        out = operation.outputs[-1]  # behind the codes that it keeps
    if not (first.numel and second.numel and out.numel):
        return Shape(1, 1, 1, 1)
    if _is_matrix(second):
        return _by_weight(operation, second)
    factor = second.num_weights if _is_packed(second) else second.numel
    return shape_of(first.numel, factor, out.numel, operation.flops)


def _is_matrix(tensor: Tensor) -> TypeGuard[Parameter]:
    """Whether it is one weight, and no experts' side by side."""
    if not isinstance(tensor, Parameter) or tensor.packed is not None:
        return False
    return tensor.experts is None and len(tensor.shape) == 2


def _by_weight(operation: Operation, weight: Parameter) -> Shape:
    """Whatever share of the rows the rank has, its product is of as many as the FLOPs say."""
    columns, width = weight.shape
    rows = operation.flops // (2 * columns * width)
    if columns * rows == operation.inputs[0].numel:
        columns, width = width, columns  # it lies the other way round, as GPT-2's do
    return Shape(1, rows, columns, width)


def second_operand(operation: Operation) -> Tensor:
    """What the first input is multiplied by: of one that is normed first, it stands behind the norm's weights."""
    inputs = operation.inputs
    if has_norm(operation):
        return next(each for each in inputs if isinstance(each, Parameter) and len(each.shape) > 1)
    return inputs[1] if len(inputs) > 1 else inputs[0]


def has_norm(operation: Operation) -> bool:
    """Whether a norm runs before the product, in the same module."""
    second = operation.inputs[1] if len(operation.inputs) > 2 else None
    is_linear = operation.kind is OperationKind.LINEAR
    return is_linear and isinstance(second, Parameter) and len(second.shape) == 1


def _is_packed(tensor: Tensor) -> TypeGuard[Parameter]:
    return isinstance(tensor, Parameter) and tensor.packed is not None
