"""What is written for a framework is read back to the same estimate."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from memplan.errors import SetupError
from memplan.estimator import estimate
from memplan.sources.accelerate_config import read_accelerate_config
from memplan.sources.deepspeed_config import deepspeed_fields, read_deepspeed_config
from memplan.sources.emitters import Emitted, Framework, emit
from memplan.sources.emitters.deepspeed import config, config_for_own_optimizer
from memplan.sources.models import load_model
from memplan.sources.setup_file import read_setup_file
from memplan.sources.training_arguments import read_training_arguments
from memplan.training.setup import TrainingSetup

MODEL = load_model("llama-3.2-1b")

DEEPSPEED: list[Any] = [
    pytest.param({"zero_stage": 1}, id="stage 1"),
    pytest.param({"zero_stage": 2, "offload_optimizer": "cpu"}, id="stage 2 offloaded"),
    pytest.param(
        {
            "zero_stage": 3,
            "offload_optimizer": "cpu",
            "offload_param": "cpu",
            "engine_options": {"reduce_bucket_size": 10**8, "offload_param.pin_memory": False},
        },
        id="stage 3 offloaded",
    ),
    pytest.param({"zero_stage": 2, "precision": "fp16-master", "micro_batch_size": 3}, id="fp16"),
    pytest.param({"zero_stage": 0, "precision": "fp32"}, id="fp32"),
    pytest.param(
        {"zero_stage": 1, "engine_options": {"grad_accum_dtype": "fp32"}}, id="fp32 accumulation"
    ),
    pytest.param({"zero_stage": 3, "optimizer": "adamw-foreach"}, id="torch's AdamW"),
    pytest.param(
        {"zero_stage": 3, "context_parallel": 2, "engine": "deepspeed", "attention": "flash"},
        id="Ulysses",
    ),
    pytest.param({"zero_stage": 2, "optimizer": "sgd-momentum"}, id="SGD"),
    pytest.param(
        {
            "zero_stage": 1,
            "engine_options": {"overlap_comm": True},
            "gradient_accumulation_steps": 4,
        },
        id="accumulated",
    ),
]
FSDP: list[Any] = [
    pytest.param({"engine": "fsdp"}, id="FSDP2"),
    pytest.param({"engine": "fsdp", "fsdp_strategy": "shard_grad_op"}, id="FSDP2 gathered"),
    pytest.param(
        {"engine": "fsdp", "offload_optimizer": "cpu", "offload_param": "cpu"}, id="FSDP2 offloaded"
    ),
    pytest.param({"engine": "fsdp", "precision": "fp32"}, id="FSDP2 in fp32"),
    pytest.param({"engine": "fsdp1", "checkpointing": "full"}, id="FSDP1"),
    pytest.param({"engine": "fsdp1", "fsdp_strategy": "shard_grad_op"}, id="FSDP1 gathered"),
]


def setup_of(fields: dict[str, Any]) -> TrainingSetup:
    return TrainingSetup(**{"num_gpus": 8, "seq_len": 256, **fields}).resolve()


def same(first: TrainingSetup, second: TrainingSetup) -> bool:
    return estimate(MODEL, first).account == estimate(MODEL, second).account


def write(made: Emitted, folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text(made.yaml if name.endswith(".yaml") else made.json)
    return path


@pytest.mark.parametrize("fields", DEEPSPEED)
def test_deepspeed(fields: dict[str, Any], tmp_path: Path) -> None:
    setup = setup_of(fields)
    made = emit(setup, Framework.DEEPSPEED)
    given = {"num_gpus": 8, "seq_len": 256}
    found = read_deepspeed_config(write(made, tmp_path, "ds.json"), given)
    assert same(replace(TrainingSetup(**given), **found.fields), setup)
    assert made.setup == setup


def test_deepspeed_is_told_to_split_layers(tmp_path: Path) -> None:
    setup = setup_of({"zero_stage": 2, "tensor_parallel": 2, "engine": "deepspeed"})
    made = emit(setup, Framework.DEEPSPEED)
    assert made.values["tensor_parallel"] == {"autotp_size": 2}
    found = read_deepspeed_config(write(made, tmp_path, "ds.json"), {"num_gpus": 8})
    assert found.fields["tensor_parallel"] == 2
    with pytest.raises(SetupError, match=r"emit: .*no expert groups"):
        emit(replace(setup, tensor_parallel=1, expert_parallel=2), Framework.DEEPSPEED)


@pytest.mark.parametrize("fields", FSDP)
def test_accelerate(fields: dict[str, Any], tmp_path: Path) -> None:
    setup = setup_of({**fields, "micro_batch_size": 2})
    made = emit(setup, Framework.ACCELERATE)
    by_hand = dict(made.by_hand)
    found = read_accelerate_config(write(made, tmp_path, "fsdp.yaml"), by_hand)
    assert same(TrainingSetup(**{**by_hand, **found.fields}), setup)
    assert made.setup == setup
    assert {"micro_batch_size", "seq_len"} <= made.by_hand.keys()


@pytest.mark.parametrize("name", ["args.json", "args.yaml"])
@pytest.mark.parametrize(
    "fields",
    [
        *[each for each in DEEPSPEED if each.id != "SGD"],
        *FSDP,
        pytest.param({"engine": "ddp", "kernels": "liger", "checkpointing": "full"}, id="DDP"),
        pytest.param(
            {"engine": "ddp", "kernels": "liger", "norm": "eager", "loss": "liger"},
            id="some of Liger's kernels",
        ),
        pytest.param({"num_gpus": 1, "precision": "fp16-amp", "optimizer": "sgd"}, id="one GPU"),
    ],
)
def test_training_arguments(fields: dict[str, Any], name: str, tmp_path: Path) -> None:
    setup = setup_of({**fields, "micro_batch_size": 2})
    made = emit(setup, Framework.TRAINING_ARGS)
    base = TrainingSetup(num_gpus=setup.num_gpus, seq_len=256)
    assert same(read_training_arguments(write(made, tmp_path, name), base), made.setup)
    if setup.chosen_engine.value == "deepspeed":
        assert made.setup == setup


def test_torchtitan() -> None:
    setup = setup_of({"engine": "fsdp", "micro_batch_size": 2, "checkpointing": "full"})
    flags = emit(setup, Framework.TORCHTITAN).flags.replace(" \\\n", " ").split()
    assert flags[:2] == ["--training.local_batch_size", "2"]
    assert flags.pop() == "activation-checkpoint:full"  # a word of its own, behind all flags
    found = dict(zip(flags[::2], flags[1::2], strict=True))
    assert found["--training.global_batch_size"] == "16"
    assert found["--training.mixed_precision_param"] == "bfloat16"
    assert found["--parallelism.data_parallel_shard_degree"] == "8"


TITAN: list[Any] = [
    pytest.param({"checkpointing": "full"}, id="FSDP2"),
    pytest.param(
        {"tensor_parallel": 4, "sequence_parallel": True, "checkpointing": "selective"}, id="TP"
    ),
    pytest.param(
        {"tensor_parallel": 2, "sequence_parallel": True, "loss_parallel": True, "compile": "layer"},
        id="TP compiled",
    ),
    pytest.param(
        {"pipeline_parallel": 2, "pipeline_schedule": "1f1b", "gradient_accumulation_steps": 8},
        id="PP",
    ),
    pytest.param(
        {"pipeline_parallel": 2, "pipeline_schedule": "interleaved-1f1b", "virtual_stages": 2,
         "gradient_accumulation_steps": 8, "micro_batch_size": 2, "context_parallel": 2},
        id="PP CP",
    ),
]  # fmt: skip


@pytest.mark.parametrize("fields", TITAN)
def test_torchtitans_files_are_read_back(fields: dict[str, Any], tmp_path: Path) -> None:
    setup = setup_of({"engine": "fsdp", "kernels": "torchtitan", **fields})
    path = tmp_path / "run.toml"
    path.write_text(
        f'[model]\nname = "llama3"\nflavor = "8B"\n\n{emit(setup, Framework.TORCHTITAN).toml}\n'
    )
    found = read_setup_file(path, given={"num_gpus": 8})
    for name in (
        "tensor_parallel", "pipeline_parallel", "context_parallel", "pipeline_schedule",
        "virtual_stages", "sequence_parallel", "loss_parallel", "micro_batch_size", "seq_len",
        "gradient_accumulation_steps", "checkpointing", "compile", "precision", "engine",
    ):  # fmt: skip
        assert getattr(found.setup, name) == getattr(setup, name), name


NAMES = Path(__file__).parent.parent / "data" / "framework_arguments.json"
"""Arguments that Megatron-LM (d98e8a64) and Megatron-DeepSpeed (4efb479d) have, read from their parsers
and from the configurations that Megatron-LM makes arguments of."""
MEGATRON: list[Any] = [
    pytest.param("llama-3.1-405b", {"tensor_parallel": 8, "pipeline_parallel": 16}, id="uneven"),
    pytest.param(
        "llama-2-7b",
        {"pipeline_parallel": 4, "virtual_stages": 2, "tensor_parallel": 2,
         "pipeline_schedule": "interleaved-1f1b",
         "sequence_parallel": True, "checkpointing": "selective"},
        id="interleaved",
    ),
    pytest.param(
        "deepseek-v3", {"pipeline_parallel": 8, "expert_parallel": 64, "checkpointing": "full"},
        id="experts",
    ),
    pytest.param("qwen3-8b", {"context_parallel": 2, "attention": "flash"}, id="context"),
    pytest.param("gpt2", {"checkpointing": 4, "precision": "fp16-master"}, id="first layers"),
    pytest.param("mixtral-8x7b", {"optimizer": "sgd", "expert_parallel": 8}, id="SGD"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), MEGATRON)
def test_megatron_knows_every_argument(name: str, fields: dict[str, Any]) -> None:
    known = set(json.loads(NAMES.read_text())["megatron"])
    many = {"num_gpus": 1024, "gradient_accumulation_steps": 32}
    setup = setup_of({"engine": "megatron", **many, **fields})
    found = emit(setup, Framework.MEGATRON, load_model(name)).values
    assert found.keys() <= known
    assert found["pipeline-model-parallel-size"] == setup.pipeline_parallel


def test_megatron_is_told_the_shape_and_the_degrees() -> None:
    fields = {
        "num_gpus": 2048, "engine": "megatron", "pipeline_parallel": 16, "expert_parallel": 64,
        "gradient_accumulation_steps": 32, "micro_batch_size": 2,
    }  # fmt: skip
    found = emit(setup_of(fields), Framework.MEGATRON, load_model("deepseek-v3")).values
    assert found["moe-layer-freq"] == '"([0]*3+[1]*58)"'
    layers = str(found["pipeline-model-parallel-layout"]).strip('"').split("|")
    assert (layers[0], layers[-1], len(layers)) == ("Et*4", "t*3L", 16)
    assert found["global-batch-size"] == 2048 // 16 * 32 * 2
    assert found["kv-lora-rank"] == 512


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        pytest.param("t5-3b", {}, "2 stacks for seq2seq-lm", id="two stacks"),
        pytest.param("gpt2", {"engine": "fsdp"}, "engine megatron, not fsdp", id="engine"),
        pytest.param("gpt2", {"checkpointing": 0.5}, "recompute_method=block", id="a share"),
    ],
)
def test_what_megatron_cannot_be_told_is_refused(
    name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SetupError, match=f"emit: .*{message}"):
        emit(setup_of({"engine": "megatron", **fields}), Framework.MEGATRON, load_model(name))


def test_deepspeed_and_megatron_are_a_pair() -> None:
    fields = {
        "engine": "deepspeed", "zero_stage": 1, "pipeline_parallel": 2,
        "gradient_accumulation_steps": 4,
    }  # fmt: skip
    made = emit(setup_of(fields), Framework.DEEPSPEED_MEGATRON, load_model("llama-2-7b"))
    assert made.values.keys() <= set(json.loads(NAMES.read_text())["deepspeed+megatron"])
    assert made.beside is not None
    assert made.values["deepspeed_config"] == made.beside.name
    beside = json.loads(made.beside.text)
    assert beside["zero_optimization"] == {"stage": made.values["zero-stage"]}
    assert beside["train_batch_size"] == made.values["global-batch-size"] == 16


def test_a_deepspeed_pipeline_is_written_and_read_back() -> None:
    fields = {
        "engine": "deepspeed", "pipeline_parallel": 2, "gradient_accumulation_steps": 4,
        "checkpointing": "full", "engine_options": {"partition_method": "uniform"},
    }  # fmt: skip
    made = emit(setup_of(fields), Framework.DEEPSPEED)
    assert made.values["pipeline"] == {"stages": 2, "activation_checkpoint_interval": 1}
    assert "partition_method" not in made.values["zero_optimization"]  # type: ignore[operator]
    assert "num_stages=2, partition_method: uniform" in " ".join(made.notes)
    read = deepspeed_fields(made.values, {"num_gpus": 8}, source="ds.json").fields
    assert (read["pipeline_parallel"], read["checkpointing"]) == (2, "full")


def test_megatron_deepspeed_has_no_latent_attention() -> None:
    with pytest.raises(SetupError, match="no --multi-latent-attention, which deepseek-v3 needs"):
        emit(setup_of({}), Framework.DEEPSPEED_MEGATRON, load_model("deepseek-v3"))


def test_torchtitan_offloads_with_a_flag_without_a_value() -> None:
    offloaded = {"engine": "fsdp", "offload_optimizer": "cpu", "offload_param": "cpu"}
    assert (
        "--training.enable_cpu_offload \\"
        in emit(setup_of(offloaded), Framework.TORCHTITAN).flags.splitlines()
    )


@pytest.mark.parametrize(
    ("framework", "fields", "message"),
    [
        pytest.param("deepspeed", {"engine": "fsdp"}, "engine deepspeed, not fsdp", id="ds engine"),
        pytest.param("accelerate", {"zero_stage": 2}, "not deepspeed", id="accelerate engine"),
        pytest.param(
            "accelerate", {"engine": "fsdp", "precision": "bf16"}, "bf16-mixed", id="precision"
        ),
        pytest.param(
            "accelerate", {"engine": "fsdp", "checkpointing": 0.5}, "all layers", id="a share"
        ),
        pytest.param("training-args", {"zero_stage": 2, "checkpointing": 0.5}, "all", id="share"),
        pytest.param("training-args", {"kernels": "megatron"}, "liger", id="kernels"),
        pytest.param("training-args", {"loss": "cut"}, "liger", id="another loss"),
        pytest.param("training-args", {"packing": "documents"}, "do not pack", id="packing"),
        pytest.param("training-args", {"optimizer": "lion-fused"}, "lion-fused", id="optimizer"),
        pytest.param(
            "training-args", {"engine": "ddp", "precision": "bf16"}, "loaded", id="bf16 weights"
        ),
        pytest.param("torchtitan", {"zero_stage": 2, "precision": "fp32"}, "FSDP2", id="titan"),
        pytest.param(
            "torchtitan", {"engine": "fsdp", "optimizer": "sgd"}, "AdamW", id="titan optimizer"
        ),
        pytest.param(
            "torchtitan",
            {"engine": "fsdp", "precision": "fp16-mixed"},
            "bf16-mixed",
            id="titan fp16",
        ),
        pytest.param("unsloth", {"engine": "ddp"}, "one GPU", id="unsloth on eight"),
        pytest.param(
            "unsloth",
            {"num_gpus": 1, "adapter": {"lora": {"rank": 8, "targets": "all-linear"}}},
            "by name",
            id="unsloth all-linear",
        ),
    ],
)
def test_what_a_framework_cannot_do_is_refused(
    framework: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SetupError, match=f"emit: .*{message}"):
        emit(setup_of(fields), Framework(framework), MODEL)


@pytest.mark.parametrize("framework", list(Framework))
def test_yaml_and_json_say_the_same(framework: Framework) -> None:
    fields = {
        Framework.DEEPSPEED: {"zero_stage": 3},
        Framework.DEEPSPEED_MEGATRON: {"zero_stage": 1},
        Framework.MEGATRON: {"engine": "megatron"},
        Framework.TORCHTUNE: {"engine": "fsdp", "precision": "bf16"},
        Framework.UNSLOTH: {"num_gpus": 1, "precision": "bf16-autocast"},
    }.get(framework, {"engine": "fsdp"})
    made = emit(setup_of(fields), framework, MODEL)
    assert yaml.safe_load(made.yaml) == json.loads(made.json) == made.values


# -- the frameworks' own opinion, where they are installed ------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("fields", DEEPSPEED)
def test_deepspeed_takes_its_file(fields: dict[str, Any], tmp_path: Path) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    path = write(emit(setup_of(fields), Framework.DEEPSPEED), tmp_path, "ds.json")
    values = json.loads(path.read_text())
    del values["train_batch_size"]  # of as many processes as there are here
    found = config.DeepSpeedConfig(values)
    assert found.train_micro_batch_size_per_gpu == values["train_micro_batch_size_per_gpu"]
    assert found.zero_optimization_stage == values["zero_optimization"]["stage"]


@pytest.mark.integration
@pytest.mark.parametrize("fields", FSDP)
def test_accelerate_takes_its_file(fields: dict[str, Any], tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    path = write(emit(setup_of(fields), Framework.ACCELERATE), tmp_path, "fsdp.yaml")
    found = config_args.load_config_from_file(str(path))
    assert found.num_processes == 8
    assert found.fsdp_config["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "fields", [*DEEPSPEED[:3], *FSDP, pytest.param({"engine": "ddp"}, id="DDP")]
)
def test_transformers_takes_the_arguments(fields: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    made = emit(setup_of(fields), Framework.TRAINING_ARGS)
    here = {"output_dir": str(tmp_path), "use_cpu": True}
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (found,) = parser.parse_dict({**made.values, **here})
    assert found.per_device_train_batch_size == made.setup.micro_batch_size
    assert found.optim.value == made.values["optim"]
    if "fsdp_config" not in made.values:
        assert not found.fsdp
        return
    plugin = found.fsdp_plugin_args
    config = made.values["fsdp_config"]
    assert isinstance(config, dict)
    assert plugin["fsdp_version"] == config["version"]
    assert plugin["reshard_after_forward"] == config["reshard_after_forward"]
    assert plugin["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert plugin.get("cpu_offload", False) == config.get("cpu_offload", False)
    assert plugin["activation_checkpointing"] == config["activation_checkpointing"]


def test_split_layers_are_written_or_refused() -> None:
    setup = TrainingSetup(num_gpus=8, engine="deepspeed", tensor_parallel=2, seq_len=64)  # type: ignore[arg-type]
    values = emit(setup, Framework.DEEPSPEED).values
    assert values["tensor_parallel"] == {"autotp_size": 2}
    assert values["train_batch_size"] == 4
    with pytest.raises(SetupError, match="do not split layers"):
        emit(setup, Framework.TRAINING_ARGS)


def test_an_optimizer_of_ones_own_needs_no_section() -> None:
    """``deepspeed.initialize(optimizer=...)`` takes torch's, which no file can name."""
    setup = TrainingSetup(
        engine="deepspeed", zero_stage=2, num_gpus=2, optimizer="nadam", seq_len=64
    )
    with pytest.raises(SetupError, match="is not written for nadam"):
        config(setup)
    known = replace(setup, optimizer="sgd")
    values = config(known)
    assert values.pop("optimizer") == {"type": "SGD", "params": {}}
    assert config_for_own_optimizer(known) == config_for_own_optimizer(setup) == values
