"""What is written for a framework comes back as the same setup, with what its file cannot say set by hand.

Random setups of every kind; ``benchmarks`` are not needed for it. A setup that a framework cannot be told is refused and
another one drawn.
"""

import json
import tomllib
from random import Random
from typing import Any

import pytest
import yaml

from memplan.errors import MemplanError
from memplan.estimator import estimate
from memplan.estimator.time.step_time import step_time
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.emitters import Emitted, Framework, emit
from memplan.sources.emitters.reading_back import read_values
from memplan.sources.models import load_model
from memplan.sources.shell_flags import flags_of
from memplan.training.setup import TrainingSetup

MODEL = load_model("llama-3.2-1b")
GPU = load_gpu("h100")
SETUPS, MANY = 6, 200
"""Of each kind: always, and where more are asked for (``make fuzz``)."""
LORA = {"lora": {"rank": 8, "targets": "all-linear"}}
COMMON: dict[str, list[Any]] = {
    "num_gpus": [1, 2, 8], "micro_batch_size": [1, 3], "gradient_accumulation_steps": [1, 4],
    "seq_len": [256, 1000], "checkpointing": ["none", "full"], "kernels": ["hf", "hf", "liger"],
    "optimizer": ["adamw-fused", "adamw-foreach", "sgd"], "attention": [None, "flash"],
    "packing": [None, "padding_free", "documents"], "adapter": [None, LORA], "freeze": [None, "embeddings"],
    "quantize": [None, "nf4"], "upcast_outputs": [None, True], "outputs_held": [None, True],
    "job": [None, None, "dpo"], "dropout": [None, 0.0], "allocator": [None, "expandable"],
}  # fmt: skip
FSDP = [None, {"reduce_dtype": "bf16"}, {"sync_each_batch": True}, {"init_device": "meta"}]
BUCKETS = [None, {"reduce_bucket_size": 10**8}, {"overlap_comm": True}]
OF_KIND: dict[str, dict[str, list[Any]]] = {
    "deepspeed": {
        "engine": ["deepspeed"], "zero_stage": [0, 1, 2, 3], "precision": ["bf16-master", "fp32"],
        "engine_options": BUCKETS,
    },
    "accelerate": {
        "engine": ["fsdp", "fsdp1", "ddp"], "precision": ["bf16-mixed", "fp32", "bf16-amp"],
        "fsdp_strategy": [None, "shard_grad_op"], "engine_options": FSDP,
    },
    "training-args": {
        "engine": ["fsdp", "ddp", "deepspeed"], "precision": ["bf16-mixed", "bf16-amp", "bf16-master"],
        "packing": [None],
    },
    "torchtitan": {
        "engine": ["fsdp"], "precision": ["bf16-mixed", "bf16"], "kernels": ["torchtitan", "hf"],
        "optimizer": ["adamw-fused"], "checkpointing": ["full", "selective"], "engine_options": FSDP,
        "compile": [None, "layer"], "attention": [None], "pipeline_parallel": [1, 2],
    },
    "torchtune": {
        "engine": ["fsdp"], "num_gpus": [2, 8], "precision": ["bf16", "fp32"], "kernels": ["hf"],
        "compile": [None, "layer"],
    },
    "unsloth": {
        "engine": ["ddp"], "num_gpus": [1], "precision": ["bf16-autocast"], "kernels": ["unsloth"],
        "optimizer": ["bnb-adamw-8bit", "bnb-adamw-8bit", "adamw-fused"], "job": [None],
        "adapter": [None, {"lora": {"rank": 16, "alpha": 16, "targets": ("q_proj", "down_proj")}}],
        "packing": [None, "documents"],
    },
    "megatron": {
        "engine": ["megatron"], "num_gpus": [1, 2, 8, 16], "precision": ["bf16-master", "fp16-master", "fp32"],
        "optimizer": ["adamw-fused", "sgd", "sgd-momentum"], "kernels": [None], "packing": [None], "adapter": [None],
        "freeze": [None], "quantize": [None], "upcast_outputs": [None], "job": [None], "allocator": [None],
        "attention": [None, "flash", "eager"], "dropout": [None, 0.0, 0.1], "outputs_held": [None],
        "tensor_parallel": [1, 2], "pipeline_parallel": [1, 2], "context_parallel": [1, 2],
        "virtual_stages": [1, 1, 2], "gradient_accumulation_steps": [4, 8], "sequence_parallel": [None, True],
        "seq_len": [256, 1024],
        "layers_per_stage": [None, None, (7, 9)], "fp8": [None, None, "te-current", "te-blockwise"], "checkpointing": ["none", "full", "selective", "0-3"],
        "engine_options": [
            None, {"use_distributed_optimizer": True}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
            {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
            {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
            {"masked_softmax_fusion": False, "apply_rope_fusion": False}, {"make_vocab_size_divisible_by": 1},
            {"transformer_impl": "local"}, {"grad_reduce_in_bf16": True},
            {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm")},
        ],
    },
    **{
        name: {"engine": ["fsdp", "ddp"], "precision": ["bf16-mixed", "bf16-amp", "bf16-autocast"]}
        for name in ("axolotl", "trl-sft", "llama-factory")
    },
}  # fmt: skip


def setups(kind: str, seed: int, count: int = SETUPS) -> "list[tuple[TrainingSetup, Emitted]]":
    """As many setups as there are to be, each with what is written for it."""
    random, found = Random(f"{kind} {seed}"), []
    table = {**COMMON, **OF_KIND[kind]}
    for _ in range(100 * count):
        drawn = {name: random.choice(values) for name, values in table.items()}
        fields = {name: value for name, value in drawn.items() if value is not None}
        try:
            setup = TrainingSetup(**fields)
            estimate(MODEL, setup, gpu=GPU)
            found.append((setup, emit(setup, Framework(kind), MODEL)))
        except MemplanError:
            continue
        if len(found) == count:
            return found
    pytest.fail(f"{kind}: {len(found)} of {count} setups can be written")


def parsed(made: Emitted, kind: str) -> dict[str, Any]:
    """What is written, as a file's text and read again."""
    if kind == "torchtitan":
        return tomllib.loads(made.toml)
    if kind == "megatron":
        return flags_of(made.flags, source="run.sh")
    values: dict[str, Any] = (
        json.loads(made.json) if kind == "deepspeed" else yaml.safe_load(made.yaml)
    )
    return values


@pytest.mark.parametrize("kind", OF_KIND)
def test_what_is_written_comes_back(kind: str) -> None:
    for setup, made in setups(kind, seed=0):
        comes_back(setup, made, kind)


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", OF_KIND)
def test_two_hundred_of_each_come_back(kind: str) -> None:
    for setup, made in setups(kind, seed=1, count=MANY):
        comes_back(setup, made, kind)


def comes_back(setup: TrainingSetup, made: Emitted, kind: str) -> None:
    """The same bytes, verdict and time."""
    before = estimate(MODEL, setup, gpu=GPU)
    after = estimate(MODEL, read_values(parsed(made, kind), kind, made.by_hand), gpu=GPU)
    assert after.account == before.account, setup
    assert after.total_bytes == before.total_bytes, setup
    assert after.verdict is before.verdict, setup
    assert step_time(after) == step_time(before), setup


def test_what_is_said_is_not_set_by_hand() -> None:
    setup = TrainingSetup(num_gpus=8, engine="fsdp", seq_len=512, checkpointing="full")
    made = emit(setup, Framework.ACCELERATE)
    assert {*made.by_hand} == {"seq_len", "engine_options"}
    assert made.by_hand["engine_options"] == {"reduce_dtype": "fp32", "wrapping": "layers"}
    titan = emit(setup, Framework.TORCHTITAN)
    assert "checkpointing" not in titan.by_hand
    assert titan.by_hand["num_gpus"] == 8


def test_a_files_own_words_are_not_overruled() -> None:
    """What is set by hand says more, and nothing else than a file that says it."""
    values = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "num_processes": 8}
    with pytest.raises(MemplanError, match="num_processes"):
        read_values(values, "accelerate", {"num_gpus": 4})
