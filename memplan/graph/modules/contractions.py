"""``torch.einsum`` of two tensors: a batched product of what both are turned and laid together to.

Each operand is turned until its batch dimensions come first, and copied where they do not lie together in
memory then; what comes out is turned back (torch 2.13, aten/src/ATen/native/Linear.cpp, ``sumproduct_pair``).
"""

from math import prod

from memplan.graph.modules.functional import batched_product
from memplan.graph.modules.handles import Handle
from memplan.graph.tensors import Parameter


def einsum(equation: str, left: Handle, right: Handle) -> Handle:
    """A letter for every dimension: ``bqhd,bkhd->bhqk``. Autocast casts both before anything is copied."""
    operands, _, wanted = equation.partition("->")
    one, _, two = operands.partition(",")
    left, right = _under_autocast(left), _under_autocast(right)
    sizes = dict(zip(two, right.shape, strict=True)) | dict(zip(one, left.shape, strict=True))
    shared = [each for each in wanted if each in one and each in two]
    rows = [each for each in wanted if each not in two]
    columns = [each for each in wanted if each not in one]
    summed = sorted(set(one) & set(two) - set(wanted))

    def size(letters: list[str]) -> int:
        return prod(sizes[each] for each in letters)

    batch, inner = size(shared), size(summed)
    left = left.permute(*map(one.index, shared + rows + summed))
    left = left.reshape(batch, size(rows), inner)
    right = right.permute(*map(two.index, shared + summed + columns))
    right = right.reshape(batch, inner, size(columns))
    made = batched_product(left, right)
    order = shared + rows + columns
    made = made.view(*(sizes[each] for each in order))
    return made.permute(*map(order.index, wanted))


def _under_autocast(x: Handle) -> Handle:
    """Its copy, which is cached where it is a weight."""
    run, record = x.run, x.record
    if run.autocast is None:
        return x
    if isinstance(record, Parameter):
        return Handle(run, run.cast_weight(record), x.shape, x.strides)
    return x.to(run.autocast)
