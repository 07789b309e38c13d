"""Records of adapters as training setups, and the figures that memplan gives for them."""

from typing import Any

from memplan.estimator import estimate
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.accuracy.sharding_records import TASKS, account_of, figures_of


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, width: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": width,
        "vocab_size": vocabulary, "tie_word_embeddings": False, "max_position_embeddings": 8192,
    }  # fmt: skip


def _qwen(
    hidden: int, heads: int, kv_heads: int, width: int, vocabulary: int, *, tied: bool
) -> dict[str, Any]:
    return {
        **_llama(hidden, 28, heads, kv_heads, width, vocabulary), "model_type": "qwen2",
        "tie_word_embeddings": tied,
    }  # fmt: skip


def _gpt2(dropout: float) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 2048,
        "vocab_size": 50257, "attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout,
    }  # fmt: skip


LORA_MODELS: dict[str, dict[str, Any]] = {
    "llama3-8b": _llama(4096, 32, 32, 8, 14336, 128256),
    "llama2-7b": _llama(4096, 32, 32, 32, 11008, 32000),
    "qwen2-7b": _qwen(3584, 28, 4, 18944, 152064, tied=False),
    "qwen2-1.5b(tied)": _qwen(1536, 12, 2, 8960, 151936, tied=True),
    "gpt2-medium(drop0)": _gpt2(0.0),
    "gpt2-medium(drop0.1)": _gpt2(0.1),
}
"""The models of ``lora.jsonl``, as its README describes them."""
QUERY_VALUE = {"gpt2": ["c_attn"]}


def predict_lora(record: dict[str, Any]) -> dict[str, int]:
    """The figures of a record of ``lora.jsonl``; kernels as fake tensors run them."""
    settings = record["settings"]
    config = dict(LORA_MODELS[settings["model"]])
    kind = config["model_type"]
    if settings["layers"] != "full":
        config["n_layer" if kind == "gpt2" else "num_hidden_layers"] = settings["layers"]
    precision = {
        ("bf16", False): "bf16", ("bf16", True): "bf16-autocast",
        ("fp32", False): "fp32", ("fp32", True): "bf16-amp",
    }[settings["base"], settings["amp"]]  # fmt: skip
    targets: Any = settings["targets"]
    if targets == "qv":
        targets = QUERY_VALUE.get(kind, ["q_proj", "v_proj"])
    setup = TrainingSetup(
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        precision=precision,  # type: ignore[arg-type]
        optimizer=settings["optimizer"].replace("_", "-"),
        checkpointing="full" if settings["ckpt"] else "none",  # type: ignore[arg-type]
        kernel_scratch=False,
        adapter={  # type: ignore[arg-type]
            "lora": {
                "rank": settings["r"],
                "targets": targets,
                "dropout": settings["dropout"],
                "dtype": settings["adapter"],
            }
        },
    )
    return figures_of(account_of(config, setup))


TARGETS = {"attention": ["q_proj", "v_proj"], "all": "all-linear"}
OWN_TARGETS = {"gpt2": ["c_attn"], "t5": ["q", "v"], "phi3": ["qkv_proj"]}
"""What ``attention`` stands for, where it is not what most classes call it."""


def setup_of(record: dict[str, Any]) -> TrainingSetup:
    """A record of ``lora_cuda.jsonl`` in memplan's words."""
    settings = record["settings"]
    lora = settings["lora"]
    name = settings["precision"]
    base = settings.get("base") or ("bf16" if name == "bf16" else "fp32")
    precision = {
        ("bf16", "bf16"): "bf16", ("amp", "bf16"): "bf16-autocast", ("amp", "fp32"): "bf16-amp",
        ("bf16", "fp32"): "fp32",
    }[name, base]  # fmt: skip
    targets: Any = lora.get("targets", "all")
    if targets == "attention":
        targets = OWN_TARGETS.get(record["model_type"], TARGETS[targets])
    return TrainingSetup(
        micro_batch_size=settings["b"],
        seq_len=settings["s"],
        precision=precision,  # type: ignore[arg-type]
        checkpointing="full" if settings.get("ckpt") else "none",  # type: ignore[arg-type]
        attention="eager" if record["model_type"] == "gemma2" else "sdpa",  # type: ignore[arg-type]
        kernels="liger" if settings.get("liger") is not None else "hf",  # type: ignore[arg-type]
        adapter={  # type: ignore[arg-type]
            "lora": {
                "rank": lora["r"],
                "targets": TARGETS.get(targets, targets) if isinstance(targets, str) else targets,
                "dropout": lora.get("dropout", 0.0),
                "dtype": lora.get("dtype", "fp32"),
                "dora": lora.get("dora", False),
                "rslora": lora.get("rslora", False),
                "modules_to_save": lora.get("save", ()),
            }
        },
    )


def predict_lora_cuda(record: dict[str, Any]) -> dict[str, int]:
    """The figures of a record of ``lora_cuda.jsonl``, with all that kernels allocate."""
    model = load_model(record["config"], TASKS[record["task"]])
    found = estimate(model, setup_of(record), load_gpu("h100-sxm-80gb"))
    phases = found.phases
    return {
        "params": found.num_params,
        "trainable": found.trainable_params,
        "requested_before": found.held_bytes,
        "requested_peak": found.peak_bytes,
        "peak_forward": phases["forward"].peak_bytes,
        "peak_backward": phases["backward"].peak_bytes,
        "reserved_peak": found.reserved_bytes,
    }
