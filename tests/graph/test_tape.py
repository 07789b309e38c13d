"""The tape against autograd's textbook lessons."""

import pytest

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.operations.norms import layer_norm, norm_weightless
from memplan.graph.operations.products import linear
from memplan.memory.step import StepWalk
from memplan.units import GIB


def leaf(t: Tape, numel: int, *, requires_grad: bool) -> Tensor:
    """A tensor that was there before."""
    made = t.tensor(numel, DType.FP32, requires_grad=requires_grad)
    made.storage.segment = -1
    return made


@pytest.mark.parametrize(("x_grad", "y_grad", "kept"), [(0, 0, 0), (1, 1, 2), (1, 0, 1)])
def test_product_of_sums(x_grad: int, y_grad: int, kept: int) -> None:
    """``(x + 1) * (y + 1)`` on 1 GiB tensors holds 0, 2 or 1 GiB after the forward pass."""
    t = Tape(TapeOptions())
    t.begin("expression")
    x = leaf(t, GIB // 4, requires_grad=bool(x_grad))
    y = leaf(t, GIB // 4, requires_grad=bool(y_grad))
    out = t.mul(t.shift(x), t.shift(y))
    t.end(out)
    after = StepWalk(t).run().after_forward.total_bytes
    assert after - GIB == kept * GIB  # the output itself is alive too


def test_chained_sigmoids() -> None:
    """Five sigmoids keep each one's output: 4 GiB more than the last one."""
    t = Tape(TapeOptions())
    t.begin("expression")
    x = leaf(t, GIB // 4, requires_grad=True)
    for _ in range(5):
        x = t.elementwise(OperationKind.SIGMOID, x)
    t.end(x)
    assert StepWalk(t).run().after_forward.total_bytes - GIB == 4 * GIB


def test_a_storage_counts_once_however_many_operations_keep_it() -> None:
    t = Tape(TapeOptions())
    t.begin("expression")
    x = t.shift(leaf(t, 1024, requires_grad=True))
    first = t.elementwise(OperationKind.SILU, x)
    second = t.elementwise(OperationKind.GELU, x)
    t.end(t.add(first, second))
    kept = StepWalk(t).run().after_forward.total_bytes
    assert kept == 4096 + 4096  # x once, and the sum


@pytest.mark.parametrize(("numel", "size"), [(1, 512), (128, 512), (129, 1024), (0, 0)])
def test_allocations_are_rounded_to_512_bytes(numel: int, size: int) -> None:
    assert allocated_bytes(numel, DType.FP32) == size


def test_an_operation_says_whether_it_keeps_a_weight() -> None:
    """A linear layer keeps its weight where its input needs a gradient, and only there."""
    t = Tape(TapeOptions())
    t.begin("expression")
    linear(t, leaf(t, 64, requires_grad=True), "trained", 8, 8)
    linear(t, leaf(t, 64, requires_grad=False), "first", 8, 8)
    t.frozen = True
    linear(t, leaf(t, 64, requires_grad=True), "frozen", 8, 8)
    linear(t, leaf(t, 64, requires_grad=False), "neither", 8, 8)
    found = [(each.keeps_weight, each.keeps) for each in t.segment.operations]
    assert found == [(True, True), (True, True), (True, True), (False, False)]


def test_under_autocast_a_layer_norm_keeps_copies_of_half_weights() -> None:
    """As two recorded runs have them: the bias is cast first, then the weight, then the input."""
    t = Tape(TapeOptions(autocast=DType.BF16, weights=DType.BF16, compute=DType.BF16))
    t.begin("expression")
    x = t.tensor(64, DType.BF16, requires_grad=True)
    layer_norm(t, x, "norm", 8)
    *casts, norm = t.segment.operations
    given = [each.inputs[0] for each in casts]
    assert [getattr(each, "name", "") for each in given] == ["norm.bias", "norm.weight", ""]
    copies = [each.outputs[0] for each in casts]
    assert list(norm.inputs) == copies[::-1]
    assert {each.storage for each in copies} <= set(norm.saved)


def test_under_autocast_a_norm_without_weight_is_in_fp32() -> None:
    t = Tape(TapeOptions(autocast=DType.BF16))
    t.begin("expression")
    made = norm_weightless(t, t.tensor(64, DType.BF16, requires_grad=True), 8)
    assert made.dtype is DType.FP32
    assert [each.kind for each in t.segment.operations] == [
        OperationKind.TO,
        OperationKind.RMS_NORM,
    ]


def test_a_layer_norm_keeps_its_weight() -> None:
    t = Tape(TapeOptions())
    t.begin("expression")
    layer_norm(t, leaf(t, 64, requires_grad=True), "norm", 8)
    t.shift(leaf(t, 64, requires_grad=True))
    assert [each.keeps_weight for each in t.segment.operations] == [True, False]


def test_every_kind_of_operation_has_a_name_of_its_own() -> None:
    assert len({kind.value for kind in OperationKind}) == len(OperationKind.__members__)


def test_a_name_is_plain_text() -> None:
    """Snapshots are pickled: what they hold must not be an enum."""
    t = Tape(TapeOptions())
    t.begin("expression")
    t.shift(leaf(t, 64, requires_grad=True))
    assert type(t.segment.operations[0].name) is str
