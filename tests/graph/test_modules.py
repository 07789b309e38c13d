"""Models as classes: what names hold, how gradients of views lie, layers that are recorded once."""

import gc
import subprocess
import sys
import threading
from itertools import product

import pytest

import memplan
from memplan.dtypes import DType
from memplan.errors import InterpreterError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.options import TapeOptions
from memplan.graph.core.segments import Gradient, Segment
from memplan.graph.core.tensors import Storage
from memplan.graph.model import record_model
from memplan.graph.modules import interpreter
from memplan.graph.modules.basic import Linear
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.module import Module, Site, Weight
from memplan.graph.modules.run import Run
from memplan.graph.modules.strides import dense_strides, row_strides, view_strides
from memplan.graph.stages import stage_model
from memplan.model.parameters import ModelPart
from memplan.sources.models import load_model
from memplan.training.splitting.parallelism import StagePlace


def opened() -> Run:
    run = Run(TapeOptions(batch_size=2, seq_len=8), source="a test")
    run.start("first", None, part=ModelPart.OTHER)
    return run


def at(run: Run) -> Site:
    site = Site()
    site.run = run
    return site


def dies(run: Run, storage: Storage) -> int:
    """The operation behind which a storage is let go."""
    assert storage.segment == run.segment.index
    return storage.last_read


def test_the_last_name_is_the_lifetime() -> None:
    run = opened()
    x = empty(run, (2, 8), DType.FP32)
    other = x
    y = x * 2.0
    del x
    assert not run.is_named(Storage(0, 0, 0))
    assert run.is_named(other.record.storage)
    z = y * 2.0
    held = other.record.storage
    del other
    assert not run.is_named(held)
    assert dies(run, held) == len(run.segment.operations) - 1
    assert z.numel == y.numel


def test_a_name_that_is_bound_anew_lets_go_first_what_the_operation_read() -> None:
    run = opened()
    x = empty(run, (2, 8), DType.FP32)
    first = x.record.storage
    x = x * (x.pow(2).mean() + 1.0)
    made = [each.outputs[0].storage for each in run.segment.operations]
    assert (
        first.touched > made[2].touched > 0
    )  # the factor goes with the product, x when its name moves


def test_what_has_a_name_outlives_the_segment_that_made_it() -> None:
    run = opened()
    table, x = empty(run, (8,), DType.FP32), empty(run, (2, 8), DType.FP32)
    run.start("second", x.record, part=ModelPart.OTHER)
    y = x + table
    storage = table.record.storage
    assert storage.held
    del table
    assert storage in run.segment.releases
    run.finish(y.record)


def test_what_loses_its_name_amid_a_segment_goes_there() -> None:
    """But of a segment that is repeated, and behind the last operation, at its end."""
    for repeat, expected in ((1, 1), (2, None)):
        run = opened()
        first, table, x = (empty(run, (2, 8), DType.FP32) for _ in range(3))
        run.start("second", x.record, part=ModelPart.OTHER, repeat=repeat)
        y = (x + table) * 2.0
        storage, last = table.record.storage, first.record.storage
        del table
        y = y * 2.0
        del first
        run.finish(y.record)
        assert run.segment.released.get(storage) == expected
        assert last not in run.segment.released  # behind the last operation
        assert run.segment.releases == [storage, last]


def test_an_input_whose_name_is_bound_anew_is_let_go() -> None:
    run = opened()
    x = empty(run, (2, 8), DType.FP32)
    run.start("second", x.record, part=ModelPart.OTHER)
    x = x * 2.0
    x = x * 2.0
    run.finish(x.record)
    assert run.segments[1].input_let_go == 0


def test_arguments_are_held_until_a_module_returns() -> None:
    class Doubled(Module):
        def forward(self, x: Handle) -> Handle:
            x = x * 2.0
            return x * 2.0

    run = opened()
    module = Doubled()
    module.attach(at(run), "twice", "twice")
    given = [empty(run, (2, 8), DType.FP32)]
    storage = given[0].record.storage
    module(given.pop())
    assert dies(run, storage) == 1
    assert run.segment.entered == [(0, "twice")]


def test_no_handle_waits_for_the_garbage_collector() -> None:
    gc.disable()
    try:
        run = record_model(memplan.load_model("llama-3.2-1b"), TapeOptions(seq_len=16))
        assert isinstance(run, Run)
        assert not run.names
    finally:
        gc.enable()


def test_an_interpreter_that_counts_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "order_of_release", lambda: ["local"])
    with pytest.raises(InterpreterError, match=r"CPython 3\.11 or later"):
        interpreter.check_interpreter()


# --- strides ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "wanted"), [((2, 3, 4), (6, 4)), ((6, 4), (2, 3, 2, 2)), ((2, 1, 4), (8,))]
)
def test_rows_are_seen_in_any_shape(shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert view_strides(shape, row_strides(shape), wanted) == row_strides(wanted)


def test_a_view_reaches_the_same_elements() -> None:
    shape, strides, wanted = (4, 2, 6), (6, 24, 1), (4, 2, 3, 2)
    found = view_strides(shape, strides, wanted)
    assert found is not None

    def places(sizes: tuple[int, ...], steps: tuple[int, ...]) -> list[int]:
        return [
            sum(at * step for at, step in zip(index, steps, strict=True))
            for index in product(*map(range, sizes))
        ]

    assert places(shape, strides) == places(wanted, found)


@pytest.mark.parametrize(("dim", "shape"), [(-1, (2, 8, 1)), (1, (2, 1, 8)), (-3, (1, 2, 8))])
def test_a_dimension_of_one_counted_from_behind(dim: int, shape: tuple[int, ...]) -> None:
    assert empty(opened(), (2, 8), DType.FP32).unsqueeze(dim).shape == shape


ASKED = """
import sys
import memplan
model = memplan.load_model("llama-3.2-1b")
memplan.estimate(model, memplan.TrainingSetup(micro_batch_size=1, seq_len=64), gpu="a100-80gb")
print(*(name for name in sys.modules if name.startswith("memplan.")))
"""


def test_a_dense_decoder_reads_neither_towers_nor_mixtures() -> None:
    command = [sys.executable, "-W", "ignore", "-c", ASKED]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "memplan.classes.record" in names
    others = (
        "memplan.graph.towers",
        "memplan.classes.mixed.mixtures",
        "memplan.graph.losses.single_stack",
    )
    assert [each for each in names if each.startswith(others)] == []


def test_dense_strides_keep_the_order_of_dimensions() -> None:
    assert dense_strides((2, 4, 3, 5), like=(60, 5, 20, 1)) == (60, 5, 20, 1)


# --- how gradients of views lie -------------------------------------------------------------------------


def heads(run: Run, weight: Weight, *, turned: bool) -> Segment:
    """A projection's heads before their rows, and what reads them; ``turned``: by slices."""
    linear = Linear(16, 16)
    linear.weight = weight
    linear.attach(at(run), "proj", "proj")
    x = empty(run, (2, 8, 16), DType.FP32)
    y = linear(x).view(2, 8, 4, 4).transpose(1, 2)
    z = y.narrow(2) if turned else y * 2.0
    run.finish(z.record)
    return run.segment


@pytest.mark.parametrize(("turned", "copied"), [(True, True), (False, False)])
def test_a_slice_of_heads_has_a_gradient_that_is_copied(turned: bool, copied: bool) -> None:
    segment = heads(opened(), Weight(16, 16, of_linear=True), turned=turned)
    views = [each for each in segment.operations if each.kind is OperationKind.VIEW]
    assert [each.gradients[0] for each in views] == [Gradient.FRESH] * copied


def test_a_mere_view_leaves_no_operation_and_its_gradient_reaches_the_weight() -> None:
    segment = heads(opened(), Weight(16, 16, of_linear=True), turned=False)
    linear, scaled = segment.operations
    assert scaled.inputs[0] is linear.outputs[0]


# --- layers and blueprints ------------------------------------------------------------------------------


def test_layers_with_and_without_a_window_are_recorded_apart() -> None:
    config = {
        "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 5, "vocab_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "use_sliding_window": True, "sliding_window": 8, "max_position_embeddings": 64,
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 3,
    }  # fmt: skip
    tape = record_model(memplan.load_model(config), TapeOptions(seq_len=32))
    assert [segment.repeat for segment in tape.segments if segment.is_layer] == [2, 3]


def test_models_of_one_config_are_equal() -> None:
    first, second = (memplan.load_model("llama-3.2-1b") for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first.blueprint is not None
    assert first.blueprint.with_layers(range(4)) != second.blueprint


def test_stages_with_layers_alike_are_one_model() -> None:
    """So each is recorded and walked once, however many a pipeline has of it."""
    between = StagePlace(is_first=False, is_last=False)
    dense = memplan.load_model("llama-3.1-8b")
    assert stage_model(dense, range(8, 16), between) == stage_model(dense, range(16, 24), between)
    mixed = memplan.load_model("gpt-oss-20b")  # every other layer has a window
    first, second, shifted = (
        stage_model(mixed, range(start, start + 4), between) for start in (4, 8, 9)
    )
    assert first == second != shifted


def test_a_thread_that_looks_at_frames_lengthens_no_life() -> None:
    """As a profiler's does, which keeps what it has seen until it looks again."""
    model, stopped = load_model("llama-3.2-1b"), threading.Event()

    def look() -> None:
        kept: object = None
        while not stopped.wait(0.0005):
            kept = sys._current_frames()
        del kept

    def lives() -> list[list[int]]:
        tapes = [record_model(model, TapeOptions(seq_len=8 * each)) for each in range(1, 41)]
        return [
            [
                output.storage.touched
                for segment in tape.segments
                for operation in segment.operations
                for output in operation.outputs
            ]
            for tape in tapes
        ]

    alone = lives()
    profiler = threading.Thread(target=look)
    profiler.start()
    try:
        beside = lives()
    finally:
        stopped.set()
        profiler.join()
    assert beside == alone
