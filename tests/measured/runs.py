"""What a published record says was run, in memplan's words.

A *translator* reads the settings that a record states and fills in what its source's code does by
default, each such default with the file that says so. It never looks at the measured bytes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]
Settings = dict[str, Any]


class NotExpressibleError(Exception):
    """A run that no setup says."""

    def __init__(self, *, feature: str) -> None:
        super().__init__(feature)
        self.feature = feature


class LackingError(NotExpressibleError):
    """memplan has no words for something that the run did."""


class UnstatedError(NotExpressibleError):
    """The source leaves out what would be needed."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A setup of memplan that says what a record says."""

    model: str | dict[str, Any]
    gpu: str
    setup: Settings
    task: str | None = None
    beside_bytes: int = 0
    """What the source says is in the measured figure beside torch's: context and kernels."""
    cited: tuple[str, ...] = ()
    """Where settings come from that the record does not state: file, and commit or version."""
    remarks: tuple[str, ...] = field(default=())
    """What the run did that no setting says exactly, found by reading its code."""


Translator = Callable[[Record], Run]

CARDS: tuple[tuple[str, str], ...] = (
    (r"^A100-SXM4-40|a100_40gb|A100 40GB", "a100-sxm4-40gb"),
    (r"A100|a100_80gb", "a100-sxm4-80gb"),
    (r"H100 (HBM2e|95)|H100 95", "h100-nvl-94gb"),
    (r"H100|h100_80gb", "h100-sxm-80gb"),
    (r"H800", "h800-sxm-80gb"),
    (r"H200", "h200-sxm-141gb"),
    (r"B200", "b200-180gb"),
    (r"MI300X", "mi300x-192gb"),
    (r"V100.*16", "v100-sxm2-16gb"),
    (r"L40S", "l40s-48gb"),
    (r"A5000", "rtx-a5000-24gb"),
    (r"A6000", "rtx-a6000-48gb"),
    (r"6000 Ada", "rtx6000ada-48gb"),
    (r"3090", "rtx3090-24gb"),
    (r"4090 \(48", "rtx6000ada-48gb"),
    (r"4090", "rtx4090-24gb"),
)
"""The catalog's card of the same architecture and size; a 4090 with 48 GB is an Ada with 48 GB."""


def card_of(record: Record) -> str:
    """The catalog's name of a record's GPU."""
    for pattern, name in CARDS:
        if re.search(pattern, record["gpu"]):
            return name
    raise UnstatedError(feature="the GPU")


BUILT_IN = {
    "llama3-8b": "llama-3.1-8b",
    "llama3-70b": "llama-3.1-70b",
    "llama3.1-405b": "llama-3.1-405b",
    "llama3.2-3b": "llama-3.2-3b",
    "llama2-7b": "llama-2-7b",
    "llama2-70b": "llama-2-70b",
    "bert-large": "bert-large-uncased",
    "mistral-7b": "mistral-7b",
    "mixtral-8x7b": "mixtral-8x7b",
    "qwen3-32b": "qwen3-32b",
    "qwen3-8b": "qwen3-8b",
    "santacoder": "santacoder",
    "yi-6b": "yi-6b",
    "yi-34b": "yi-34b",
    "qwen2-7b": "qwen2-7b",
    "qwen3-0.6b": "qwen3-0.6b",
    "qwen3-4b-instruct-2507": "qwen3-4b-instruct-2507",
    "qwen3-30b-a3b-instruct-2507": "qwen3-30b-a3b-instruct-2507",
    "qwen3-235b-a22b-instruct-2507": "qwen3-235b-a22b-instruct-2507",
}
"""The records' names of models -> memplan's own."""


POWERLM_3B: Settings = {
    "model_type": "granite",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 36,
    "num_key_value_heads": 36,
    "num_hidden_layers": 40,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 4096,
}
"""ibm/PowerLM-3b: 3,510,819,072 parameters."""


def model_of(record: Record) -> str | dict[str, Any]:
    """A built-in model, or a configuration of the sizes that the record gives."""
    name = record["model"].split("/")[-1].lower()
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name == "powerlm-3b":
        return POWERLM_3B
    sizes = record["config"]
    if not sizes.get("layers"):
        raise UnstatedError(feature=f"the sizes of {record['model']}")
    return llama_like(sizes) if sizes.get("norm") == "rmsnorm" else gpt_like(sizes)


def llama_like(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of the Llama kind."""
    kind = "qwen2" if sizes.get("qkv_bias") else "llama"
    config = {
        "model_type": kind,
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["ffn"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "num_hidden_layers": sizes["layers"],
        "vocab_size": sizes["vocab"],
        "tie_word_embeddings": bool(sizes.get("tied")),
        "max_position_embeddings": 262144,
    }
    return config | ({"head_dim": sizes["head_dim"]} if "head_dim" in sizes else {})


def gpt_like(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with layer norms: GPT-NeoX where the residual is parallel, else GPT-2."""
    if sizes.get("parallel_residual"):
        return {
            "model_type": "gpt_neox",
            "hidden_size": sizes["hidden"],
            "intermediate_size": sizes["ffn"],
            "num_attention_heads": sizes["heads"],
            "num_hidden_layers": sizes["layers"],
            "vocab_size": sizes["vocab"],
            "tie_word_embeddings": bool(sizes.get("tied")),
            "max_position_embeddings": 4096,
            "use_parallel_residual": True,
            "rotary_pct": 0.25,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }
    return {
        "model_type": "gpt2",
        "n_embd": sizes["hidden"],
        "n_inner": sizes["ffn"],
        "n_head": sizes["heads"],
        "n_layer": sizes["layers"],
        "vocab_size": sizes["vocab"],
        "tie_word_embeddings": bool(sizes.get("tied", True)),
        "n_positions": sizes.get("positions", 2048),
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


MODEL_PARALLEL = ("tp", "pp", "cp", "ep")


def is_model_parallel(record: Record) -> bool:
    """Whether a record's model is cut by tensors, stages, sequence or experts."""
    return any((record["parallel"].get(each) or 1) > 1 for each in MODEL_PARALLEL)


def basics(record: Record) -> Settings:
    """What every record states in the same words: GPUs, micro-batch, length, checkpointing."""
    if not record["micro_batch"] or not record["seq_len"]:
        raise UnstatedError(feature="the batch or the sequence length")
    settings: Settings = {
        "num_gpus": record["n_gpus"],
        "micro_batch_size": record["micro_batch"],
        "seq_len": record["seq_len"],
        "checkpointing": checkpointing_of(record),
        "attention": attention_of(record),
    }
    if record.get("grad_accum"):
        settings["gradient_accumulation_steps"] = record["grad_accum"]
    return settings


def checkpointing_of(record: Record) -> str:
    """``none``, ``full`` or ``selective``; "every n layers" is full, in segments of n."""
    stated = str(record["checkpointing"])
    for word, name in (
        ("none", "none"),
        ("full", "full"),
        ("selective", "selective"),
        ("every", "full"),
    ):
        if stated.startswith(word):
            return name
    raise UnstatedError(feature="what is checkpointed")


def attention_of(record: Record) -> str:
    """The attention kernel by its stated name."""
    stated = str(record["attention"]).lower()
    if re.search("fa3|flash_attention_3", stated):
        return "flash3"
    if "flash" in stated or re.match(r"fa\d", stated):
        return "flash"
    return "eager" if stated.startswith(("eager", "explicit")) else "sdpa"


def lora_of(record: Record, *, targets: list[str] | str, **further: Any) -> Settings:
    """The adapter that a record's words describe."""
    text = str(record["lora"])
    rank = re.search(r"\br(?:ank)?\s?(\d+)", text)
    if rank is None:
        raise UnstatedError(feature="the rank of the adapters")
    alpha = re.search(r"alpha\s?(\d+)", text)
    dropout = re.search(r"dropout\s?([\d.]+)", text)
    lora: Settings = {"rank": int(rank[1]), "targets": targets, **further}
    if alpha:
        lora["alpha"] = int(alpha[1])
    if dropout:
        lora["dropout"] = float(dropout[1])
    return {"lora": lora}


_DEFAULTS: Settings = {
    "config": {},
    "optimizer": "AdamW",
    "checkpointing": "none",
    "attention": "sdpa",
    "lora": "none",
    "offload": "none",
    "compile": False,
    "other": "",
    "what": "max_allocated",
    "completeness": "A",
}


def record_from(row: Mapping[str, Any]) -> Record:
    """A row of ``tests/data/published_memory.jsonl``, with what it leaves out filled in."""
    record = _DEFAULTS | dict(row)
    record["parallel"] = {"sharding": row.get("sharding", "none")}
    record["source_url_or_repo_path"] = row["source"]
    return record
