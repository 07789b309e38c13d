"""Options of FSDP2, FSDP1 and DDP: what is read, what is refused, and in which words."""

from typing import Any

import pytest

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.memory.ddp import CommHook, DdpOptions
from memplan.memory.fsdp1 import Fsdp1Options
from memplan.memory.fsdp1.options import Prefetch
from memplan.memory.fsdp2 import Fsdp2Options
from memplan.training.setup import TrainingSetup
from memplan.units import MIB
from tests.accuracy.sharding_records import account_of
from tests.memory.test_sharding_properties import SMALL


def test_defaults_of_fsdp2() -> None:
    options = Fsdp2Options.of(TrainingSetup(engine="fsdp", num_gpus=8))
    assert options.reshard_after_forward is True
    assert options.reduce_dtype is DType.FP32


@pytest.mark.parametrize("kind", [DdpOptions, Fsdp1Options, Fsdp2Options])
def test_what_a_field_starts_with_is_what_is_read_of_nothing(kind: Any) -> None:
    """Said twice, it is the same, but for what the training loop and the precision decide."""
    engine = {DdpOptions: "ddp", Fsdp1Options: "fsdp1", Fsdp2Options: "fsdp"}[kind]
    read = kind.of(TrainingSetup(engine=engine, num_gpus=8).resolve())
    decided = {"reduce_dtype": read.reduce_dtype} if kind is Fsdp2Options else {}
    assert read == kind(sync_each_batch=read.sync_each_batch, **decided)


@pytest.mark.parametrize("engine", ["fsdp", "fsdp1"])
@pytest.mark.parametrize(
    ("kernels", "syncs"), [("hf", False), ("liger", False), ("torchtitan", True)]
)
def test_the_training_loop_decides_when_gradients_are_reduced(
    engine: str, kernels: str, syncs: bool
) -> None:
    setup = TrainingSetup(engine=engine, num_gpus=8, kernels=kernels)  # type: ignore[arg-type]
    options = Fsdp2Options.of(setup) if engine == "fsdp" else Fsdp1Options.of(setup)
    assert options.sync_each_batch is syncs


def test_accelerate_reduces_in_16_bits_and_only_once_a_step() -> None:
    setup = TrainingSetup(engine="fsdp", num_gpus=8, engine_options={"wrapping": "accelerate"})
    options = Fsdp2Options.of(setup)
    assert options.reduce_dtype is None
    assert not options.sync_each_batch


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(True, True, id="true"),
        pytest.param("false", False, id="text"),
        pytest.param("auto", None, id="auto"),
        pytest.param(None, True, id="null"),
    ],
)
def test_reshard_after_forward(value: object, expected: object) -> None:
    setup = TrainingSetup(
        engine="fsdp", num_gpus=8, engine_options={"reshard_after_forward": value}
    )
    assert Fsdp2Options.of(setup).reshard_after_forward is expected


def test_hybrid_makes_one_copy_for_each_node() -> None:
    setup = TrainingSetup(engine="fsdp", num_gpus=32, fsdp_strategy="hybrid")
    options = Fsdp2Options.of(setup)
    assert options.data_parallel_replicate_degree == 4
    assert options.shard_degree(setup) == 8


def test_options_of_fsdp1_and_ddp() -> None:
    fsdp1 = TrainingSetup(
        engine="fsdp1", num_gpus=8, engine_options={"backward_prefetch": "backward_post"}
    )
    assert Fsdp1Options.of(fsdp1).backward_prefetch is Prefetch.POST
    ddp = TrainingSetup(engine="ddp", num_gpus=8, engine_options={"comm_hook": "bf16_compress"})
    assert DdpOptions.of(ddp).comm_hook is CommHook.BF16_COMPRESS


@pytest.mark.parametrize(("cap_mb", "caps_mib"), [(None, (1, 25)), (25, (25, 25)), (50, (50, 50))])
def test_a_bucket_cap_that_is_said_is_the_first_buckets_too(
    cap_mb: int | None, caps_mib: tuple[int, int]
) -> None:
    options = {} if cap_mb is None else {"bucket_cap_mb": cap_mb}
    setup = TrainingSetup(engine="ddp", num_gpus=8, engine_options=options)
    assert DdpOptions.of(setup).bucket_caps == tuple(each * MIB for each in caps_mib)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"engine": "fsdp", "engine_options": {"reshard_after_foward": True}},
            "engine_options: fsdp has no option 'reshard_after_foward'. "
            "Did you mean 'reshard_after_forward'?",
            id="misspelled",
        ),
        pytest.param(
            {"engine": "fsdp1", "engine_options": {"bucket_cap_mb": 25}},
            "engine_options: fsdp1 has no option 'bucket_cap_mb'.",
            id="another-engine's",
        ),
        pytest.param(
            {"engine": "fsdp", "engine_options": {"reshard_after_forward": 8}},
            "reshard_after_forward: expected true or false, got 8",
            id="not-a-boolean",
        ),
        pytest.param(
            {"engine": "fsdp", "engine_options": {"reduce_dtype": "int64"}},
            "reduce_dtype: expected fp32, bf16 or fp16, got 'int64'",
            id="not-a-float",
        ),
        pytest.param(
            {"engine": "fsdp", "engine_options": {"wrapping": "titan"}},
            "wrapping: 'titan' is not one of layers, accelerate, torchtitan.",
            id="unknown-wrapping",
        ),
        pytest.param(
            {"engine": "fsdp", "engine_options": {"data_parallel_replicate_degree": 3}},
            "8 data-parallel ranks cannot be split into 3 equal groups",
            id="no-divisor",
        ),
        pytest.param(
            {"engine": "ddp", "engine_options": {"bucket_cap_mb": 0}},
            "bucket_cap_mb: expected a number above 0, got 0",
            id="no-bucket",
        ),
        pytest.param(
            {"engine": "fsdp", "fsdp_strategy": "no_shard"}, "FSDP2 always shards", id="no-shard"
        ),
        pytest.param(
            {
                "engine": "fsdp", "fsdp_strategy": "shard_grad_op",
                "engine_options": {"reshard_after_forward": True},
            },
            "shard_grad_op means reshard_after_forward false",
            id="contradiction",
        ),
        pytest.param(
            {"engine": "fsdp", "offload_param": "nvme"}, "FSDP offloads to cpu only", id="nvme"
        ),
        pytest.param(
            {"engine": "fsdp", "offload_optimizer": "cpu"},
            "offloads parameters, gradients and optimizer states together",
            id="half-an-offload",
        ),
        pytest.param(
            {"engine": "fsdp1", "offload_param": "cpu", "fsdp_strategy": "no_shard"},
            "FSDP1 does not offload whole parameters",
            id="whole-offload",
        ),
    ],
)  # fmt: skip
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError) as caught:
        account_of(SMALL, TrainingSetup(num_gpus=8, seq_len=32, **fields))
    assert message in str(caught.value)
