"""Where the elements of a tensor lie, by torch's own rules: rows, dense orders, views of another shape."""

from functools import lru_cache

Shape = tuple[int, ...]
"""Sizes of a tensor's dimensions, or the elements between neighbours in each of them."""


@lru_cache(maxsize=4096)
def row_strides(shape: Shape) -> Shape:
    """Strides of a tensor whose last dimension is the fastest.

    >>> row_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def dense_strides(shape: Shape, like: Shape) -> Shape:
    """Strides without holes, in the order of others (aten/src/ATen/TensorIterator.cpp).

    >>> dense_strides((2, 4, 3), like=(100, 1, 30))
    (12, 1, 4)
    """
    spread = any(step == 0 and size > 1 for size, step in zip(shape, like, strict=False))
    if spread or len(shape) != len(like):
        return row_strides(shape)
    strides, step = [0] * len(shape), 1
    for each in sorted(range(len(shape)), key=lambda each: (like[each], -each)):
        strides[each] = step
        step *= shape[each]
    return tuple(strides)


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Whether elements lie in rows; where a dimension of one lies does not count.

    >>> is_contiguous((2, 1, 4), (4, 999, 1))
    True
    """
    rows = row_strides(shape)
    return strides == rows or all(
        mine == row for mine, row, size in zip(strides, rows, shape, strict=True) if size > 1
    )


@lru_cache(maxsize=4096)
def broadcast(left: Shape, right: Shape) -> Shape:
    """The shape that two operands have together.

    >>> broadcast((2, 8, 5, 64), (1, 5, 64))
    (2, 8, 5, 64)
    """
    width = max(len(left), len(right))
    pairs = zip((1,) * (width - len(left)) + left, (1,) * (width - len(right)) + right, strict=True)
    return tuple(max(pair) for pair in pairs)


@lru_cache(maxsize=4096)
def view_strides(shape: Shape, strides: Shape, wanted: Shape) -> Shape | None:
    """Strides of a view of another shape; None where there is no such view.

    (aten/src/ATen/TensorUtils.cpp, ``computeStride_impl``)

    >>> view_strides((2, 8, 64), (512, 64, 1), (2, 8, 4, 16))
    (512, 64, 16, 1)
    >>> view_strides((2, 4, 8, 16), (512, 16, 64, 1), (2, 4, 128)) is None
    True
    """
    if 0 in shape:
        return row_strides(wanted)
    found, at = [0] * len(wanted), len(wanted) - 1
    size = taken = 1
    base = strides[-1] if strides else 1
    for dim in range(len(shape) - 1, -1, -1):
        size *= shape[dim]
        if dim and (shape[dim - 1] == 1 or strides[dim - 1] == size * base):
            continue
        while at >= 0 and (taken < size or wanted[at] == 1):
            found[at] = taken * base
            taken *= wanted[at]
            at -= 1
        if taken != size:
            return None
        if dim:
            base, size, taken = strides[dim - 1], 1, 1
    return tuple(found) if at == -1 else None


def may_overlap(shape: Shape, strides: Shape) -> bool:
    """Whether an element may be seen twice; dimensions of one say nothing.

    (torch 2.13, csrc/autograd/FunctionsManual.cpp, ``_maybe_overlapping_memory``)

    >>> may_overlap((2, 3, 4), (8, 2, 1)), may_overlap((2, 1, 4), (8, 2, 1))
    (True, False)
    """
    last = 0
    for stride, size in sorted(
        (stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1
    ):
        if stride <= last:
            return True
        last += stride * (size - 1)
    return False


def is_channels_last(shape: Shape, strides: Shape) -> bool:
    """Whether torch takes a picture for one whose channels come last: of a batch of one it goes by the batch's stride too.

    (torch 2.13, c10/core/MemoryFormat.h, ``is_channels_last_strides_2d_s4``)

    >>> is_channels_last((1, 8, 4, 4), (128, 1, 32, 8)), is_channels_last((1, 8, 4, 4), (8, 1, 32, 8))
    (True, False)
    """
    if len(shape) != 4 or not strides[1]:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        if strides[dim] < least or (not dim and least == strides[1]):
            return False
        least = strides[dim] * max(1, shape[dim])
    return True
