"""DeepSpeed's own settings: defaults, ``auto``, and what is refused."""

import pytest

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.memory.deepspeed.options import DeepSpeedOptions, read_options
from memplan.training.setup import TrainingSetup
from tests.memory.deepspeed.conftest import Account


def read(stage: int = 2, **options: object) -> DeepSpeedOptions:
    setup = TrainingSetup(engine="deepspeed", zero_stage=stage, engine_options=options)
    return read_options(setup.resolve(), hidden_size=4096)


def test_defaults() -> None:
    options = read()
    assert options.reduce_bucket_size == 500_000_000
    assert not options.overlap_comm
    assert read(3).overlap_comm
    assert options.grad_accum_dtype is None


def test_stage_3_defaults() -> None:
    """DeepSpeed 0.19's own (runtime/zero/config.py)."""
    options = read(3)
    assert options.prefetch_bucket_size == 50_000_000
    assert options.param_persistence_threshold == 100_000
    assert options.max_live_parameters == options.max_reuse_distance == 1_000_000_000
    assert options.sub_group_size == 1_000_000_000
    assert (options.hpz_partition_size, options.zenflow_interval) == (1, 1)
    assert not options.gather_16bit_weights_on_model_save
    assert not options.allgather_sequential


def test_offload_defaults() -> None:
    """DeepSpeed 0.19's own (runtime/zero/offload_config.py)."""
    options = read(3)
    assert (options.optimizer_buffer_count, options.param_buffer_count) == (4, 5)
    assert options.param_buffer_size == 100_000_000
    assert options.param_max_in_cpu == 1_000_000_000


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        pytest.param("reduce_bucket_size", "reduce_bucket_size", 4096 * 4096, id="bucket"),
        pytest.param(
            "stage3_prefetch_bucket_size", "prefetch_bucket_size", 15_099_494, id="prefetch"
        ),
        pytest.param(
            "stage3_param_persistence_threshold", "param_persistence_threshold", 40_960, id="small"
        ),
    ],
)
def test_auto(name: str, field: str, value: int) -> None:
    assert getattr(read(3, **{name: "auto"}), field) == value


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        pytest.param({"reduce_bucket_size": 2e8}, "reduce_bucket_size", 200_000_000, id="float"),
        pytest.param({"reduce_bucket_size": "2e8"}, "reduce_bucket_size", 200_000_000, id="text"),
        pytest.param({"overlap_comm": "true"}, "overlap_comm", True, id="flag"),
        pytest.param({"grad_accum_dtype": "fp32"}, "grad_accum_dtype", DType.FP32, id="dtype"),
        pytest.param(
            {"offload_optimizer.pin_memory": False}, "pin_memory", False, id="dotted name"
        ),
    ],
)
def test_values(given: dict[str, object], field: str, value: object) -> None:
    assert getattr(read(**given), field) == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param({"reduce_buckt_size": 1}, "Did you mean 'reduce_bucket_size'", id="unknown"),
        pytest.param({"reduce_bucket_size": 0.5}, "whole number", id="fraction"),
        pytest.param({"reduce_bucket_size": True}, "whole number", id="bool"),
        pytest.param({"reduce_bucket_size": 0}, "at least 1", id="no bucket"),
        pytest.param({"overlap_comm": 1}, "true or false", id="number for a flag"),
        pytest.param({"grad_accum_dtype": "fp8"}, "fp32, bf16 or fp16", id="dtype"),
        pytest.param({"sub_group_size": "auto"}, "no automatic value", id="no auto"),
    ],
)
def test_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        read(**given)


def test_what_is_not_modelled_is_named(account: Account) -> None:
    made = account(zero_stage=3, engine_options={"zero_quantized_weights": True})
    assert made.left_out == ("zero_quantized_weights=True (not modelled)",)


def test_contiguous_gradients_off_is_named_where_it_is_not_modelled(account: Account) -> None:
    options = {"contiguous_gradients": False}
    assert account(zero_stage=3, engine_options=options).left_out == ()
    assert "contiguous_gradients" in account(zero_stage=2, engine_options=options).unsaved[0]
    # With the optimizer on the CPU the engine turns it on again.
    assert account(zero_stage=2, offload_optimizer="cpu", engine_options=options).left_out == ()


@pytest.mark.parametrize("name", ["bf16_master_weights_and_grads", "bf16_optimizer_states"])
def test_bf16_masters_and_states_go_together(account: Account, name: str) -> None:
    with pytest.raises(SetupError, match="go together"):
        account(zero_stage=2, engine_options={name: True})


def test_stage_0_accumulates_in_the_weights_dtype(account: Account) -> None:
    with pytest.raises(SetupError, match="grad_accum_dtype"):
        account(zero_stage=0, engine_options={"grad_accum_dtype": "fp32"})


def test_rank_must_exist(account: Account) -> None:
    with pytest.raises(SetupError, match="from 0 to 3"):
        account(rank=4, num_gpus=4)


def test_buffers_must_hold_a_shard(account: Account) -> None:
    with pytest.raises(SetupError, match="largest shard"):
        account(
            zero_stage=3,
            offload_optimizer="cpu",
            offload_param="nvme",
            engine_options={"offload_param.buffer_size": 10},
        )
