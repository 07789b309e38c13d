"""accelerate's YAML files: what they mean, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from memplan.errors import ConfigError
from memplan.memory.fsdp1 import Fsdp1Options
from memplan.memory.fsdp2 import Fsdp2Options
from memplan.memory.fsdp2.options import Wrapping
from memplan.sources.accelerate_config import accelerate_fields, read_accelerate_config
from memplan.training.setup import TrainingSetup

FSDP2_FILE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def fsdp(version: int, **keys: object) -> dict[str, Any]:
    section = {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return {
        "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8,
        "fsdp_config": {**section, **keys},
    }  # fmt: skip


def setup_of(config: dict[str, Any], **given: object) -> TrainingSetup:
    return TrainingSetup(**accelerate_fields(config, given, source="a.yaml").fields)  # type: ignore[arg-type]


def test_a_whole_file_becomes_a_setup(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(FSDP2_FILE)
    setup = TrainingSetup(**read_accelerate_config(path).fields)  # type: ignore[arg-type]
    assert setup.num_gpus == 16
    assert setup.nodes == 2
    assert setup.chosen_precision.value == "bf16-mixed"
    assert setup.checkpointing.value == "full"  # type: ignore[union-attr]
    options = Fsdp2Options.of(setup)
    assert options.wrapping is Wrapping.ACCELERATE
    assert options.reduce_dtype is None
    assert not options.sync_each_batch


def test_autocast_is_added_to_fsdp1_and_not_to_fsdp2() -> None:
    first, second = setup_of(fsdp(1)), setup_of(fsdp(2))
    assert Fsdp1Options.of(first).autocast
    assert first.upcast_outputs
    assert not Fsdp2Options.of(second).autocast
    assert not second.upcast_outputs


def test_absent_keys_of_fsdp1_take_the_launcher_s_defaults() -> None:
    setup = setup_of(fsdp(1))
    options = Fsdp1Options.of(setup)
    assert setup.fsdp_strategy is not None
    assert setup.fsdp_strategy.value == "full_shard"
    assert options.use_orig_params
    assert options.backward_prefetch.value == "no_prefetch"
    assert options.init_device.value == "meta"
    assert options.state_dict_type.value == "full_state_dict"


def test_without_a_policy_fsdp1_makes_one_unit_of_the_model() -> None:
    config = fsdp(1)
    del config["fsdp_config"]["fsdp_auto_wrap_policy"]
    assert Fsdp1Options.of(setup_of(config)).wrapping.value == "none"


@pytest.mark.parametrize(
    ("keys", "strategy"),
    [
        pytest.param({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "shard_grad_op", id="by-name"),
        pytest.param({"fsdp_sharding_strategy": 4}, "hybrid", id="by-number"),
        pytest.param({"fsdp_reshard_after_forward": "NO_SHARD"}, "no_shard", id="newer-key"),
        pytest.param({"sharding_strategy": "FULL_SHARD"}, "full_shard", id="without-prefix"),
    ],
)
def test_strategies_of_fsdp1(keys: dict[str, object], strategy: str) -> None:
    setup = setup_of(fsdp(1, **keys))
    assert setup.fsdp_strategy is not None
    assert setup.fsdp_strategy.value == strategy


def test_ddp_and_one_gpu() -> None:
    config = {"distributed_type": "MULTI_GPU", "mixed_precision": "fp16", "num_processes": 4}
    setup = setup_of(config)
    assert (setup.num_gpus, setup.chosen_engine.value) == (4, "ddp")
    assert setup.chosen_precision.value == "fp16-amp"
    assert setup_of({"distributed_type": "NO", "num_processes": 1}).num_gpus == 1


def test_other_makers_cards_run_ddp() -> None:
    read = accelerate_fields(
        {"distributed_type": "MULTI_XPU", "num_processes": 4}, {}, source="a.yaml"
    )
    assert read.fields["engine"] == "ddp"
    assert any("Intel's cards" in note for note in read.notes)


def test_offload_takes_the_optimizer_along() -> None:
    setup = setup_of(fsdp(2, fsdp_offload_params="true"))
    assert setup.offload_param.value == setup.offload_optimizer.value == "cpu"


def test_checkpoints_in_cpu_ram() -> None:
    keys = {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True}
    assert setup_of(fsdp(2, **keys)).offload_activations.value == "checkpoints"


def test_replicas() -> None:
    config = fsdp(2) | {"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}
    assert Fsdp2Options.of(setup_of(config)).data_parallel_replicate_degree == 2


def test_options_given_beside_the_file_are_kept() -> None:
    fields = accelerate_fields(
        fsdp(2), {"engine_options": {"sync_each_batch": True}}, source="a.yaml"
    ).fields
    assert fields["engine_options"]["sync_each_batch"] is True  # type: ignore[index]


def test_what_surprises_is_named() -> None:
    file = accelerate_fields(fsdp(2, fsdp_sharding_strategy="FULL_SHARD"), {}, source="a.yaml")
    assert file.notes == ("fsdp_sharding_strategy: FSDP2 goes by fsdp_reshard_after_forward",)


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        pytest.param(
            fsdp(2, fsdp_reshard_after_foward=True), {},
            "a.yaml: fsdp_config.fsdp_reshard_after_foward: accelerate has no such key. "
            "Did you mean 'reshard_after_forward'?",
            id="misspelled",
        ),
        pytest.param(
            fsdp(2) | {"num_procesess": 8}, {},
            "a.yaml: num_procesess: accelerate has no such key. Did you mean 'num_processes'?",
            id="misspelled-outside",
        ),
        pytest.param(
            {"distributed_type": "DEEPSPED"}, {},
            "a.yaml: distributed_type: DEEPSPED is not read from this file. "
            "Did you mean 'deepspeed'?",
            id="kind",
        ),
        pytest.param(
            fsdp(3), {}, "a.yaml: fsdp_config.fsdp_version: is 1 or 2, not 3", id="version"
        ),
        pytest.param(
            fsdp(2, fsdp_auto_wrap_policy="SIZE_BASED_WRAP"), {},
            "units by size are not modelled",
            id="size-based",
        ),
        pytest.param(
            fsdp(2, fsdp_auto_wrap_policy="NO_WRAP"), {}, "use TRANSFORMER_BASED_WRAP", id="no-wrap"
        ),
        pytest.param(
            fsdp(2, fsdp_activation_checkpointing_offload=True), {}, "needs fsdp_version 2",
            id="checkpoint-offload",
        ),
        pytest.param(
            fsdp(1, fsdp_sharding_strategy="FULL"), {}, "'FULL' is not one of FULL_SHARD",
            id="strategy",
        ),
        pytest.param(
            fsdp(1, fsdp_offload_params="maybe"), {}, "expected true or false, got 'maybe'",
            id="flag",
        ),
        pytest.param(
            fsdp(2) | {"mixed_precision": "fp8"}, {}, "a.yaml: fp8_config.backend: none is not modelled",
            id="fp8",
        ),
        pytest.param(
            fsdp(2) | {"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP"}}, {},
            "a.yaml: fp8_config.backend: MSAMP is not modelled; use TE or AO", id="fp8-section",
        ),
        pytest.param(
            fsdp(2) | {"num_processes": "8"}, {}, "expected a whole number, got '8'", id="number"
        ),
        pytest.param(
            fsdp(2), {"num_gpus": 16},
            "a.yaml: num_processes: the file says num_gpus 8, the options say 16",
            id="contradiction",
        ),
        pytest.param({"use_cpu": True}, {}, "a.yaml: use_cpu:", id="cpu"),
    ],
)  # fmt: skip
def test_refused(config: dict[str, Any], given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        accelerate_fields(config, given, source="a.yaml")
    assert message in str(caught.value)


def deepspeed(**keys: object) -> dict[str, Any]:
    return {
        "distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_processes": 8,
        "deepspeed_config": keys,
    }  # fmt: skip


def test_deepspeed_in_the_file() -> None:
    setup = setup_of(
        deepspeed(
            zero_stage=3, zero3_init_flag=True, offload_optimizer_device="cpu",
            offload_param_device="none", gradient_accumulation_steps=4, gradient_clipping=1.0,
            zero3_save_16bit_model=True, deepspeed_multinode_launcher="standard",
        )
    )  # fmt: skip
    assert (setup.num_gpus, setup.chosen_engine.value) == (8, "deepspeed")
    assert setup.zero_stage is not None
    assert setup.zero_stage.value == 3
    assert (setup.offload_optimizer.value, setup.offload_param.value) == ("cpu", "none")
    assert setup.gradient_accumulation_steps == 4
    assert setup.chosen_precision.value == "bf16-master"
    options = dict(setup.engine_options)
    assert options["zero_init"] is True
    assert options["stage3_gather_16bit_weights_on_model_save"] is True


def test_absent_keys_of_deepspeed_take_the_plugin_s_defaults() -> None:
    setup = setup_of(deepspeed())
    assert setup.zero_stage is not None
    assert setup.zero_stage.value == 2
    assert "zero_init" not in dict(setup.engine_options)
    assert dict(setup_of(deepspeed(zero_stage=2, zero3_init_flag=True)).engine_options) == {}


def test_a_ds_config_named_from_where_the_job_is_launched(tmp_path: Path) -> None:
    """Beside the file, or in the nearest folder above that has it."""
    folder = tmp_path / "configs" / "slurm"
    folder.mkdir(parents=True)
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    path = folder / "a.yaml"
    path.write_text(yaml.safe_dump(deepspeed(deepspeed_config_file="configs/slurm/ds.json")))
    assert read_accelerate_config(path).fields["zero_stage"] == 3


def test_a_ds_config_that_the_file_names(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    path = tmp_path / "a.yaml"
    for stage, device, refused in ((1, "cpu", False), (2, "none", True)):
        named = deepspeed(
            deepspeed_config_file="ds.json", zero_stage=stage, offload_optimizer_device=device
        )
        path.write_text(yaml.safe_dump(named))
        if refused:
            with pytest.raises(
                ConfigError, match=r"offload_optimizer_device: ds\.json has its own"
            ):
                read_accelerate_config(path)
        else:
            found = read_accelerate_config(path).fields
            assert (found["zero_stage"], found["offload_optimizer"]) == (1, "cpu")
            assert (found["precision"], found["num_gpus"]) == ("bf16-master", 8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(
            deepspeed(zero3_init=True),
            "a.yaml: deepspeed_config.zero3_init: accelerate has no such key. "
            "Did you mean 'zero3_init_flag'?",
            id="misspelt",
        ),
        pytest.param(deepspeed(zero_stage=4), "must be 0, 1, 2 or 3", id="stage"),
        pytest.param(deepspeed(zero_stage=3, zero3_init_flag="maybe"), "true or false", id="flag"),
        pytest.param(deepspeed(deepspeed_config_file=3), "write the path", id="path"),
        pytest.param(
            deepspeed() | {"mixed_precision": "fp8"}, "fp8 is not modelled with DeepSpeed", id="fp8"
        ),
    ],
)
def test_what_is_wrong_with_deepspeed_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        accelerate_fields(config, {}, source="a.yaml")
    assert message in str(caught.value)


def test_sections_of_other_kinds_are_named() -> None:
    file = accelerate_fields(fsdp(2) | {"deepspeed_config": {"zero_stage": 3}}, {}, source="a.yaml")
    assert file.notes == ("deepspeed_config does nothing with distributed_type FSDP",)


def test_fp8_is_read_with_its_backend() -> None:
    asked = {"mixed_precision": "fp8", "fp8_config": {"backend": "AO", "pad_inner_dim": True}}
    found = accelerate_fields(fsdp(2) | asked, {}, source="a.yaml").fields
    assert (found["fp8"], found["precision"]) == ("torchao-tensorwise", "bf16-mixed")
    options = found["engine_options"]
    assert isinstance(options, dict)
    assert options["enable_fsdp_float8_all_gather"] is True
    engine = {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "fp8_format": "HYBRID"}}
    plain = accelerate_fields(
        {"distributed_type": "MULTI_GPU", "num_processes": 8, **engine}, {}, source="a.yaml"
    ).fields
    assert (plain["fp8"], plain["precision"]) == ("te-delayed", "bf16-amp")
