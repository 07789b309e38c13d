import pytest

from memplan.errors import SetupError
from memplan.estimator import Verdict, estimate, recording
from memplan.estimator.job import worst_account
from memplan.memory import accounts, likeness
from memplan.memory.deepspeed import job
from memplan.search.grid import Grid
from memplan.search.sweep import sweep
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model

GPUS = [load_gpu(name) for name in ("v100-32gb", "a100-80gb", "h100")]
MODEL = load_model("llama-3.2-1b")


def forget() -> None:
    """Empty everything that estimates remember."""
    for remembered in (
        recording.record, recording.record_and_walk, worst_account,
        recording._walked, recording.walked_on_card,
        job.remembered_buffer, job.remembered_partition,
        accounts._outlined, likeness._spots, likeness._structure, likeness._interned,
    ):  # fmt: skip
        remembered.cache_clear()


def test_nothing_that_is_remembered_changes_an_answer() -> None:
    axes = {
        "num_gpus": [1, 8, 24],
        "engine": ["deepspeed", "fsdp"],
        "zero_stage": [0, 1, 2, 3],
        "fsdp_strategy": ["full_shard", "shard_grad_op"],
        "micro_batch_size": [1, 5],
        "checkpointing": ["none", "full"],
        "gradient_accumulation_steps": [1, 2],
        "seq_len": [128, 1000],
    }
    found = list(sweep(MODEL, Grid(axes=axes), GPUS))
    assert len(found) == 3 * 6 * 2 * 2 * 2 * 2
    for result in reversed(found[::5]):
        for gpu, each in zip(GPUS, result.estimates, strict=True):
            forget()
            assert each.account == estimate(MODEL, result.setup, gpu).account


def test_nothing_is_computed_before_it_is_asked_for() -> None:
    found = sweep(MODEL, Grid(axes={"micro_batch_size": list(range(1, 1000))}))
    assert found.num_tried == 0
    next(iter(found))
    assert found.num_tried == 1
    assert found.num_combinations == 999


def test_what_cannot_be_trained_is_left_out_and_counted() -> None:
    axes = {"num_gpus": 8, "zero_stage": [0, 2], "offload_optimizer": ["none", "cpu"]}
    found = sweep(MODEL, Grid(axes=axes))
    assert sum(1 for _ in found) == 3
    ((reason, count),) = found.impossible.items()
    assert "stage 1 on" in reason
    assert count == 1


def test_an_engine_that_refuses_its_options_is_left_out_too() -> None:
    axes = {"num_gpus": 8, "engine": ["deepspeed", "ddp"], "engine_options": [{"zero_init": True}]}
    found = sweep(MODEL, Grid(axes=axes))
    assert [result.setup.chosen_engine.value for result in found] == ["deepspeed"]
    assert "zero_init" in next(iter(found.impossible))


def test_a_sweep_that_leaves_nothing_is_an_error() -> None:
    axes = {"num_gpus": 8, "zero_stage": 0, "offload_optimizer": "cpu"}
    with pytest.raises(SetupError, match="stage 1 on"):
        list(sweep(MODEL, Grid(axes=axes)))
    with pytest.raises(SetupError, match="excluded"):
        list(sweep(MODEL, Grid(axes={"num_gpus": 8}, exclude=({"num_gpus": 8},))))


def test_a_sweep_can_be_run_again() -> None:
    found = sweep(MODEL, Grid(axes={"num_gpus": 8, "zero_stage": [1, 2]}), GPUS[1:2])
    first = [result.estimates[0].peak_bytes for result in found]
    assert [result.estimates[0].peak_bytes for result in found] == first
    assert found.num_tried == 2


def test_a_node_s_cpu_ram_judges_every_row() -> None:
    """States on the CPU fit a node that has just as many bytes, and none with one less; without a node nothing is said."""
    grid = Grid(axes={"num_gpus": 2, "zero_stage": [2, 3], "offload_optimizer": "cpu"})
    (least, most) = sorted(each.estimates[0].host_bytes for each in sweep(MODEL, grid, GPUS[2:]))
    for node, fitting in ((most, 2), (most - 1, 1), (least - 1, 0)):
        answers = [
            each.estimates[0] for each in sweep(MODEL, grid, GPUS[2:], node_memory_bytes=node)
        ]
        assert [each.host_verdict for each in answers].count(Verdict.FITS) == fitting
        assert all(each.node_memory_bytes == node for each in answers)
    assert all(each.estimates[0].host_verdict is None for each in sweep(MODEL, grid, GPUS[2:]))
