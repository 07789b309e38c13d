"""Reading ds_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import ConfigError
from memplan.estimator import Estimate, Verdict, estimate
from memplan.hardware.gpu import gpu_from_memory
from memplan.options.setup_files import read_base
from memplan.sources.deepspeed_config import deepspeed_fields, read_deepspeed_config
from memplan.sources.models import load_model
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


ADAM: dict[str, Any] = {"optimizer": {"type": "AdamW"}}


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
    assert fields({**config, **ADAM})["engine_options"] == options


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
        pytest.param({"tensor_parallel": {"preset_model": "llama"}}, {}, "not modelled", id="AutoTP"),
        pytest.param({"optimizer": {"type": "Lamp"}}, {}, "Did you mean 'lamb'", id="optimizer"),
        pytest.param({"optimizer": {"type": "OneBitAdam"}}, {}, "nearest is Adam", id="removed"),
        pytest.param({"optimizer": {"type": "Muon"}}, {}, "nearest is AdamW", id="Muon"),
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
            {"pipeline": {"activation_checkpoint_interval": 2}}, {},
            "pipeline.activation_checkpoint_interval: 2: layers recomputed in groups", id="groups",
        ),
        pytest.param({"pipeline": {"stagse": 2}}, {}, "Did you mean 'stages'", id="no such key"),
        pytest.param(
            {"pipeline": {"stages": 4}}, {"pipeline_parallel": 2}, "says pipeline_parallel 4, but 2",
            id="stages",
        ),
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


def test_a_pipelines_section_is_read() -> None:
    config = {"pipeline": {"stages": 4, "activation_checkpoint_interval": 1, "partition": "best"}}
    read = deepspeed_fields(config, {}, source="ds.json")
    assert read.fields["pipeline_parallel"] == 4
    assert read.fields["checkpointing"] == "full"
    assert not read.notes
    alone = deepspeed_fields({"pipeline": {"seed_layers": True}}, {}, source="ds.json")
    assert alone.notes == (
        "pipeline is for a PipelineModule: say pipeline_parallel, how many stages",
    )


def test_what_may_change_memory_is_named() -> None:
    read = deepspeed_fields({"activation_checkpointing": {}}, {}, source="ds.json")
    assert "activation_checkpointing" in read.notes[0]


def test_auto_finds_what_was_given() -> None:
    assert "zero_stage" not in fields({"zero_optimization": {"stage": "auto"}}, zero_stage=1)


def test_given_options_are_kept() -> None:
    read = fields({"bf16": {"enabled": True}, **ADAM}, engine_options={"zero_init": True})
    assert read["engine_options"] == {"zero_init": True}


@pytest.mark.parametrize("value", [True, 1, 1.0, "true", "True", "yes", "on", "1", "t"])
def test_what_pydantic_takes_for_true(value: object) -> None:
    config = {"bf16": {"enabled": value}, "zero_optimization": {"stage": 2, "cpu_offload": value}}
    found = fields(config)
    assert found["precision"] == "bf16-master"
    assert found["offload_optimizer"] == "cpu"


@pytest.mark.parametrize("value", [False, 0, "false", "no", "off", "0", "N"])
def test_what_pydantic_takes_for_false(value: object) -> None:
    config = {"bf16": {"enabled": value}, "zero_optimization": {"stage": 2, "cpu_offload": value}}
    found = fields(config)
    assert found["precision"] == "fp32"
    assert "offload_optimizer" not in found


@pytest.mark.parametrize(
    ("value", "number"), [("7", 7), (7.0, 7), (" 8 ", 8), ("1_000", 1000), (5e8, 500_000_000)]
)
def test_what_pydantic_takes_for_a_number(value: object, number: int) -> None:
    zero = {"stage": "2", "reduce_bucket_size": value}
    found = fields({"zero_optimization": zero})
    assert found["zero_stage"] == 2
    assert found["engine_options"] == {"reduce_bucket_size": number}


def test_auto_that_nobody_fills_in_is_deepspeed_s_default() -> None:
    zero = {"stage": 2, "contiguous_gradients": "auto", "reduce_bucket_size": "auto"}
    assert fields({"zero_optimization": zero})["engine_options"] == {"reduce_bucket_size": "auto"}


def test_comments_are_comments() -> None:
    config = {
        "_comment": "x", "comment": 3, "zero_optimization": {"stage": 1, "_why": ["because"]},
    }  # fmt: skip
    assert fields(config)["zero_stage"] == 1


def test_stage_0_without_an_optimizer_runs_the_training_loop_s_own() -> None:
    assert fields({})["engine_options"] == {"torch_adam": True}
    assert fields(ADAM)["engine_options"] == {}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param({"optimizer": {"typ": "Adam"}}, "optimizer.typ: DeepSpeed has no", id="type"),
        pytest.param(
            {"optimizer": {"type": "SGD", "params": {"momentun": 0.9}}},
            "optimizer.params.momentun: DeepSpeed has no such key. Did you mean 'momentum'?",
            id="momentum",
        ),
        pytest.param(
            {"bf16": {"enable": True}},
            "bf16.enable: DeepSpeed has no such key. Did you mean 'enabled'?", id="enabled",
        ),
        pytest.param(
            {"zero_optimization": {"stage": 3, "offload_param": {"devic": "cpu"}}},
            "zero_optimization.offload_param.devic: DeepSpeed has no", id="device",
        ),
        pytest.param(
            {"zero_optimization": {"reduce_bucket_size": 0}},
            "zero_optimization.reduce_bucket_size: write a whole number from 1 up, not 0",
            id="no bucket",
        ),
        pytest.param(
            {"zero_optimization": {"reduce_bucket_size": "5e8"}}, "a whole number, not '5e8'",
            id="text that DeepSpeed refuses",
        ),
        pytest.param(
            {"zero_optimization": {"overlap_comm": 2}}, "true or false, not 2", id="no flag"
        ),
        pytest.param(
            {"zero_optimization": {"mics_shard_size": 8}},
            "zero_optimization.mics_shard_size: has been removed from DeepSpeed", id="MiCS",
        ),
        pytest.param(
            {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {}}},
            "give one", id="offload twice",
        ),
        pytest.param(
            {
                "zero_optimization": {
                    "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1,
                },
            },
            "by another name", id="option twice",
        ),
        pytest.param({"amp": True}, "removed from DeepSpeed", id="Apex"),
        pytest.param(
            {"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "amsgrad", id="AMSGrad"
        ),
    ],
)  # fmt: skip
def test_refused_at_every_depth(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fields(config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("config", "note"),
    [
        pytest.param({"nebula": {"enabled": True}}, "nebula has been removed", id="Nebula"),
        pytest.param({"amp": {"enabled": False}}, "amp has been removed", id="Apex, off"),
        pytest.param(
            {"zero_optimization": {"mics_shard_size": -1}},
            "mics_shard_size has been",
            id="MiCS, off",
        ),
        pytest.param(
            {"seq_parallel_communication_data_type": "fp32"}, "Ulysses", id="sequence parallel"
        ),
        pytest.param({"data_efficiency": {"enabled": True}}, "upper bounds", id="random-LTD"),
        pytest.param(
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "offload_param does nothing in stage 2",
            id="weights below stage 3",
        ),
    ],
)
def test_named(config: dict[str, Any], note: str) -> None:
    (said,) = deepspeed_fields(config, {}, source="ds.json").notes
    assert note in said


def answer(zero: dict[str, Any]) -> Estimate:
    found = fields({"bf16": {"enabled": True}, "zero_optimization": zero, **ADAM})
    setup = TrainingSetup(num_gpus=8, **found)  # type: ignore[arg-type]
    return estimate(load_model("t5-small"), setup, gpu_from_memory(2**20))


def test_ranks_that_share_sequences() -> None:
    found = fields(
        {
            "sequence_parallel_size": 4, "seq_parallel_communication_data_type": "bf16",
            "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, **ADAM,
        },
        num_gpus=8,
    )  # fmt: skip
    # Two groups of four ranks: half of DeepSpeed's batch each.
    assert (found["context_parallel"], found["gradient_accumulation_steps"]) == (4, 2)
    assert found["engine_options"]["seq_parallel_communication_data_type"] == "bf16"


def test_leaf_modules_are_named() -> None:
    found = answer({"stage": 3, "leaf_module": {"classes": ["T5Block"]}})
    assert found.account.left_out == ("leaf_module=T5Block (not modelled)",)
    assert not answer({"stage": 2, "leaf_module": {"classes": ["T5Block"]}}).account.left_out
    assert not answer({"stage": 3, "leaf_module": {"classes": []}}).account.left_out


def test_what_saves_memory_makes_an_upper_bound() -> None:
    saving = answer({"stage": 3, "zero_quantized_nontrainable_weights": "yes"})
    assert not saving.account.left_out
    (note,) = saving.left_out_notes
    assert "upper bounds" in note
    assert saving.verdict is Verdict.TIGHT
    assert answer({"stage": 3}).verdict is Verdict.OOM


def test_autotp_splits_layers() -> None:
    config = {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 8,
              "bf16": {"enabled": True}}  # fmt: skip
    fields = deepspeed_fields(config, {"num_gpus": 8}, source="ds.json").fields
    assert fields["tensor_parallel"] == 2
    assert fields["micro_batch_size"] == 2


def test_a_split_model_has_as_many_gpus_as_it_is_split_over(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}})
    )

    def read(**given: object) -> tuple[int, tuple[str, ...]]:
        base = read_base(
            given,
            setup_file=None,
            training_args=None,
            deepspeed_config=str(path),
            accelerate_config=None,
        )
        return base.setup.num_gpus, base.notes

    num_gpus, notes = read()
    assert num_gpus == 2
    assert "2 GPUs, the fewest that its parallel degrees need, unless you say others" in notes
    assert read(num_gpus=4) == (4, ())
