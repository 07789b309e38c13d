"""Nothing a user hands over is passed over in silence.

Every field of ``TrainingSetup`` and every option of every command has an entry here, found by
introspection: a new one without an entry fails. An entry is a value that is not the default, and
what it is set beside; with it the answer has to differ in its bytes or in what it says, or it has to
be refused by name.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.cli.commands import COMMANDS
from memplan.cli.with_typer.app import load_command
from memplan.errors import SetupError
from memplan.estimator.measured import Measurement
from memplan.memory.replaying.part_peaks import PartPeaks
from memplan.training.choices_of_kernels.kernels import Kernels, RotaryKernel
from memplan.training.setup import TrainingSetup
from memplan.verify.run import Run

pytestmark = pytest.mark.long

GATED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
    "attention_dropout": 0.0, "rms_norm_eps": 1e-6,
}  # fmt: skip
TRANSLATOR = "t5-small"

FIELDS: dict[str, tuple[dict[str, Any], Any]] = {
    # field: (what it is set beside, its value)
    "num_gpus": ({}, 8),
    "num_nodes": ({"num_gpus": 8}, 2),
    "engine": ({"num_gpus": 8}, "fsdp"),
    "zero_stage": ({"num_gpus": 8}, 3),
    "fsdp_strategy": ({"num_gpus": 8, "engine": "fsdp"}, "shard_grad_op"),
    "micro_batch_size": ({}, 2),
    "gradient_accumulation_steps": ({}, 2),
    "seq_len": ({}, 512),
    "target_seq_len": ({"seq_len": 256}, 64),
    "images_per_sample": ({}, 2),
    "image_size": ({}, 448),
    "image_width": ({}, 832),
    "num_frames": ({}, 49),
    "audio_seconds": ({}, 10),
    "precision": ({}, "fp32"),
    "fp8": ({}, "torchao-tensorwise"),
    "optimizer": ({}, "sgd"),
    "optimizer_options": ({"optimizer": "sgd"}, {"momentum": 0.9}),
    "optimizer_in_backward": ({}, True),
    "checkpointing": ({}, "full"),
    "kernels": ({}, Kernels(rotary=RotaryKernel.LIGER)),
    "attention": ({}, "eager"),
    "norm": ({}, "fused"),
    "mlp": ({}, "fused"),
    "rotary": ({}, "liger"),
    "scan": ({}, "package"),
    "loss": ({}, "fused_linear"),
    "mlp_tiles": ({"precision": "bf16"}, 4),
    "loss_tiles": ({"precision": "bf16"}, 3),
    "packing": ({"micro_batch_size": 2}, "padding_free"),
    "dropout": ({}, 0.1),
    "tensor_parallel": ({"num_gpus": 8, "engine": "fsdp"}, 2),
    "sequence_parallel": ({"num_gpus": 8, "engine": "fsdp"}, True),
    "loss_parallel": ({"num_gpus": 8, "engine": "fsdp"}, True),
    "pipeline_parallel": ({"num_gpus": 2, "gradient_accumulation_steps": 4}, 2),
    "pipeline_schedule": ({"num_gpus": 8}, "gpipe"),
    "virtual_stages": ({"num_gpus": 8}, 2),
    "layers_per_stage": ({"num_gpus": 8}, (1, 1)),
    "context_parallel": ({"num_gpus": 8, "engine": "fsdp", "seq_len": 2048}, 2),
    "context_parallel_kind": ({"num_gpus": 8}, "ring"),
    "expert_parallel": ({"num_gpus": 8}, 2),
    "expert_imbalance": ({"num_gpus": 8}, "1-1.5"),
    "offload_optimizer": ({"num_gpus": 8, "zero_stage": 2}, "cpu"),
    "offload_param": ({"num_gpus": 8, "zero_stage": 3}, "cpu"),
    "offload_activations": ({}, "save-on-cpu"),
    "offload_activations_ratio": ({}, 0.5),
    "freeze": ({}, "layers.0"),
    "adapter": ({}, {"lora": {"rank": 4, "targets": "all-linear"}}),
    "job": ({}, "dpo"),
    "ema": ({}, "fp32"),
    "evaluation": ({}, 8),
    "lengths": ({}, "256:50%,512:50%"),
    "quantize": ({"adapter": {"lora": {"rank": 4, "targets": "all-linear"}}}, "nf4"),
    "outputs_held": ({}, True),
    "gradients_held": ({}, True),
    "upcast_outputs": ({}, True),
    "compile": ({}, "layer"),
    "left_out": ({}, "a reference model"),
    "engine_options": ({"num_gpus": 8, "zero_stage": 2}, {"overlap_comm": False}),
    "kernel_scratch": ({}, False),
    "allocator": ({}, "expandable"),
}


ANSWERS: dict[str, dict[str, object]] = {}


def answer_beside(model: Any, values: dict[str, Any]) -> dict[str, object]:
    """What is answered without a field, which many share."""
    asked = repr((model, values))
    if asked not in ANSWERS:
        ANSWERS[asked] = answer(model, values)
    return ANSWERS[asked]


def answer(model: Any, values: dict[str, Any]) -> dict[str, object]:
    """All that an answer says."""
    found = memplan.estimate(model, TrainingSetup(**values), gpu="a100-80gb")
    return {**found.to_dict(), "assumptions": found.assumptions, "notes": found.notes}


def test_every_field_has_an_entry() -> None:
    assert set(FIELDS) == {field.name for field in fields(TrainingSetup)}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("model", [GATED, TRANSLATOR], ids=["decoder", "translator"])
def test_every_field_counts(model: Any, name: str) -> None:
    beside, value = FIELDS[name]
    before = answer_beside(model, beside)
    try:
        after = answer(model, {**beside, name: value})
    except SetupError as error:
        assert name in str(error)
        return
    assert before != after


@pytest.mark.parametrize("field", fields(TrainingSetup), ids=lambda field: field.name)
def test_none_is_a_default_or_is_refused(field: Any) -> None:
    usual = None if field.default is MISSING else field.default
    beside = {"num_gpus": 8, "zero_stage": 2, "micro_batch_size": 1}
    values = {**beside, field.name: None}
    try:
        after = TrainingSetup(**values)
    except SetupError as error:
        assert field.name in str(error)
        return
    assert getattr(after, field.name) == usual
    memplan.estimate(GATED, after)


# -- the command line ----------------------------------------------------------------------------

EXEMPT = {
    "token": "opens a private repository, and changes no answer",
    "help": "prints the help",
}
SETUP_FILE = "engine: fsdp\nnum_gpus: 8\n"
POOLS_FILE = "pools:\n- {name: first, gpu: h100, count: 8}\n- {name: second, gpu: t4, count: 8}\n"
ARGUMENTS_FILE = '{"per_device_train_batch_size": 4}'
DEEPSPEED_FILE = '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
ACCELERATE_FILE = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
CARD = ("--gpu", "a100-80gb@6GiB")
MODEL = ("MODEL",)
JOB = (*MODEL, *CARD, "--gpus", "8")
SPLIT = (*JOB, "--engine", "fsdp", "--tensor-parallel", "2")
STEPS = (*MODEL, *CARD, "--gpus", "2", "--engine", "ddp", "--gradient-accumulation", "4")
STAGES = (*STEPS, "--pipeline-parallel", "2")
GIVEN = ("--params", "10B", "--hidden-size", "4096", "--layers", "40", "--heads", "40")
PRODUCT = ("--operation", "mul")
Words = tuple[str, ...]
Entry = tuple[Words, Words]
"""What a command is called with, and what is added; FILE names are written before."""

SHARED: dict[str, Entry] = {
    "model": ((), ("gpt2",)),
    "task": (MODEL, ("--task", "base")),
    "family": (("plain.json",), ("--family", "qwen2")),
    "allow_guess": (("unknown.json",), ("--allow-guess",)),
    "allow_unknown_keys": (("misspelt.json",), ("--allow-unknown-keys",)),
    "num_labels": ((*MODEL, "--task", "sequence-classification"), ("--num-labels", "5000")),
    "revision": (MODEL, ("--revision", "v1")),
    "format": (MODEL, ("--format", "csv")),
}
TRAINED: dict[str, Entry] = {
    **SHARED,
    "gpu": (MODEL, ("--gpu", "l4")),
    "gpu_memory": (MODEL, ("--gpu-memory", "46GiB")),
    "gpus": (MODEL, ("--gpus", "8")),
    "nodes": (JOB, ("--nodes", "2")),
    "engine": (JOB, ("--engine", "fsdp")),
    "zero": (JOB, ("--zero", "3")),
    "offload": (JOB, ("--offload", "none")),
    "offload_param": (JOB, ("--offload-param", "cpu")),
    "fsdp_strategy": (JOB, ("--fsdp-strategy", "shard_grad_op")),
    "batch_size": (JOB, ("--batch-size", "2")),
    "gradient_accumulation": (JOB, ("--gradient-accumulation", "2")),
    "global_batch_size": (JOB, ("--global-batch-size", "64")),
    "seq_len": (JOB, ("--seq-len", "512")),
    "target_seq_len": (JOB, ("--target-seq-len", "64")),
    "images_per_sample": (JOB, ("--images-per-sample", "2")),
    "image_size": (JOB, ("--image-size", "448")),
    "image_width": (JOB, ("--image-width", "832")),
    "num_frames": (JOB, ("--num-frames", "49")),
    "audio_seconds": (JOB, ("--audio-seconds", "10")),
    "precision": (JOB, ("--precision", "fp16")),
    "optimizer": (JOB, ("--optimizer", "sgd")),
    "optim_args": ((*JOB, "--optimizer", "sgd"), ("--optim-args", "momentum=0.9")),
    "optimizer_in_backward": ((*MODEL, "--engine", "ddp"), ("--optimizer-in-backward",)),
    "checkpointing": (JOB, ("--checkpointing", "full")),
    "offload_activations": (JOB, ("--offload-activations", "streamed")),
    "offload_activations_ratio": (JOB, ("--offload-activations-ratio", "0.5")),
    "kernels": (JOB, ("--kernels", "torchtitan")),
    "attention": (JOB, ("--attention", "eager")),
    "norm": (JOB, ("--norm", "fused")),
    "tensor_parallel": ((*JOB, "--engine", "fsdp"), ("--tensor-parallel", "2")),
    "sequence_parallel": (SPLIT, ("--sequence-parallel",)),
    "loss_parallel": (SPLIT, ("--loss-parallel",)),
    "context_parallel": ((*JOB, "--engine", "fsdp"), ("--context-parallel", "2")),
    "context_parallel_kind": (
        (*JOB, "--engine", "fsdp", "--cp", "2"),
        ("--context-parallel-kind", "all-to-all"),
    ),
    "expert_parallel": ((*JOB, "--engine", "fsdp"), ("--expert-parallel", "2")),
    "expert_imbalance": ((*JOB, "--engine", "fsdp"), ("--expert-imbalance", "1-1.5")),
    "pipeline_parallel": (STEPS, ("--pipeline-parallel", "2")),
    "pipeline_schedule": (STAGES, ("--pipeline-schedule", "gpipe")),
    "virtual_stages": (
        (*STAGES, "--pipeline-schedule", "interleaved-1f1b"),
        ("--virtual-stages", "3"),
    ),
    "layers_per_stage": (STAGES, ("--layers-per-stage", "2,0")),
    "fp8": (JOB, ("--fp8", "te-current")),
    "mlp": (JOB, ("--mlp", "fused")),
    "rotary": (JOB, ("--rotary", "liger")),
    "scan": (JOB, ("--scan", "package")),
    "loss": (JOB, ("--loss", "fused_linear")),
    "mlp_tiles": ((*JOB, "--engine", "deepspeed"), ("--mlp-tiles", "4")),
    "loss_tiles": ((*JOB, "--engine", "deepspeed", "--loss", "tiled"), ("--loss-tiles", "2")),
    "packing": (JOB, ("--packing", "documents")),
    "dropout": (JOB, ("--dropout", "0.1")),
    "freeze": (JOB, ("--freeze", "embeddings")),
    "job": (JOB, ("--job", "dpo")),
    "ema": (JOB, ("--ema", "weights")),
    "eval_batch_size": (JOB, ("--eval-batch-size", "8")),
    "eval_batches_kept": (JOB, ("--eval-batch-size", "8", "--eval-batches-kept", "9")),
    "eval_accumulation_steps": (
        JOB,
        ("--eval-batch-size", "8", "--eval-batches-kept", "9", "--eval-accumulation-steps", "2"),
    ),
    "eval_seq_len": (JOB, ("--eval-batch-size", "8", "--eval-seq-len", "512")),
    "lengths": (JOB, ("--lengths", "128:50%,256:50%")),
    "lora": (JOB, ("--lora", "4")),
    "lora_targets": ((*JOB, "--lora", "4"), ("--lora-targets", "all-linear")),
    "lora_dropout": ((*JOB, "--lora", "4"), ("--lora-dropout", "0.1")),
    "lora_dtype": ((*JOB, "--lora", "4", "--engine", "ddp"), ("--lora-dtype", "bf16")),
    "dora": ((*JOB, "--lora", "4"), ("--dora",)),
    "adapter": (JOB, ("--adapter", "adapter.json")),
    "quantize": ((*JOB, "--lora", "4", "--engine", "ddp"), ("--quantize", "nf4")),
    "outputs_held": (JOB, ("--outputs-held",)),
    "gradients_held": (JOB, ("--gradients-held", "--engine", "ddp")),
    "upcast_outputs": (JOB, ("--upcast-outputs",)),
    "compile": (JOB, ("--compile", "layer")),
    "engine_option": ((*JOB, "--zero", "2"), ("--engine-option", "overlap_comm=false")),
    "kernel_scratch": (JOB, ("--no-kernel-scratch",)),
    "allocator": (JOB, ("--allocator", "expandable")),
    "setup": (MODEL, ("--setup", "setup.yaml")),
    "preset": (MODEL, ("--preset", "trl-sft")),
    "training_args": (MODEL, ("--training-args", "arguments.json")),
    "deepspeed_config": (JOB, ("--deepspeed-config", "ds.json")),
    "accelerate_config": (JOB, ("--accelerate-config", "accelerate.yaml")),
    "emit": ((*JOB, "--zero", "2", "--offload", "none"), ("--emit", "deepspeed")),
    "output": (JOB, ("--output", "report.txt")),
    "check": ((*MODEL, "--gpu-memory", "64MiB"), ("--check",)),
    "fail_on": ((*MODEL, "--gpu-memory", "1GiB"), ("--fail-on", "tight")),
    "baseline": (MODEL, ("--baseline", "missing.json")),
    "tolerance": (MODEL, ("--tolerance", "2%")),
    "unmatched": (MODEL, ("--unmatched", "allow")),
    "annotate": ((*MODEL, "--gpu-memory", "64MiB", "--check"), ("--annotate", "sweep.yaml")),
    "time": (JOB, ("--time",)),
    "tokens": (JOB, ("--tokens", "1B")),
    "examples": (JOB, ("--examples", "1000000")),
    "epochs": ((*JOB, "--examples", "1000000"), ("--epochs", "3")),
    "price": ((*JOB, "--tokens", "1B"), ("--price", "2.5")),
    "mfu": ((*JOB, "--time"), ("--mfu", "0.3")),
    "save_every": ((*JOB, "--tokens", "1B"), ("--save-every", "10m")),
    "failures_per_gpu_day": ((*JOB, "--tokens", "1B"), ("--failures-per-gpu-day", "0.01")),
    "eval_every": ((*JOB, "--tokens", "1B"), ("--eval-every", "100", "--eval-examples", "1000")),
    "eval_examples": ((*JOB, "--tokens", "1B"), ("--eval-examples", "9", "--eval-every", "100")),
    "loader": ((*JOB, "--time"), ("--loader", "2")),
    "network": ((*JOB, "--nodes", "2", "--time"), ("--network", "50")),
    "oversubscription": (
        (*MODEL, *CARD, "--gpus", "512", "--engine", "ddp", "--time"),
        ("--oversubscription", "4"),
    ),
    "in_network_reduction": (
        (*MODEL, *CARD, "--gpus", "512", "--engine", "ddp", "--network", "25"),
        ("--in-network-reduction",),
    ),
    "host": ((*JOB, "--time"), ("--host", "slow")),
    "calibration": ((*JOB, "--time"), ("--calibration", "calibration.yaml")),
    "per_rank": (JOB, ("--per-rank",)),
    "cpu_memory": (JOB, ("--cpu-memory", "1MiB")),
}
ALONE = (*JOB, "--engine", "fsdp")
OPTIONS: dict[str, dict[str, Entry]] = {
    "estimate": {
        **TRAINED,
        "measured_step": ((*ALONE, "--time"), ("--measured-step", "3s")),
        "save_calibration": (ALONE, ("--save-calibration", "saved.yaml")),
        "report": (JOB, ("--report", "page.html")),
        "chart": (JOB, ("--chart",)),
        "deepspeed": (JOB, ("--deepspeed",)),
        "deepspeed_formula": (JOB, ("--deepspeed-formula", "current")),
        "additional_buffer_factor": (JOB, ("--additional-buffer-factor", "2")),
        "params": ((), ("--params", "1e9", "--largest-layer", "1e8")),
        "num_layers": (MODEL, ("--num-layers", "1")),
        "legend": (JOB, ("--legend",)),
        "assumptions": (JOB, ("--assumptions",)),
        "reserved": ((*JOB, "--zero", "2"), ("--reserved",)),
        "lifetimes": (JOB, ("--lifetimes",)),
        "largest_layer": (MODEL, ("--largest-layer", "1e8")),
        "allow": (
            ("gpt2", "--gpu-memory", "3GiB", "--engine", "ddp", "--checkpointing", "full"),
            ("--allow", "lora"),
        ),
    },
    "explain": {
        **TRAINED,
        "offload": (JOB, ("--offload", "cpu")),
        "operation": ((), ("--operation", "softmax")),
        "shape": (PRODUCT, ("--shape", "512x1024x1024")),
        "dtype": (PRODUCT, ("--dtype", "fp32")),
        "num_layers": (MODEL, ("--num-layers", "1")),
        "report": (JOB, ("--report", "report.html")),
        "chart": (JOB, ("--chart",)),
        "snapshot": (JOB, ("--snapshot", "run.pickle")),
        "against": (JOB, ("--against", "missing.pickle")),
        "legend": (JOB, ("--legend",)),
        "component": (JOB, ("--component", "gradients")),
        "timeline": (JOB, ("--timeline",)),
        "full": (JOB, ("--full",)),
    },
    "sweep": {
        **TRAINED,
        "report": (JOB, ("--report", "page.html")),
        "chart": (JOB, ("--chart",)),
        "model": (("gpt2-medium",), ("gpt2",)),
        "legend": (JOB, ("--legend",)),
        "pivot": ((*JOB, "--batch-size", "1,2"), ("--pivot",)),
        "sequence_parallel": (SPLIT, ("--sequence-parallel", "true")),
        "offload": (JOB, ("--offload", "cpu")),
        "jobs": (MODEL, ("--jobs", "-1")),
        "dask": (JOB, ("--dask", "nowhere")),
        "shard": ((*JOB, "--batch-size", "1,2"), ("--shard", "2/2")),
        "output": (JOB, ("--output", "rows.jsonl")),
        "resume": (JOB, ("--resume",)),
    },
    "plan": {
        **TRAINED,
        "report": (JOB, ("--report", "page.html")),
        "chart": (JOB, ("--chart",)),
        "model": (("gpt2-medium",), ("gpt2",)),
        "gpus": (MODEL, ("--gpus", "16")),
        "objective": (JOB, ("--objective", "batch")),
        "job": ((*JOB, "--engine", "fsdp"), ("--job", "dpo")),
        "legend": (JOB, ("--legend",)),
        "allow": ((*JOB, "--limit", "100"), ("--allow", "lora")),
        "headroom": (JOB, ("--headroom", "50%")),
        "pools": (("gated.json",), ("--pools", "pools.yaml")),
        "pipeline_parallel": (JOB, ("--pipeline-parallel", "2")),
        "virtual_stages": (JOB, ("--virtual-stages", "2")),
        "context_parallel": (JOB, ("--context-parallel", "2")),
        "expert_parallel": (JOB, ("--expert-parallel", "2")),
        "network": ((*MODEL, *CARD, "--gpus", "16", "--time"), ("--network", "50")),
        "oversubscription": (
            (*MODEL, *CARD, "--gpus", "512", "--global-batch-size", "512", "--time"),
            ("--oversubscription", "4"),
        ),
        "in_network_reduction": (
            (
                *MODEL,
                *CARD,
                "--gpus",
                "512",
                "--global-batch-size",
                "512",
                "--zero",
                "1",
                "--network",
                "25",
            ),
            ("--in-network-reduction",),
        ),
        "time": ((*JOB, "--maximize", "batch"), ("--time",)),
        "limit": (JOB, ("--limit", "1")),
        "maximize": (JOB, ("--maximize", "seq-len")),
        "emit": ((*JOB, "--engine", "deepspeed"), ("--emit", "deepspeed")),
    },
    "compare": {
        **TRAINED,
        "model": (("gpt2-medium",), ("gpt2",)),
        "legend": ((*MODEL, "--vs", "--seq-len 512"), ("--legend",)),
        "gpu": ((*MODEL, "--vs", "--seq-len 512"), ("--gpu=h100",)),
        "vs": (MODEL, ("--vs", "--seq-len 512")),
        "num_layers": (MODEL, ("--num-layers", "1")),
        "setup": (MODEL, ("--setup", "setup.yaml", "setup.yaml")),
        "preset": (MODEL, ("--preset", "trl-sft", "unsloth")),
        "formulas": (MODEL, ("--formulas",)),
        "params": (MODEL, ("--params", "10B")),
        "hidden_size": (GIVEN, ("--hidden-size", "5120")),
        "layers": (GIVEN, ("--layers", "20")),
        "heads": (GIVEN, ("--heads", "20")),
    },
    "flops": {
        **TRAINED,
        "model": (("gpt2-medium",), ("gpt2",)),
        "freeze": (MODEL, ("--freeze", "layers.0")),
        "scores": (MODEL, ("--scores", "causal")),
    },
    "verify": {
        **TRAINED,
        "model": (("gpt2-medium",), ("gpt2",)),
        "fsdp_strategy": ((*JOB, "--engine", "fsdp"), ("--fsdp-strategy", "shard_grad_op")),
        "steps": (MODEL, ("--steps", "5")),
        "fake": (MODEL, ("--fake",)),
        "record": (MODEL, ("--record", "run.json")),
        "replay": ((), ("--replay", "missing.json")),
        "snapshot": ((*MODEL, "--fake"), ("--snapshot", "run.pickle")),
        "within": (MODEL, ("--within", "1%")),
        "calibrate": ((), ("--calibrate", "node.yaml")),
        "preset": (MODEL, ("--preset", "hf-trainer")),
        # Of what is refused, each by its own name.
        "sequence_parallel": ((*JOB, "--engine", "fsdp"), ("--sequence-parallel",)),
        "loss_parallel": ((*JOB, "--engine", "fsdp"), ("--loss-parallel",)),
        "context_parallel_kind": (JOB, ("--context-parallel-kind", "ring")),
        "pipeline_schedule": (STEPS, ("--pipeline-schedule", "gpipe")),
        "virtual_stages": (STEPS, ("--virtual-stages", "3")),
        "layers_per_stage": (STEPS, ("--layers-per-stage", "2,0")),
        "quantize": (JOB, ("--quantize", "nf4")),
        "lora_targets": (JOB, ("--lora-targets", "all-linear")),
        "lora_dropout": (JOB, ("--lora-dropout", "0.1")),
        "lora_dtype": (JOB, ("--lora-dtype", "bf16")),
        "dora": (JOB, ("--dora",)),
        "loss_tiles": (JOB, ("--loss-tiles", "4")),
    },
    "models": {
        **SHARED,
        "name": ((), MODEL),
        "tree": (MODEL, ("--tree",)),
        "checkpoint": ((), ("--checkpoint", "42.1GB")),
    },
    "gpus": {"name": ((), ("h100",)), "format": ((), ("--format", "csv"))},
    "admit": {
        "request": ((), ("large.yaml", "--pools", "pools.yaml")),
        "pools": (("request.yaml",), ("--pools", "pools.yaml")),
        "pool": (("request.yaml", "--pools", "pools.yaml"), ("--pool", "second")),
        "fail_on": (("request.yaml", "--pools", "pools.yaml"), ("--fail-on", "all")),
        "format": (("request.yaml", "--pools", "pools.yaml"), ("--format", "json")),
        "root": (("request.yaml", "--pools", "pools.yaml"), ("--root", "missing")),
        "network": (("hub.yaml", "--pools", "pools.yaml"), ("--network", "--pool", "network")),
    },
    "mcp": {"root": ((), ("--root", "missing")), "network": ((), ("--network",))},
    "doctor": {"format": ((), ("--format", "json"))},
}
READ_AS_TEXT = (
    "chart",
    "report",
    "assumptions",
    "format",
    "emit",
    "legend",
    "output",
    "pivot",
    "reserved",
    "tree",
)
"""Options beside which there are no rows for scripts, or that show people what these always have."""
EXPLAINED_BESIDE = ("nodes", "gpu", "gpu_memory", "cpu_memory")
"""What stands beside the arithmetic that ``explain`` hands to scripts: only its text tells of them."""
NARROWED: dict[str, tuple[Words, ...]] = {
    "plan": (CARD, ("--engine", "fsdp"), ("--checkpointing", "none"), ("--global-batch-size", "8")),
    "estimate": (CARD, ("--engine", "deepspeed", "--zero", "2", "--offload", "none")),
}
"""With these there is one setup where there would be ten; of most options one is enough to see them count."""
NAMES_AN_ENGINE = (
    "--engine", "--zero", "--offload", "--offload-param", "--fsdp-strategy", "--setup", "--preset", "--training-args",
    "--deepspeed-config", "--accelerate-config", "--deepspeed", "--params",
)  # fmt: skip
"""Words beside which an engine is not named again."""
SAYS_A_BATCH = (
    "--global-batch-size", "--batch-size", "--gradient-accumulation", "--headroom", "--maximize", "--objective", "--setup",
    "--preset", "--training-args", "--deepspeed-config", "--accelerate-config",
)  # fmt: skip
"""The same of a batch."""
NAMES_A_CARD = ("--gpu", "--gpu-memory", "--pools")
"""The same of a card."""
TAKEN = {"--engine": NAMES_AN_ENGINE, "--global-batch-size": SAYS_A_BATCH, "--gpu": NAMES_A_CARD}
NO_GPU = ("compare", "flops")
"""Commands without a card."""


def parameters(command: str) -> list[str]:
    return [param.name for param in load_command(command).params]


ALL = [(command, name) for command in COMMANDS for name in parameters(command)]


KNOWN: dict[Words, Any] = {}
"""What commands have answered: many options stand beside the same one."""


@pytest.mark.parametrize(("command", "name"), ALL, ids=lambda text: text)
def test_every_option_counts(
    command: str,
    name: str,
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name in EXEMPT:
        return
    assert name in OPTIONS[command], f"memplan {command}: {name} has no entry in this test"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memplan.cli.verify.measure_here", not_measured)
    monkeypatch.setattr("memplan.cli.mcp.serve", not_served)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_files(tmp_path)
    base, added = (called(words, command) for words in OPTIONS[command][name])
    base = narrowed(command, base, added)
    as_text = name in READ_AS_TEXT or (command == "explain" and name in EXPLAINED_BESIDE)
    as_text = as_text or command == "mcp"
    whole = () if as_text else ("--format", "json")
    asked = (command, *base, *whole)
    before = KNOWN.get(asked)
    if before is None:
        before = KNOWN[asked] = run(*asked)
    after = run(command, *drop_repeated(base, added), *added, *whole)
    assert after.exit_code in (0, 2, 3, 5), after.stderr
    if after.exit_code in (2, 3):
        named = {word.lstrip("-").split("-")[0] for word in added}
        assert any(word in after.stderr.lower() for word in named), after.stderr
    assert before != after


def not_served(root: Path) -> None:
    """What stands for a server: what it would be told."""
    sys.stdout.write(f"{root.name}, offline: {os.environ.pop('HF_HUB_OFFLINE', None)}\n")


def not_measured(run: Run, *, gpu: str | None, fake: bool, **_: object) -> Measurement:
    """What stands for a run that no test takes the time for."""
    peaks = PartPeaks(requested_bytes=1, allocated_bytes=1, reserved_bytes=1)
    return Measurement(
        model=run.config, model_name=run.name, task=run.model.task.value, setup=run.setup,
        gpu=gpu or "a100-80gb", gpu_memory_bytes=1 << 36, compute_capability=(8, 0), is_fake=fake,
        is_alone=False, versions={}, num_params=1, num_steps=run.num_steps or 3,
        parts={"forward": peaks}, held_bytes=1, context_bytes=None, driver_bytes=None,
    )  # fmt: skip


def called(words: Words, command: str) -> Words:
    """The words for a command: the test's model, and no card where it takes none."""
    found = [("gated.json" if word == "MODEL" else word) for word in words]
    if command in NO_GPU and "--gpu" in found:
        place = found.index("--gpu")
        del found[place : place + 2]
    return tuple(found)


def narrowed(command: str, base: Words, added: Words) -> Words:
    """The words with what leaves fewer setups to look at, where they leave that open."""
    said = (*base, *added)
    for words in NARROWED.get(command, ()) if base else ():
        taken = TAKEN.get(words[0], words[:1])
        if not any(each in said for each in taken):
            base = (*base, *words)
    return base


def drop_repeated(base: Words, added: Words) -> Words:
    """The command without what is given anew."""
    if added and added[0] in base and added[0] not in ("--engine-option", "--gpu"):
        place = base.index(added[0])
        return base[:place] + base[place + 2 :]
    if base and added and not added[0].startswith("--") and not base[0].startswith("--"):
        return base[1:]
    return base


def write_files(folder: Path) -> None:
    texts = {
        "gated.json": json.dumps(GATED),
        "plain.json": json.dumps({**GATED, "model_type": "llama"}),
        "calibration.yaml": "gpu: a100-80gb\nhost: 1.5\n",
        "unknown.json": json.dumps({**GATED, "model_type": "llamalike"}),
        "misspelt.json": json.dumps(
            {
                "num_hidden_layer" if key == "num_hidden_layers" else key: value
                for key, value in GATED.items()
            }
        ),
        "setup.yaml": SETUP_FILE,
        "pools.yaml": POOLS_FILE,
        "request.yaml": "model: gated.json\n",
        "large.yaml": "model: gated.json\ngpus: 64\n",
        "hub.yaml": "model: no-one/has-this\n",
        "arguments.json": ARGUMENTS_FILE,
        "ds.json": DEEPSPEED_FILE,
        "accelerate.yaml": ACCELERATE_FILE,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def test_every_entry_is_of_an_option() -> None:
    for command in COMMANDS:
        own = set(OPTIONS[command]) - set(TRAINED) - set(SHARED)
        assert own <= set(parameters(command))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--engine", "ddp", "--engine", "fsdp"), id="an engine twice"),
        pytest.param(("--zero", "2", "--engine", "ddp"), id="a stage without deepspeed"),
        pytest.param(("--offload", "cpu", "--engine", "ddp"), id="ddp offloads"),
        pytest.param(("--attention", "flash", "--gpu", "v100"), id="flash before sm_80"),
        pytest.param(("--attention", "flash", "--precision", "fp32"), id="flash in fp32"),
        pytest.param(("--precision", "bf16", "--engine", "deepspeed"), id="no pure bf16"),
        pytest.param(("--deepspeed", "--batch-size", "4"), id="DeepSpeed's tables have no batch"),
        pytest.param(("--output", "x.json"), id="an output without an emit"),
    ],
)
def test_what_contradicts_is_refused(words: Words, run: Callable[..., Any]) -> None:
    told = run("estimate", "gpt2", "--gpus", "8", *words)
    assert told.exit_code in (2, 3)
    assert not told.stdout
    assert words[0].lstrip("-") in told.stderr


def test_a_stage_of_another_engine_is_refused_by_its_option(run: Callable[..., Any]) -> None:
    told = run("estimate", "gpt2", "--gpus", "8", "--zero", "2", "--engine", "ddp")
    assert told.stderr.startswith("memplan: error: --zero: only deepspeed has ZeRO stages")
    assert "--engine deepspeed" in told.stderr


def test_offload_none_leaves_no_row_with_an_offloaded_part(run: Callable[..., Any]) -> None:
    told = run("estimate", "gpt2", "--gpus", "8", "--offload", "none", "--format", "json")
    rows = json.loads(told.stdout)["rows"]
    assert {row["engine"] for row in rows} == {"deepspeed", "fsdp", "ddp"}
    assert {row["offload_optimizer"] for row in rows} == {"none"}
    assert {row["offload_param"] for row in rows} == {"none"}


@pytest.mark.parametrize(
    ("engine", "form"),
    [
        ("ddp", "fp16-amp"), ("deepspeed", "fp16-master"), ("fsdp", "fp16-mixed"),
        ("fsdp1", "fp16-mixed"),
    ],
)  # fmt: skip
def test_fp16_is_what_the_engine_calls_so(engine: str, form: str, run: Callable[..., Any]) -> None:
    told = run(
        "estimate", "gpt2", "--gpus", "8", "--engine", engine, "--precision", "fp16",
        "--gpu", "v100", "--format", "json",
    )  # fmt: skip
    assert {row["precision"] for row in json.loads(told.stdout)["rows"]} == {form}


def test_a_card_without_bf16_is_compared_in_fp16(run: Callable[..., Any]) -> None:
    job = ("estimate", "gpt2", "--gpus", "8", "--gpu", "v100", "--gpu", "a100")
    assert "fp16 on V100-32 (no bf16)" in run(*job).stdout
    told = run(*job, "--assumptions")
    assert "Precision on V100-32 (no bf16): DDP fp16-amp, ZeRO fp16-master" in " ".join(
        told.stdout.split()
    )
    asked = run("estimate", "gpt2", "--gpu", "v100", "--precision", "bf16-amp").stdout
    assert "no bf16 hardware: bf16 is emulated there; precision fp16 is fp16-amp" in " ".join(
        asked.split()
    )
