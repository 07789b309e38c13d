"""Records of torch's pipelines as training setups, and the figures memplan gives for them."""

from typing import Any

import memplan
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


def predict_composed(record: dict[str, Any]) -> dict[str, int]:
    """The figures of one rank of a pipeline beside other degrees, on PyTorch's CUDA build."""
    settings = record["settings"]
    replicas, is_fsdp = settings["replicas"], settings["engine"] == "fsdp"
    width = settings["dp"] * replicas * settings["tp"]
    hybrid: dict[str, Any] = {}
    if replicas > 1:
        options = {"data_parallel_replicate_degree": replicas}
        hybrid = {"num_nodes": replicas, "fsdp_strategy": "hybrid", "engine_options": options}
    setup = TrainingSetup(
        num_gpus=settings["pp"] * width,
        engine=settings["engine"],
        pipeline_parallel=settings["pp"],
        pipeline_schedule=settings["schedule"],
        virtual_stages=settings["stages_per_rank"],
        layers_per_stage=tuple(settings["layers"]),
        tensor_parallel=settings["tp"],
        sequence_parallel=settings["sequence_parallel"],
        gradient_accumulation_steps=settings["microbatches"],
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        precision="bf16-mixed" if is_fsdp else "bf16",  # type: ignore[arg-type]
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        **hybrid,
    )
    config = config_of(sum(settings["layers"]), settings["sizes"])
    answer = memplan.estimate(config, setup, gpu="h100", rank=settings["rank"] * width)
    peaks = {phase.name: phase.peak_bytes for phase in answer.account.phases}
    return {
        "bytes_before": answer.held_bytes,
        "peak_fwd_bwd": max(peaks["forward"], peaks["backward"]),
        "peak_step": peaks["step"],
    }


def predict_deepspeed(record: dict[str, Any]) -> dict[str, int]:
    """The figures of one rank of DeepSpeed's PipelineEngine, on PyTorch's CUDA build."""
    settings = record["settings"]
    options: dict[str, Any] = {
        "partition_method": settings["method"], "torch_adam": True,
        "reduce_bucket_size": settings["reduce_bucket_size"], "overlap_comm": settings["overlap_comm"],
    }  # fmt: skip
    if settings["grad_accum_dtype"] is not None:
        options["grad_accum_dtype"] = settings["grad_accum_dtype"]
    precision = settings["precision"]
    setup = TrainingSetup(
        num_gpus=settings["pp"] * settings["dp"],
        engine="deepspeed",  # type: ignore[arg-type]
        zero_stage=settings["zero_stage"],
        pipeline_parallel=settings["pp"],
        layers_per_stage=None if settings["layers"] is None else tuple(settings["layers"]),
        gradient_accumulation_steps=settings["microbatches"],
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        precision=precision if precision == "fp32" else f"{precision}-master",
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        engine_options=options,
    )
    config = {
        **config_of(settings["num_layers"], settings["sizes"]),
        "tie_word_embeddings": settings["tied"],
    }
    answer = memplan.estimate(config, setup, gpu="h100", rank=settings["rank"] * settings["dp"])
    peaks = {phase.name: phase.peak_bytes for phase in answer.account.phases}
    return {
        "bytes_before": answer.held_bytes,
        "peak_passes": max(peaks["forward"], peaks["backward"]),
        "peak_step": peaks["step"],
    }


def _figures(setup: TrainingSetup, config: dict[str, Any], rank: int) -> dict[str, int]:
    given = prepared(load_model(config, "causal-lm"), setup.resolve(), None).rank_input
    account = rank_account(given, rank=rank)
    phases = {phase.name: phase.peak_bytes for phase in account.phases}
    return {
        "bytes_before": account.held_bytes,
        "peak_fwd_bwd": max(phases["forward"], phases["backward"]),
        "peak_step": phases["step"],
    }
