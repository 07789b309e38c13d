import json
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError
from memplan.sources.training_arguments import read_training_arguments, setup_from_arguments
from memplan.training.setup import TrainingSetup


def fields(values: dict[str, Any], *names: str) -> list[Any]:
    setup = setup_from_arguments(values, source="args.json")
    return [getattr(getattr(setup, name), "value", getattr(setup, name)) for name in names]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param(
            {}, {"micro_batch_size": 8, "precision": "fp32", "engine": "ddp"}, id="defaults"
        ),
        pytest.param({"bf16": True}, {"precision": "bf16-amp", "upcast_outputs": True}, id="bf16"),
        pytest.param({"fp16": True}, {"precision": "fp16-amp"}, id="fp16"),
        pytest.param(
            {"gradient_checkpointing": True}, {"checkpointing": "full"}, id="checkpointing"
        ),
        pytest.param(
            {
                "activation_checkpointing": True,
                "gradient_checkpointing": False,
                "activation_checkpointing_kwargs": {"every_n_layers": 1, "offload": False},
            },
            {"checkpointing": "full"},
            id="checkpointing by its new name",
        ),
        pytest.param({"optim": "adamw_torch"}, {"optimizer": "adamw-foreach"}, id="optimizer"),
        pytest.param({"use_liger_kernel": True}, {"kernels": "liger"}, id="liger"),
        pytest.param({"torch_compile": True}, {"compiled": True}, id="compiled"),
        pytest.param(
            {"learning_rate": 1e-4, "output_dir": "out"}, {"engine": "ddp"}, id="no memory in it"
        ),
        pytest.param(
            {"bf16": True, "fsdp": True},
            {"engine": "fsdp", "precision": "bf16-mixed", "fsdp_strategy": None},
            id="FSDP2",
        ),
        pytest.param(
            {
                "bf16": True,
                "fsdp": True,
                "fsdp_config": {"version": 1, "reshard_after_forward": "shard_grad_op"},
            },
            {"engine": "fsdp1", "fsdp_strategy": "shard_grad_op", "offload_param": "none"},
            id="FSDP1",
        ),
        pytest.param(
            {"fsdp": "shard_grad_op auto_wrap offload", "fsdp_config": {"xla": False}},
            {"engine": "fsdp", "precision": "fp32", "offload_param": "cpu"},
            id="the older form",
        ),
        pytest.param(
            {
                "bf16": True,
                "per_device_train_batch_size": 2,
                "deepspeed": {
                    "bf16": {"enabled": "auto"},
                    "train_micro_batch_size_per_gpu": "auto",
                    "zero_optimization": {"stage": 3},
                },
            },
            {
                "engine": "deepspeed",
                "precision": "bf16-master",
                "zero_stage": 3,
                "micro_batch_size": 2,
            },
            id="DeepSpeed",
        ),
    ],
)
def test_arguments(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert fields(values, *expected) == list(expected.values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"bf16": True, "fp16": True}, "fp16: and bf16 are both", id="both"),
        pytest.param({"bf16": "yes"}, "bf16: write true or false", id="flag"),
        pytest.param({"per_device_train_batch_size": 0}, "whole number from 1", id="batch"),
        pytest.param({"optim": "adamw_troch"}, "Did you mean 'adamw_torch'", id="optimizer"),
        pytest.param({"optim_target_modules": ["q"]}, "not modelled", id="unmodelled"),
        pytest.param(
            {
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"every_n_layers": 2},
            },
            "activation_checkpointing_kwargs.every_n_layers: changes memory",
            id="checkpointing of some layers",
        ),
        pytest.param(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}},
            "gradient_checkpointing_kwargs.offload: changes memory",
            id="offloaded activations",
        ),
        pytest.param({"fsdp": 3}, "fsdp: write true", id="fsdp"),
        pytest.param({"fsdp": "ful_shard"}, "Did you mean 'full_shard'", id="fsdp word"),
        pytest.param({"deepspeed": 3}, "deepspeed: write a mapping", id="deepspeed"),
        pytest.param(
            {"deepspeed": {"zero_optimisation": {}}},
            "Did you mean 'zero_optimization'",
            id="nested",
        ),
        pytest.param({"deepspeed": "none.json"}, "no such file", id="no file"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        setup_from_arguments(values, source="args.json")


def test_files_that_it_names_are_found_beside_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"deepspeed": "ds.json"}))
    setup = read_training_arguments(path, TrainingSetup(num_gpus=4, seq_len=128))
    assert (setup.num_gpus, setup.seq_len, setup.zero_stage) == (4, 128, 1)
