"""Where blocks come and go within an operation, and which gradient is handed on first."""

import pytest

from memplan.dtypes import DType
from memplan.families import read_model
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Operation, scratch_changes
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter
from memplan.graph.experts.routing import top_k
from memplan.graph.model import record_model
from memplan.memory.fsdp2.units import children_first
from memplan.sources.about_models.defaults import class_defaults


def operations(model_type: str, **config: object) -> list[Operation]:
    """All that a model of this type records."""
    given = {"model_type": model_type, **config}
    model = read_model(given, source="config.json", name="x", defaults=class_defaults())
    options = TapeOptions(batch_size=1, seq_len=96)
    return [each for part in record_model(model, options).segments for each in part.operations]


@pytest.mark.parametrize(("width", "blocks"), [(1024, 9), (256, 0)])
def test_the_largest_of_wide_rows_are_looked_for_by_several_blocks(width: int, blocks: int) -> None:
    tape = Tape(TapeOptions())
    tape.begin("layer")
    top_k(tape, tape.tensor(1024 * width, DType.FP32), 1024 * 8, rows=1024)
    scratch = tape.segment.operations[-1].forward_scratch
    assert sum(size > 0 for size in scratch) == blocks
    for changes in scratch_changes(scratch):
        assert sum(size for _, size in changes) == 0


def test_fsdp2_comes_to_the_modules_in_a_module_before_its_own_weights() -> None:
    names = ["norm.weight", "mixer.decay", "mixer.key.weight", "mixer.out.weight", "scale"]
    declared = [
        Parameter(name, (8,), DType.BF16, module=name.rpartition(".")[0].removesuffix("."), trainable=True)
        for name in names
    ]  # fmt: skip
    assert [each.name for each in children_first(declared)] == [
        "norm.weight", "mixer.key.weight", "mixer.out.weight", "mixer.decay", "scale",
    ]  # fmt: skip


def test_of_a_contraction_the_second_operands_gradient_is_handed_on_first() -> None:
    """Each is a view of its own, the second one's the younger node, where gradients are added to what others read too."""
    written = operations("mamba2", num_hidden_layers=1)
    places = {tensor: place for place, each in enumerate(written) for tensor in each.outputs}
    viewed = [
        [places[tensor] for tensor in each.inputs]
        for each in written
        if each.kind is OperationKind.MATMUL
        and all(
            tensor in places and written[places[tensor]].kind is OperationKind.VIEW
            for tensor in each.inputs
        )
    ]
    assert viewed
    assert all(first < second for first, second in viewed)
