"""Adapters, quantized bases, optimizers, compiled graphs, kernels and jobs, in odd pairs: both ledgers agree.

Setups are drawn at random, always the same ones; what cannot be is refused, and is not compared.
"""

import random
from collections.abc import Iterable
from typing import Any

import pytest

from memplan.errors import MemplanError
from memplan.estimator.job import Job
from memplan.memory import accounts
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Part
from memplan.sources.models import load_model
from memplan.training.optimizers import Optimizer
from memplan.training.setup import TrainingSetup
from tests.memory.test_jobs_on_both_ledgers import played
from tests.memory.test_tally import ENGINES, MODELS, NOT_FULLER

NUM_DRAWN = 16
"""For each engine; about half of them are refused."""
LEAST_COMPARED = 5
BERT = {
    "model_type": "bert", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 700, "vocab_size": 4001,
}  # fmt: skip
PACKED = {
    **MODELS["llama"][0], "quantization_config": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
    },
}  # fmt: skip
ALL_MODELS = {**MODELS, "bert": (BERT, "masked-lm"), "packed": (PACKED, "causal-lm")}
SHARED_KEYS = {
    "model_type": "gemma4_text", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 6,
    "vocab_size": 503, "vocab_size_per_layer_input": 503, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64, "sliding_window": 16,
    "hidden_size_per_layer_input": 24, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip
STREAMS = {
    "model_type": "deepseek_v4", "hidden_size": 128, "moe_intermediate_size": 64,
    "num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_attention_heads": 4, "head_dim": 32,
    "q_lora_rank": 48, "o_groups": 2, "o_lora_rank": 24, "index_n_heads": 4, "index_head_dim": 16,
    "index_topk": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "vocab_size": 503,
    "qk_rope_head_dim": 16,
}  # fmt: skip
TOLD_APART = {
    **ALL_MODELS, "gemma4": (SHARED_KEYS, "causal-lm"), "deepseek_v4": (STREAMS, "causal-lm"),
}  # fmt: skip
"""Models that setups are named for, not drawn."""
ADAPTERS = (
    {"lora": 4}, {"lora": {"rank": 8, "targets": "all-linear", "dropout": 0.1}},
    {"lora": {"rank": 8, "targets": "all-linear", "dora": True, "dtype": "bf16"}},
    {"lora": {"rank": 4, "modules_to_save": ["lm_head"]}}, {"lora": {"rank": 4, "bias": "all"}},
    {"lora": {"rank": 4, "layers": [1]}}, "ia3", {"prompt": 8},
    {"prompt": {"tokens": 8, "hidden_size": 64}},
)  # fmt: skip
JOBS = (
    "dpo", "dpo:log_probabilities=fused", "orpo", "kto", "reward", "distillation",
    "grpo:reference=same", "grpo:rollout=server,log_probabilities=fused", "ppo",
    "sft:generate_batch_size=4",
)  # fmt: skip
FIELDS: tuple[tuple[str, float, Iterable[Any]], ...] = (
    ("adapter", 0.5, ADAPTERS),
    ("optimizer", 0.4, [each.value for each in Optimizer]),
    ("optimizer_in_backward", 0.05, (True,)),
    ("compile", 0.3, ("layer", "model")),
    ("checkpointing", 0.4, ("full", "selective", 0.5, "0-1")),
    ("job", 0.4, JOBS),
    ("evaluation", 0.2, (4, "4:batches_kept=3", "2:batches_kept=9,accumulation_steps=5")),
    ("ema", 0.15, ("weights", "fp32", "fp32@cpu")),
    ("fp8", 0.1, ("torchao-tensorwise", "te-delayed", "te-mxfp8")),
    ("kernels", 0.3, ("liger", "unsloth", "torchtitan", "megatron")),
    ("loss", 0.2, ("fused_linear", "cut", "chunked", "trl", "torchtune", "flash_attn")),
    ("packing", 0.1, ("documents", "padding_free")),
    ("gradient_accumulation_steps", 0.3, (2, 4)),
    ("micro_batch_size", 0.3, (2, 3)),
    ("freeze", 0.15, ("embeddings", "layers.0-1", "embeddings,layers.0-1")),
    ("lengths", 0.1, ("40:60%,96:40%", "40:60%,96:40%,packed")),
)


def drawn(dice: random.Random) -> dict[str, Any]:
    """A setup with some of what there is."""
    fields: dict[str, Any] = {}
    for name, chance, values in FIELDS:
        chosen = dice.choice(list(values))
        if dice.random() < chance:
            fields[name] = chosen
    if "adapter" in fields and dice.random() < 0.5:
        fields["quantize"] = dice.choice(("nf4", "fp4", "int8", "gptq", "awq"))
    return fields


def compare(given: RankInput, rank: int, fields: dict[str, Any]) -> None:
    """What is added up is what is played out, and what was remembered is what is found anew."""
    remembered = accounts.rank_account(given, rank=rank)
    accounts._outlined.cache_clear()
    account = accounts.rank_account(given, rank=rank)
    assert remembered == account, fields
    found = played(given, rank)
    assert account.held_bytes == found.pop("held"), fields
    first = found.pop(Part.FIRST_STEP.value)
    phases = {phase.name: phase.peak_bytes for phase in account.phases if phase.name != "save"}
    shown = phases.pop(Part.FIRST_STEP.value, None)
    assert phases == found, fields
    assert shown is None or shown <= first * NOT_FULLER, fields


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_added_up_is_what_is_played_out(engine: str) -> None:
    dice = random.Random(engine)
    num_compared = 0
    for _ in range(NUM_DRAWN):
        name = dice.choice(list(ALL_MODELS))
        fields = {**ENGINES[engine], **drawn(dice)}
        is_last = dice.random() < 0.5
        try:
            model = load_model(*ALL_MODELS[name])
            given = Job.of(model, TrainingSetup(**{"seq_len": 96, **fields}), None).given
            rank = given.setup.num_gpus - 1 if is_last else 0
            accounts.rank_account(given, rank=rank)
        except MemplanError:
            continue
        compare(given, rank, {"model": name, **fields, "rank": rank})
        num_compared += 1
    assert num_compared >= LEAST_COMPARED


TOGETHER: tuple[tuple[str, str, dict[str, Any]], ...] = (
    # What a unit gathered that the backward pass never comes to goes when it is over.
    ("llama", "fsdp", {"freeze": "embeddings,layers.0-1"}),
    ("llama", "fsdp", {"adapter": {"lora": {"rank": 4, "layers": [7, 8]}}}),
    # The trainer's own loss is no part of the model's graph.
    ("gpt2", "ddp", {"compile": "model", "job": "dpo"}),
    ("gpt2", "ddp", {"compile": "model", "job": "dpo:log_probabilities=fused"}),
    ("llama", "zero3", {"compile": "model", "job": "distillation", "checkpointing": "full"}),
    # A module taken as a whole hands its gradients over when the compiled layer returns.
    ("mixtral", "zero3", {"compile": "layer"}),
    # What the head gives out, it keeps.
    ("llama", "one GPU", {"job": "grpo:log_probabilities=fused"}),
    # Keys and values that later layers read, made again by the layer that hands them on.
    ("gemma4", "one GPU", {"checkpointing": "full"}),
    ("gemma4", "fsdp", {"checkpointing": "full"}),
    ("gemma4", "zero3", {}),
    # Residual streams, and what an indexer keeps that no gradient reaches.
    ("deepseek_v4", "fsdp", {"checkpointing": "full"}),
    # Ranks that share sequences.
    ("llama", "fsdp", {"num_gpus": 8, "context_parallel": 4, "micro_batch_size": 2}),
    ("llama", "ddp", {"num_gpus": 8, "context_parallel": 2, "checkpointing": "full"}),
    # Networks and losses that run in tiles.
    ("llama", "zero3", {"mlp_tiles": 3, "loss": "tiled", "loss_tiles": 2}),
    (
        "llama",
        "zero2",
        {"mlp_tiles": 0, "checkpointing": "full", "offload_activations": "streamed"},
    ),
    (
        "llama",
        "zero2",
        {"loss": "tiled_gradients", "loss_tiles": 4, "num_gpus": 8, "context_parallel": 4},
    ),
    # Experts spread over ranks: two groups of parameters in each layer.
    ("mixtral", "fsdp", {"num_gpus": 8, "expert_parallel": 2}),
    (
        "mixtral",
        "fsdp",
        {"num_gpus": 8, "expert_parallel": 4, "tensor_parallel": 2, "sequence_parallel": True},
    ),
    (
        "mixtral",
        "fsdp",
        {
            "num_gpus": 8,
            "expert_parallel": 2,
            "pipeline_parallel": 2,
            "gradient_accumulation_steps": 3,
        },
    ),
    (
        "mixtral",
        "fsdp",
        {
            "num_gpus": 8,
            "expert_parallel": 4,
            "checkpointing": "full",
            "engine_options": {"wrapping": "torchtitan"},
        },
    ),
)


@pytest.mark.parametrize(("name", "engine", "fields"), TOGETHER)
def test_what_has_gone_apart_before(name: str, engine: str, fields: dict[str, Any]) -> None:
    setup = TrainingSetup(**{"seq_len": 96, **ENGINES[engine], **fields})
    given = Job.of(load_model(*TOLD_APART[name]), setup, None).given
    compare(given, 0, fields)
