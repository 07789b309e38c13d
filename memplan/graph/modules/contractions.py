"""Products over some of several dimensions, as ``torch.einsum`` makes batched ones of them.

Each operand is turned until its batch dimensions come first, and copied where they do not lie together
in memory then; what comes out is turned back
(torch 2.13, aten/src/ATen/native/Linear.cpp, ``einsum``, ``sumproduct_pair``).
"""

from math import prod

from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tensors import Parameter
from memplan.graph.modules.functional import spread
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layouts import in_rows
from memplan.graph.modules.strides import view_strides


def einsum(equation: str, one: Handle, two: Handle) -> Handle:
    """``torch.einsum(equation, one, two)``: autocast casts both before anything is copied."""
    given, result = equation.split("->")
    first, second = given.split(",")
    one, two = _under_autocast(one), _under_autocast(two)
    # Views of their own, in the order of the operands, before either is cut into matrices: the second one's
    # gradient is handed on first, whichever of them the product takes as its left.
    one, two = (each.turned(*range(len(each.shape))) for each in (one, two))
    sizes = dict(zip(first + second, one.shape + two.shape, strict=True))
    batch = [each for each in result if each in first and each in second]
    summed = sorted(set(first) & set(second) - set(result))
    rows = [each for each in result if each not in second]
    columns = [each for each in result if each not in first]
    left, right = (one, first), (two, second)
    if rows and columns and result.index(rows[-1]) > result.index(columns[0]):
        left, right, rows, columns = right, left, columns, rows
    factor = grouped(*left, (batch, rows, summed))
    other = grouped(*right, (batch, summed, columns))
    made = multiplied(factor, other)
    del other  # C++ lets go of what it made last first
    del factor
    order = [*batch, *rows, *columns]
    made = made.view(*(sizes[each] for each in order))
    return made.permute(*(order.index(each) for each in result))


def grouped(x: Handle, names: str, groups: tuple[list[str], ...]) -> Handle:
    """A tensor whose dimensions are merged into three."""
    turned = x.permute(*(names.index(each) for group in groups for each in group))
    sizes = dict(zip(names, x.shape, strict=True))
    shape = tuple(prod(sizes[each] for each in group) for group in groups)
    if view_strides(turned.shape, turned.strides, shape) is None:
        turned = turned.contiguous()
    before, strides = turned.shape, view_strides(turned.shape, turned.strides, shape)
    # The product's own gradients are views already, to which the engine adds nothing in place.
    made = Handle(x.run, turned.record, shape, strides)
    return turned.leads_to(made, lambda lies: view_strides(shape, lies, before))


def multiplied(left: Handle, right: Handle, *, gradient: Gradient = Gradient.VIEW) -> Handle:
    """``torch.bmm`` of what autocast has cast."""
    made = empty(left.run, (*left.shape[:2], right.shape[-1]), left.dtype)
    saves = [right.record] * left.requires_grad + [left.record] * right.requires_grad
    left.run.record(
        OperationKind.MATMUL, (left.record, right.record), (made.record,), saves=saves,
        gradients=(gradient, gradient), flops=2 * made.numel * left.shape[-1],
    )  # fmt: skip
    for each in (left, right):
        each.leads_to(made, in_rows(each.shape))
    return made


def matmul(left: Handle, right: Handle) -> Handle:
    """``left @ right`` of as many matrices: autocast's casts, what ``reshape`` has to copy, the product.

    What it is given lives until it returns, as any call's arguments do.
    """
    second = _under_autocast(right)
    first = _under_autocast(left)
    if second.shape[:-2] != left.shape[:-2]:
        second = spread(second, (*left.shape[:-2], *second.shape[-2:]))
    made = multiplied(_matrices(first), _matrices(second), gradient=Gradient.FRESH)
    return made.view(*left.shape[:-1], right.shape[-1])


def _matrices(x: Handle) -> Handle:
    """With one dimension of batches: a view, to whose gradients the engine adds nothing in place, or a copy."""
    shape = prod(x.shape[:-2]), *x.shape[-2:]
    if len(x.shape) == len(shape) or view_strides(x.shape, x.strides, shape) is None:
        return x.reshape(*shape)
    return x.seen_as(*shape)


def _under_autocast(x: Handle) -> Handle:
    """Its copy, which is cached where it is a weight."""
    run, record = x.run, x.record
    if run.autocast is None:
        return x
    if isinstance(record, Parameter):
        return Handle(run, run.cast_weight(record), x.shape, x.strides)
    return x.to(run.autocast)
