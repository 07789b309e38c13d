"""Bytes that operations and the kernels of compiled regions move, on operations written out."""

import pytest

from memplan.compute.products import alignment_share, product_seconds, shape_of
from memplan.compute.traffic import (
    arriving_bytes,
    backward_bytes,
    fused_backward_bytes,
    fused_bytes,
    kernels_of,
    made_bytes,
    read_bytes,
    scratch_bytes,
)
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Gradient, Operation
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor

TAPE = Tape(TapeOptions())
TAPE.begin("kernels")


def tensor(numel: int, dtype: DType = DType.BF16, *, trained: bool = True) -> Tensor:
    return TAPE.tensor(numel, dtype, requires_grad=trained)


def of(
    kind: OperationKind, inputs: tuple[Tensor, ...], out: Tensor, *gradients: int,
    saved: tuple[Tensor, ...] = (),
) -> Operation:  # fmt: skip
    return Operation(kind, inputs, (out,), [each.storage for each in saved], gradients)


def test_an_operation_reads_what_it_is_given_and_writes_what_it_makes() -> None:
    add = of(OperationKind.ADD, (tensor(100), tensor(100, DType.FP32)), tensor(100, DType.FP32))
    assert (read_bytes(add), made_bytes(add)) == (200 + 400, 400)
    assert scratch_bytes((512, ~0, 1024, -7)) == 1536


@pytest.mark.parametrize("kind", [OperationKind.EMBEDDING, OperationKind.INDEX_SELECT])
def test_a_look_up_reads_the_rows_that_it_makes(kind: OperationKind) -> None:
    table, rows, out = tensor(5000), tensor(20, DType.INT64, trained=False), tensor(320)
    assert read_bytes(of(kind, (table, rows), out)) == 640 + 160
    few = tensor(8)
    assert read_bytes(of(kind, (table, rows), few)) == 16 + 16


def test_backward_moves_gradients_and_what_was_kept() -> None:
    x, y, out = tensor(100), tensor(100, trained=False), tensor(100)
    kinds = (Gradient.FRESH, Gradient.FRESH)
    product = of(OperationKind.MUL, (x, y), out, *kinds, saved=(y,))
    assert arriving_bytes(product) == 200
    assert backward_bytes(product) == 200 + 200 + y.storage.num_bytes
    # A gradient that is handed on, a view or the same storage, is not written.
    for kind in (Gradient.NONE, Gradient.ALIAS, Gradient.COLUMNS, Gradient.SAVED):
        assert backward_bytes(of(OperationKind.ADD, (x, y), out, kind, kind)) == 0
    # A temporary of 64 bytes is written and read beside it.
    assert backward_bytes(of(OperationKind.MUL, (x, y), out, 64, Gradient.NONE)) == 200 + 128 + 200


def test_what_stands_between_two_products_is_one_kernel() -> None:
    kinds = (
        OperationKind.ADD, OperationKind.MUL, OperationKind.LINEAR, OperationKind.LINEAR,
        OperationKind.ADD,
    )  # fmt: skip
    operations = [of(kind, (tensor(8),), tensor(8)) for kind in kinds]
    found = [[each.kind for each in kernel] for kernel in kernels_of(operations)]
    assert found == [list(kinds[:2]), [kinds[2]], [kinds[3]], [kinds[4]]]


def test_a_kernel_reads_from_outside_once_and_writes_what_is_kept() -> None:
    x, table, inner, out = tensor(1024), tensor(4096), tensor(1024), tensor(1024)
    first = of(OperationKind.MUL, (x, x), inner, Gradient.FRESH, Gradient.FRESH, saved=(x,))
    second = of(OperationKind.ADD, (inner, x), out, Gradient.FRESH, Gradient.FRESH)
    inner.storage.num_bytes = 0  # it stays in registers
    for each in (x, table, out):
        each.storage.num_bytes = 2 * each.numel
    assert fused_bytes([first, second]) == 2048 + 2048
    few = tensor(16)
    few.storage.num_bytes = 32
    assert fused_bytes([of(OperationKind.EMBEDDING, (table,), few)]) == 32 + 32
    # Backward it reads what was kept and the gradient of its result, and writes that of its input.
    assert fused_backward_bytes([second, first]) == 2048 + 2048 + 2048


def test_a_product_is_dealt_to_multiprocessors_in_waves() -> None:
    rate, ten = 1e12, 10
    # 1280 x 1280 results are 50 tiles of 256 x 128: five waves of ten, each 2 * 256 * 128 * k operations.
    whole = product_seconds(
        shape_of(1280 * 64, 64 * 1280, 1280 * 1280, 2 * 1280 * 1280 * 64), 2, rate, 1e15, ten
    )
    assert whole == pytest.approx(5 * (2 * 256 * 128 * 64 / (rate / ten) + 1e-6), rel=1e-9)
    # With one more row a wave more would be needed: 110 tiles of 128 x 128 are done first.
    more = product_seconds(
        shape_of(1281 * 64, 64 * 1280, 1281 * 1280, 2 * 1281 * 1280 * 64), 2, rate, 1e15, ten
    )
    assert more == pytest.approx(11 * (2 * 128 * 128 * 64 / (0.95 * rate / ten) + 1e-6), rel=1e-9)
    # Slow memory: each operand and the result once, two bytes an element.
    slow = product_seconds(
        shape_of(1280 * 64, 64 * 1280, 1280 * 1280, 2 * 1280 * 1280 * 64), 2, rate, 1e9, ten
    )
    assert slow == pytest.approx(2 * (2 * 1280 * 64 + 1280**2) / 1e9, rel=1e-9)


def test_a_small_product_is_cut_along_its_inner_dimension() -> None:
    """One tile of 128 x 128 leaves most multiprocessors idle: eight parts of 1,024, added up in fp32."""
    shape = shape_of(128 * 8192, 8192 * 128, 128 * 128, 2 * 128 * 128 * 8192)
    found = product_seconds(shape, 2, 1e12, 1e12, 100)
    ways = []
    for rows, columns, share in (
        (256, 128, 1.0),
        (128, 128, 0.95),
        (128, 64, 0.75),
        (64, 64, 0.55),
    ):
        tiles = -(-128 // rows) * -(-128 // columns)
        for split in (1, 2, 4, 8):
            work = 2 * rows * columns * 8192 / split / (1e10 * share)
            added = 4 * 128 * 128 * split / 1e12 if split > 1 else 0
            assert tiles * split <= 100
            ways.append(work + 1e-6 + added)
    assert found == pytest.approx(min(ways), rel=1e-9)


def test_rows_that_tensor_cores_do_not_read_whole() -> None:
    assert [alignment_share(*each) for each in ((64, 8), (64, 12), (64, 9), (7, 12))] == [
        1.0, 0.28, 0.17, 0.17,
    ]  # fmt: skip
