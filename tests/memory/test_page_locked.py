"""What of a rank's CPU RAM is page-locked."""

from typing import Any

import memplan


def host_of(**setup: Any) -> Any:
    fields = {"num_gpus": 8, "seq_len": 128, "kernel_scratch": False, **setup}
    return memplan.estimate("gpt2", memplan.TrainingSetup(**fields)).account.host


PARAMS = 124_439_808


def test_zero_3_locks_gradients_where_it_is_asked_to() -> None:
    """fp32 gradients of the groups and the 16-bit ones; master weights and states are plain memory."""
    asked = {"engine": "deepspeed", "zero_stage": 3, "offload_optimizer": "cpu"}
    locked, plain = (
        host_of(**asked, engine_options={"offload_optimizer.pin_memory": pin})
        for pin in (True, False)
    )
    assert plain.pinned_bytes == 0
    assert abs(locked.pinned_bytes - 6 * PARAMS / 8) < 0.001 * PARAMS
    assert locked.pinned_bytes < locked.held_bytes


def test_offloaded_weights_are_locked_too() -> None:
    asked = {
        "engine": "deepspeed", "zero_stage": 3, "offload_optimizer": "cpu",
        "engine_options": {"offload_optimizer.pin_memory": True},
    }  # fmt: skip
    with_weights = host_of(**asked, offload_param="cpu")
    assert abs(with_weights.pinned_bytes - 8 * PARAMS / 8) < 0.001 * PARAMS


def test_nothing_is_locked_where_nothing_is_offloaded() -> None:
    assert host_of(engine="deepspeed", zero_stage=2).pinned_bytes == 0


def test_the_share_stands_beside_the_arithmetic(run: Any) -> None:
    told = run(
        "explain", "gpt2", "--engine", "deepspeed", "--zero", "2", "--gpus", "8", "--offload", "cpu",
        "--gpu", "t4", "--full",
    ).stdout  # fmt: skip
    assert "page-locked (pin_memory)" in told
    assert "of what is held between steps" in told
