"""Reading ds_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError
from memplan.sources.deepspeed_config import deepspeed_fields, read_deepspeed_config
from memplan.training.setup import TrainingSetup

HF_ZERO3: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
}


def fields(config: dict[str, Any], **given: object) -> dict[str, object]:
    return deepspeed_fields(config, given, source="ds.json").fields


def test_hugging_face_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(HF_ZERO3))
    read = read_deepspeed_config(path, {"micro_batch_size": 4}).fields
    assert read == {
        "engine": "deepspeed",
        "zero_stage": 3,
        "offload_optimizer": "cpu",
        "engine_options": {
            "offload_optimizer.pin_memory": True,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    assert TrainingSetup(**read).chosen_precision.value == "bf16-master"


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        pytest.param({"fp16": {"enabled": True}}, {}, {"precision": "fp16-master"}, id="fp16"),
        pytest.param({}, {}, {"precision": "fp32", "zero_stage": 0}, id="nothing said"),
        pytest.param(
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, {"num_gpus": 8},
            {"micro_batch_size": 2, "gradient_accumulation_steps": 4}, id="steps follow",
        ),
        pytest.param(
            {"train_batch_size": 64, "gradient_accumulation_steps": 2}, {"num_gpus": 8},
            {"micro_batch_size": 4, "gradient_accumulation_steps": 2}, id="micro-batch follows",
        ),
        pytest.param(
            {"train_batch_size": 64}, {"num_gpus": 8},
            {"micro_batch_size": 8, "gradient_accumulation_steps": 1}, id="batch alone",
        ),
        pytest.param(
            {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, {},
            {"optimizer": "sgd-momentum"}, id="momentum",
        ),
        pytest.param(
            {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {},
            {"optimizer": "adamw-foreach"}, id="torch's Adam",
        ),
        pytest.param(
            {"zero_optimization": {"stage": 2, "cpu_offload": True}}, {},
            {"offload_optimizer": "cpu"}, id="old offload",
        ),
    ],
)  # fmt: skip
def test_fields(
    config: dict[str, Any], given: dict[str, object], expected: dict[str, object]
) -> None:
    assert expected.items() <= fields(config, **given).items()


@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param(
            {"data_types": {"grad_accum_dtype": "fp32"}}, {"grad_accum_dtype": "fp32"}, id="dtype"
        ),
        pytest.param(
            {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 7}},
            {"stage3_prefetch_bucket_size": 7},
            id="short name",
        ),
        pytest.param(
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "nvme", "buffer_count": 9},
                }
            },
            {"offload_param.buffer_count": 9},
            id="buffers",
        ),
        pytest.param(
            {"bf16": {"enabled": True, "immediate_grad_update": True}},
            {"immediate_grad_update": True},
            id="bf16",
        ),
    ],
)
def test_options(config: dict[str, Any], options: dict[str, object]) -> None:
    optimizer = {"optimizer": {"type": "AdamW"}}
    assert fields({**config, **optimizer})["engine_options"] == options


def test_stage_0_without_an_optimizer_section_brings_its_own() -> None:
    config = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    assert fields(config)["engine_options"] == {
        "communication_data_type": "fp32",
        "torch_adam": True,
    }


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        pytest.param({"zero_optimisation": {}}, {}, "Did you mean 'zero_optimization'", id="key"),
        pytest.param(
            {"zero_optimization": {"stage3_max_live_params": 1}}, {},
            "Did you mean 'stage3_max_live_parameters'", id="zero key",
        ),
        pytest.param({"zero_optimization": {"stage": 4}}, {}, "must be 0, 1, 2 or 3", id="stage"),
        pytest.param({"zero_optimization": 3}, {}, "expected a mapping", id="not a section"),
        pytest.param({"tensor_parallel": {"autotp_size": 2}}, {}, "not modelled", id="AutoTP"),
        pytest.param({"optimizer": {"type": "Lamb"}}, {}, "Lamb is not modelled", id="optimizer"),
        pytest.param(
            {"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "takes one", id="both"
        ),
        pytest.param(
            {"zero_optimization": {"stage": 3}}, {"zero_stage": 2},
            "zero_optimization.stage: says zero_stage 3, but 2 was given", id="stage contradicted",
        ),
        pytest.param(
            {"bf16": {"enabled": True}}, {"precision": "fp16-master"}, "fp16-master was given",
            id="precision contradicted",
        ),
        pytest.param({"bf16": {"enabled": True}}, {"engine": "fsdp"}, "fsdp was given", id="engine"),
        pytest.param(
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5}},
            {"engine_options": {"reduce_bucket_size": 6}}, "is 5 in the file", id="option",
        ),
        pytest.param(
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3}, {"num_gpus": 2},
            "3 x 1 x 2 = 6", id="batch",
        ),
        pytest.param({"train_batch_size": 0}, {}, "from 1 up", id="no batch"),
        pytest.param(
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "disk"}}}, {},
            "none, cpu or nvme", id="device",
        ),
    ],
)  # fmt: skip
def test_refused(config: dict[str, Any], given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=r"ds\.json: ") as caught:
        fields(config, **given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_may_change_memory_is_named() -> None:
    read = deepspeed_fields({"activation_checkpointing": {}}, {}, source="ds.json")
    assert "activation_checkpointing" in read.notes[0]


def test_auto_finds_what_was_given() -> None:
    assert "zero_stage" not in fields({"zero_optimization": {"stage": "auto"}}, zero_stage=1)


def test_given_options_are_kept() -> None:
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    read = fields(config, engine_options={"zero_init": True})
    assert read["engine_options"] == {"zero_init": True}
