"""Records of FSDP2 and DDP as training setups, and the figures that memplan gives for them."""

from functools import partial
from typing import Any

from memplan.estimator.recording import record_and_walk, tape_options
from memplan.memory.account import RankAccount
from memplan.memory.accounts import rank_account
from memplan.memory.rank import RankInput
from memplan.sources.models import load_model
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup

TASKS = {"causal": "causal-lm", "seq2seq": "seq2seq-lm", "mlm": "masked-lm"}
ACCOUNTANTS = {
    Engine.FSDP: rank_account,
    Engine.FSDP1: partial(rank_account, rank=0),
    Engine.DDP: rank_account,
}
"""Of the first rank, which the records are of."""


def account_of(
    config: dict[str, Any], setup: TrainingSetup, task: str = "causal-lm"
) -> RankAccount:
    """The account of a model, from the engine itself."""
    model = load_model(config, task)
    resolved = setup.resolve(model.context_length)
    tape, passes = record_and_walk(model, tape_options(resolved, None))
    given = RankInput(tape=tape, passes=passes, setup=resolved)
    return ACCOUNTANTS[resolved.chosen_engine](given)


def figures_of(account: RankAccount) -> dict[str, int]:
    """What records call the figures of an account."""
    peaks = {phase.name: phase.peak_bytes for phase in account.phases}
    return {
        "bytes_before": account.held_bytes,
        "peak_forward": peaks["forward"],
        "peak_backward": peaks["backward"],
        "peak_step": peaks["step"],
        "peak": account.peak.peak_bytes,
        "peak_load": peaks["load"],
    }


def predict_fsdp(record: dict[str, Any]) -> dict[str, int]:
    """The figures of a record of ``fsdp.jsonl``; kernels as fake tensors run them."""
    settings = record["settings"]
    sharding = settings["fsdp"]
    setup = TrainingSetup(
        num_gpus=sharding["world_size"],
        engine="fsdp",  # type: ignore[arg-type]
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        precision="bf16" if settings.get("precision") == "bf16" else "bf16-mixed",
        optimizer=settings["opt"].replace("_", "-"),
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        attention=settings["attn"],
        gradient_accumulation_steps=settings.get("accum", 1),
        kernel_scratch=False,
        engine_options={
            "reshard_after_forward": sharding["reshard"],
            "reduce_dtype": "fp32" if sharding["reduce_fp32"] else "bf16",
            "sync_each_batch": not settings.get("no_sync", False),
        },
    )
    task = TASKS[record.get("task", "causal")]
    figures = figures_of(account_of(record["config"], setup, task))
    del figures["peak_load"]
    return figures


def _llama(hidden: int, heads: int, kv_heads: int, width: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": width, "vocab_size": vocabulary,
        "num_hidden_layers": 4, "tie_word_embeddings": False, "max_position_embeddings": 8192,
    }  # fmt: skip


DDP_MODELS: dict[str, dict[str, Any]] = {
    "llama3-8b x4 layers": _llama(4096, 32, 8, 14336, 128256),
    "llama2-7b x4 layers": _llama(4096, 32, 32, 11008, 32000),
    "gpt2-medium": {
        "model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 2048,
        "vocab_size": 50257, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    },
}  # fmt: skip
"""The models of ``ddp.jsonl``, as its README describes them; dropout only where a name says so."""


def predict_ddp(record: dict[str, Any]) -> dict[str, int]:
    """The figures of a record of ``ddp.jsonl``."""
    settings = record["settings"]
    precision = {"amp": "bf16-amp"}.get(settings["precision"], settings["precision"])
    rank = settings.get("lora_r")
    setup = TrainingSetup(
        adapter={"lora": {"rank": rank, "targets": "all-linear"}} if rank else None,  # type: ignore[arg-type]
        num_gpus=settings["world"] if settings["ddp"] else 1,
        engine="ddp",  # type: ignore[arg-type]
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        precision=precision,
        optimizer=settings["optimizer"].replace("_", "-"),
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        gradient_accumulation_steps=settings["accum"],
        kernel_scratch=False,
        engine_options={
            "gradient_as_bucket_view": settings["gradient_as_bucket_view"],
            "bucket_cap_mb": settings["bucket_cap_mb"],
            "comm_hook": settings["hook"],
            "static_graph": settings["static_graph"],
        },
    )
    config = record.get("config") or DDP_MODELS[settings["model"]]
    figures = figures_of(account_of(config, setup, TASKS[record.get("task", "causal")]))
    return {**figures, "before": figures["bytes_before"], "peak_ddp_init": figures["peak_load"]}
