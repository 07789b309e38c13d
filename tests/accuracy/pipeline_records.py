"""Records of torch's pipelines as training setups, and the figures memplan gives for them."""

from typing import Any

from memplan.estimator.job import prepared
from memplan.memory.accounts import rank_account
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup

SCHEDULES = {
    "GPipe": "gpipe", "1F1B": "1f1b", "I1F1B": "interleaved-1f1b", "Interleaved1F1B": "interleaved-1f1b",
    "LoopedBFS": "looped-bfs", "InterleavedZeroBubble": "interleaved-zero-bubble", "ZBV": "zbv",
    "DualPipeV": "dualpipev",
}  # fmt: skip
"""The records' names, and memplan's."""
LLAMA3_8B = (4096, 32, 8, 14336, 128256)
"""Hidden size, heads, key/value heads, network's width, vocabulary."""


def config_of(num_layers: int, sizes: tuple[int, ...] = LLAMA3_8B) -> dict[str, Any]:
    """A Llama of these sizes."""
    hidden, heads, kv_heads, width, vocabulary = sizes
    return {
        "model_type": "llama", "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": width, "vocab_size": vocabulary,
        "num_hidden_layers": num_layers, "tie_word_embeddings": False,
        "max_position_embeddings": 8192, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip


def predict_pipeline(record: dict[str, Any]) -> dict[str, int]:
    """The figures of a record of one rank."""
    settings = record["settings"]
    num_ranks = settings["pp"]
    layers = settings["layers_per_stage"] * num_ranks * settings["stages_per_rank"]
    setup = TrainingSetup(
        num_gpus=num_ranks,
        engine="ddp",  # type: ignore[arg-type]
        pipeline_parallel=num_ranks,
        pipeline_schedule=SCHEDULES[settings["schedule"]],  # type: ignore[arg-type]
        virtual_stages=settings["stages_per_rank"],
        gradient_accumulation_steps=settings["microbatches"],
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        precision=settings["precision"],
        optimizer=settings["optimizer"].replace("_", "-"),
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        kernel_scratch=False,
        engine_options={"return_outputs": settings["return_outputs"]},
    )
    return _figures(setup, config_of(layers), settings["rank"])


def predict_own(record: dict[str, Any]) -> dict[str, int]:
    """The figures of a fresh record, whose kernels are CUDA's own."""
    settings = record["settings"]
    num_ranks, num_shards = settings["pp"], settings["fsdp2"]
    setup = TrainingSetup(
        num_gpus=num_ranks * num_shards,
        engine="ddp" if num_shards == 1 else "fsdp",  # type: ignore[arg-type]
        pipeline_parallel=num_ranks,
        pipeline_schedule=settings["schedule"],
        virtual_stages=settings["stages_per_rank"],
        layers_per_stage=tuple(settings["layers"]),
        gradient_accumulation_steps=settings["microbatches"],
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        precision="bf16" if num_shards == 1 else "bf16-mixed",  # type: ignore[arg-type]
        optimizer=settings["optimizer"].replace("_", "-"),
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
    )
    config = config_of(sum(settings["layers"]), settings["sizes"])
    return _figures(setup, config, settings["rank"] * num_shards)


def _figures(setup: TrainingSetup, config: dict[str, Any], rank: int) -> dict[str, int]:
    given = prepared(load_model(config, "causal-lm"), setup.resolve(), None).rank_input
    account = rank_account(given, rank=rank)
    phases = {phase.name: phase.peak_bytes for phase in account.phases}
    return {
        "bytes_before": account.held_bytes,
        "peak_fwd_bwd": max(phases["forward"], phases["backward"]),
        "peak_step": phases["step"],
    }
