import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.dtypes import DType
from memplan.errors import ConfigError
from memplan.estimator import estimate
from memplan.memory.fsdp1 import Fsdp1Options
from memplan.memory.fsdp2 import Fsdp2Options
from memplan.sources.models import load_model
from memplan.sources.trainer.keys import trainer_names
from memplan.sources.trainer.launch import EngineFile
from memplan.sources.training_arguments import (
    ArgumentsFile,
    arguments_file,
    read_training_arguments,
    setup_from_arguments,
)
from memplan.training.choices import Recomputation
from memplan.training.setup import TrainingSetup


def fields(values: dict[str, Any], *names: str) -> list[Any]:
    setup = setup_from_arguments(values, source="args.json")
    return [getattr(getattr(setup, name), "value", getattr(setup, name)) for name in names]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_reentrant_checkpointing_counts_under_fsdp1(version: int, *, reentrant: bool) -> None:
    values = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": version},
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }
    options = dict(setup_from_arguments(values, source="args.json").engine_options)
    assert options.get("reentrant_checkpointing", False) is (reentrant and version == 1)


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
        pytest.param(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}},
            {"checkpointing": "full", "offload_activations": "checkpoints"},
            id="checkpoints in CPU RAM",
        ),
        pytest.param({"optim": "adamw_torch"}, {"optimizer": "adamw-foreach"}, id="optimizer"),
        pytest.param(
            {"optim": "paged_adamw_8bit"}, {"optimizer": "bnb-paged-adamw-8bit"}, id="paged"
        ),
        pytest.param(
            {
                "optim": "galore_adamw_layerwise",
                "optim_args": "rank=64, scale=0.5",
                "optim_target_modules": ["attn", "mlp"],
                "gradient_accumulation_steps": 1,
            },
            {
                "optimizer": "galore-adamw",
                "optimizer_in_backward": True,
                "optimizer_options": (
                    ("rank", 64),
                    ("scale", 0.5),
                    ("target_modules", "attn,mlp"),
                ),
            },
            id="layer by layer",
        ),
        pytest.param(
            {"optim": "adamw_torch_4bit"},
            {"optimizer": "torchao-adamw-4bit", "optimizer_options": (("block_size", 256),)},
            id="4 bits",
        ),
        pytest.param({"use_liger_kernel": True}, {"kernels": "liger"}, id="liger"),
        pytest.param({"torch_compile": True}, {"compile": "model"}, id="compiled"),
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
        pytest.param({"optim": "adamw_torch_xla"}, "on a GPU the nearest is", id="unmodelled"),
        pytest.param({"optim_args": "rank"}, "optim_args: write key=value", id="optim_args"),
        pytest.param(
            {"optim": "galore_adamw", "optim_target_modules": 3},
            "optim_target_modules",
            id="targets",
        ),
        pytest.param(
            {
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"every_n_layers": 2},
            },
            "activation_checkpointing_kwargs.every_n_layers: changes memory",
            id="checkpointing of some layers",
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


def read(values: dict[str, Any], **given: object) -> ArgumentsFile:
    base = TrainingSetup(num_gpus=8)
    return arguments_file(values, base, source="args.json", given=given)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("gradient_checkpointng", "gradient_checkpointing"),
        ("per_device_batch_size", "per_device_train_batch_size"),
        ("bfloat16", "bf16"),
        ("output_dr", "output_dir"),
        ("fspd", "fsdp"),
        ("num_generation", "num_generations"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read({wrong: True})
    assert f"{wrong}: no training argument of transformers or TRL" in str(caught.value)
    assert f"Did you mean '{right}'?" in str(caught.value)


def test_sft_has_its_own_defaults() -> None:
    found = read({"packing": True, "per_device_train_batch_size": 2})
    setup = found.setup
    assert (setup.seq_len, setup.micro_batch_size, setup.dropout) == (1024, 2, None)
    assert setup.checkpointing is Recomputation.FULL
    assert setup.chosen_precision.value == "bf16-amp"
    assert any("SFTConfig's default" in note for note in found.notes)
    assert any("as packing makes it" in note for note in found.notes)
    off = read({"packing": False, "bf16": False, "gradient_checkpointing": False}).setup
    assert off.checkpointing is Recomputation.NONE
    assert off.chosen_precision.value == "fp32"


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        pytest.param({}, (None, None, None, None), id="all of them"),
        pytest.param({"rope": False, "rms_norm": False}, ("eager", None, "eager", None), id="two"),
        pytest.param({"geglu": False}, (None, "eager", None, None), id="Gemma's network"),
        pytest.param(
            {"fused_linear_cross_entropy": False}, (None, None, None, "eager"), id="no loss"
        ),
        pytest.param(
            {"fused_linear_cross_entropy": False, "cross_entropy": True},
            (None, None, None, "liger"), id="loss of the logits",
        ),
    ],
)  # fmt: skip
def test_liger_kernel_config(config: dict[str, bool], chosen: tuple[str | None, ...]) -> None:
    values = {"use_liger_kernel": True, "liger_kernel_config": config}
    assert tuple(fields(values, "norm", "mlp", "rotary", "loss")) == chosen
    assert fields(values, "kernels") == ["liger"]


def test_liger_kernel_config_alone_does_nothing() -> None:
    found = read({"liger_kernel_config": {"rope": False}})
    assert found.setup.rotary is None
    assert "liger_kernel_config does nothing without use_liger_kernel" in found.notes


@pytest.mark.parametrize(
    ("values", "packing"),
    [
        pytest.param({"packing": True}, "padding_free", id="by best fit"),
        pytest.param({"packing": True, "packing_strategy": "wrapped"}, "none", id="wrapped"),
        pytest.param({"packing": False, "padding_free": True}, "padding_free", id="no padding"),
        pytest.param({"packing": False}, "none", id="padded"),
    ],
)
def test_packing(values: dict[str, Any], packing: str) -> None:
    assert fields(values, "packing") == [packing]


@pytest.mark.parametrize(
    ("named", "kernel"),
    [("eager", "eager"), ("flash_attention_2", "flash"), ("flash_attention_3", "flash3")],
)
def test_attn_implementation(named: str, kernel: str) -> None:
    values = {"packing": True, "model_init_kwargs": {"attn_implementation": named}}
    assert fields(values, "attention") == [kernel]


def test_pairs_are_two_sequences() -> None:
    found = read({"f_divergence_type": "reverse_kl", "per_device_train_batch_size": 3})
    assert (found.setup.micro_batch_size, found.setup.dropout) == (3, 0.0)
    assert found.setup.job.kind.value == "dpo"
    assert found.setup.job.sequences_per_example == 2


@pytest.mark.parametrize(
    ("values", "job"),
    [
        ({"f_divergence_type": "reverse_kl", "precompute_ref_log_probs": True},
         "dpo:reference=precomputed"),
        ({"center_rewards_coefficient": 0.1}, "reward"),
        ({"num_generations": 4, "beta": 0.1}, "grpo:reference=same"),
        ({"use_vllm": True, "vllm_enable_sleep_mode": True}, "grpo:rollout=vllm,sleep=2"),
        ({"use_vllm": True, "vllm_mode": "server"}, "grpo:rollout=server"),
    ],
)  # fmt: skip
def test_trainers_are_jobs(values: dict[str, Any], job: str) -> None:
    assert str(read(values).setup.job) == job


@pytest.mark.parametrize(
    ("values", "note"),
    [
        pytest.param({"max_length": 64}, "max_length 64 is taken for the length", id="length"),
        pytest.param({"max_seq_length": 64}, "max_seq_length is max_length today", id="older"),
        pytest.param({"max_length": None}, "sequences are not cut", id="no length"),
        pytest.param({"num_generations": 4}, "max_completion_length 512", id="generations"),
        pytest.param({"center_rewards_coefficient": 0.1}, "two sequences", id="rewards"),
        pytest.param({"eval_strategy": "steps"}, "evaluation", id="evaluation"),
        pytest.param({"evaluation_strategy": "no"}, "is eval_strategy today", id="older name"),
        pytest.param({"fsdp_config": {"version": 1}}, "nothing without fsdp", id="FSDP off"),
    ],
)
def test_what_is_not_held_is_named(values: dict[str, Any], note: str) -> None:
    assert any(note in each for each in read(values).notes)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        pytest.param({"neftune_noise_alpha": 5}, "neftune_noise_alpha (noise", id="NEFTune"),
        pytest.param({"label_smoothing_factor": 0.1}, "another copy", id="smoothing"),
    ],
)
def test_what_a_job_holds_beside_is_left_out_and_never_fits(
    values: dict[str, Any], text: str
) -> None:
    setup = read(values).setup
    assert any(text in each for each in setup.left_out)
    answer = memplan.estimate("gpt2", setup, gpu="b200")
    assert answer.to_dict()["verdict"] == "states fit"
    assert text in str(answer.to_dict()["left_out"])
    assert any(text in note and "lower bounds" in note for note in answer.left_out_notes)


def test_what_does_nothing_is_not_left_out() -> None:
    off = {"use_vllm": True, "vllm_mode": "server", "beta": 0.0, "router_aux_loss_coef": 0.0}
    assert read(off).setup.left_out == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"packing": True, "num_generations": 4}, "no one trainer", id="two trainers"),
        pytest.param({"per_gpu_train_batch_size": 4}, "per_device_train_batch_size", id="renamed"),
        pytest.param({"use_cpu": True}, "no GPU memory", id="CPU"),
        pytest.param({"fsdp": "hybrid_shard"}, "fsdp_config.version to 1", id="FSDP1's word"),
        pytest.param(
            {"accelerator_config": {"split_batch": True}}, "Did you mean 'split_batches'",
            id="nested",
        ),
        pytest.param({"fsdp": True, "fsdp_config": {"reshard": True}}, "no such key", id="fsdp"),
        pytest.param(
            {"use_liger_kernel": True, "liger_kernel_config": {"rms_nrom": True}},
            "Did you mean 'rms_norm'", id="Liger's kernels",
        ),
        pytest.param(
            {"use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True}},
            "fused_linear_cross_entropy: false beside it", id="two of Liger's losses",
        ),
        pytest.param(
            {"packing": True, "packing_strategy": "bdf"}, "Did you mean 'bfd'", id="strategy"
        ),
        pytest.param(
            {"packing": True, "model_init_kwargs": {"attn_implementation": "flex_attention"}},
            "is not modelled; there are eager", id="attention",
        ),
        pytest.param({"max_length": "2k"}, "max_length: write a whole number", id="length"),
        pytest.param({"deepspeed": "{"}, "deepspeed: write a mapping", id="JSON text"),
        pytest.param(
            {
                "packing": True,
                "model_init_kwargs": {"quantization_config": {"quant_method": "hqq"}},
            },
            "quantization_config: is not modelled", id="a base in a format of its own",
        ),
    ],
)  # fmt: skip
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(values)
    assert message in str(caught.value)


def test_a_quantized_base() -> None:
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    for kwargs in ({"quantization_config": config}, {"load_in_4bit": True}):
        how = read({"packing": True, "model_init_kwargs": kwargs}).setup.chosen_quantization
        assert how is not None
        assert how.compute_dtype is DType.FP32
        assert not how.prequantized


def test_the_engine_and_the_precision_beside_it_decide_what_flags_mean() -> None:
    plain, sharded = {"bf16": True}, {"bf16": True, "fsdp": True}
    assert read(plain, engine="deepspeed").setup.chosen_precision.value == "bf16-master"
    assert read(sharded, engine="fsdp1").setup.chosen_engine.value == "fsdp1"
    assert read(sharded, precision="fp32").setup.chosen_precision.value == "fp32"
    named = {"fsdp": True, "fsdp_config": {"version": 2}}
    with pytest.raises(ConfigError, match="the file says engine fsdp, the options say fsdp1"):
        read(named, engine="fsdp1")


def test_ddp_is_told_its_settings() -> None:
    values = {"ddp_bucket_cap_mb": 50, "ddp_static_graph": True}
    assert dict(read(values).setup.engine_options) == {"bucket_cap_mb": 50, "static_graph": True}
    # accelerate does not pass its own default on, and torch then has a small first bucket.
    assert not dict(read({"ddp_bucket_cap_mb": 25}).setup.engine_options)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("asked", [None, True])
def test_the_trainer_reduces_at_the_last_micro_batch(version: int, *, asked: bool | None) -> None:
    values: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": version}}
    if asked:
        values["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    setup = read(values).setup
    options = Fsdp1Options.of(setup) if version == 1 else Fsdp2Options.of(setup)
    assert options.sync_each_batch is bool(asked)


def test_whole_gradients_stay_where_the_last_micro_batch_alone_reduces() -> None:
    """Whole bf16 gradients instead of an eighth of them: 7/8 x 2 bytes a parameter, or 11.8 GiB for 7B.

    A published run on 8 GPUs shows it: 20.95 GiB were measured, where an account that reduces at every
    micro-batch said 9.24.
    """
    model = load_model({
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "max_position_embeddings": 32768, "tie_word_embeddings": False,
        "architectures": ["MistralForCausalLM"],
    })  # fmt: skip

    def peak(**options: object) -> int:
        setup = TrainingSetup(
            num_gpus=8, engine="fsdp1", precision="bf16", gradient_accumulation_steps=2,
            seq_len=512, checkpointing="full", engine_options=options,
        )  # type: ignore[arg-type]  # fmt: skip
        return estimate(model, setup).peak_bytes

    kept = 7 / 8 * 2 * estimate(model, TrainingSetup()).num_params
    assert peak() - peak(sync_each_batch=True) == pytest.approx(kept)


def test_a_launcher_s_file_beside_the_arguments() -> None:
    arguments = {"bf16": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}
    setup = arguments_file(
        arguments, source="args.json", deepspeed=EngineFile(values=config, source="ds.json")
    ).setup
    assert (setup.chosen_engine.value, setup.chosen_precision.value) == ("deepspeed", "bf16-master")
    assert (setup.micro_batch_size, setup.gradient_accumulation_steps) == (2, 3)
    launcher = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, "num_processes": 8}  # fmt: skip
    setup = arguments_file(
        arguments, source="args.json", accelerate=EngineFile(values=launcher, source="a.yaml")
    ).setup
    assert (setup.num_gpus, setup.chosen_precision.value) == (8, "bf16-mixed")


@pytest.mark.integration
def test_the_names_are_transformers_own() -> None:
    arguments = pytest.importorskip("transformers.training_args")
    names = {field.name for field in dataclasses.fields(arguments.TrainingArguments)}
    assert names == set(trainer_names()["training_arguments"])


def test_trl_sends_activations_to_cpu_ram() -> None:
    found = read({"max_length": 64, "activation_offloading": True})
    assert found.setup.offload_activations.value == "streamed"
    assert not any("activation_offloading" in note for note in found.notes)
