"""Hugging Face's own pages and benchmarks."""

import re

from memplan.units import MIB
from tests.measured.runs import (
    LackingError,
    Record,
    Run,
    UnstatedError,
    basics,
    card_of,
    lora_of,
    model_of,
)

CONTEXT_BYTES = 1343 * MIB
"""What ``perf_train_gpu_one.mdx`` says that the context and kernels take."""

OPTIMIZERS = (
    ("Adafactor", "adafactor"),
    ("Adam8bit", "bnb-adamw-8bit"),
    ("AdamW", "adamw-loop"),
)


def documentation(record: Record) -> Run:
    """A row of the table in ``perf_train_gpu_one.mdx`` (commit 98513dfd0db6): bert-large, HF Trainer.

    Its default optimizer was transformers' own AdamW, parameter by parameter (``optim="adamw_hf"``).
    """
    is_autocast = record["precision"].startswith("autocast")
    optimizer = next(name for word, name in OPTIMIZERS if word in record["optimizer"] + "AdamW")
    setup = basics(record) | {
        "precision": "fp16-amp" if is_autocast else "fp32",
        "optimizer": optimizer,
    }
    if "grad accumulation 4" in record["other"]:
        setup["gradient_accumulation_steps"] = 4
    return Run(
        model=model_of(record),
        gpu=card_of(record),
        setup=setup,
        task="sequence-classification",
        beside_bytes=CONTEXT_BYTES,
        cited=("huggingface/transformers docs/source/en/perf_train_gpu_one.mdx at 98513dfd0db6",),
        remarks=("torch of January 2022 keeps gradients between steps and fills them with zeros",),
    )


PEFT_CITED = (
    "huggingface/peft method_comparison/MetaMathQA/{run,utils}.py",
    "peft's defaults for the model's type where a record does not name targets",
)
PEFT_METHODS = {"IA3": "ia3", "PROMPT_TUNING": "prompt"}
"""Methods beside LoRA that are asked for -> memplan's names."""


LLAMA_3_2_3B_WIDTH = 3072


def peft_comparison(record: Record) -> Run:
    """A row of the MetaMathQA comparison: Llama-3.2-3B, batches padded to their longest, cut at 768."""
    setup = basics(record) | {"precision": "bf16", "optimizer": "adamw-foreach"}
    method = str(record["lora"])
    if method == "none":
        return _peft_run(record, setup)
    if method.startswith("LN tuning"):
        return _peft_run(record, setup | {"adapter": {"ln_tuning": {}}})
    name = method.split(maxsplit=1)[0].replace("-", "_")
    if name.upper() in PEFT_METHODS:
        return _peft_run(record, setup | {"adapter": _other_adapter(record, name.upper())})
    if name.upper() in ("LORA", "DORA") or method.startswith("LoRA"):
        return _peft_run(record, setup | {"adapter": _lora(record)})
    raise LackingError(feature=f"peft's {name}")


def _other_adapter(record: Record, method: str) -> dict[str, object]:
    """IA3 on peft's modules, or as many trained tokens as the record's trainable parameters are."""
    kind = PEFT_METHODS[method]
    if kind == "ia3":
        return {"ia3": {}}
    trainable = re.search(r"trainable (\d+)", str(record["other"]))
    if trainable is None:
        raise UnstatedError(feature="how many tokens are trained")
    return {"prompt": {"tokens": int(trainable[1]) // LLAMA_3_2_3B_WIDTH}}


def _lora(record: Record) -> dict[str, object]:
    text = str(record["lora"]) + " " + record["id"]
    for word in ("bdlora", "mica", "lorafa", "LoRA-FA"):
        if word in text:
            raise LackingError(feature=f"peft's {word}")
    targets: list[str] = ["q_proj", "v_proj"]
    if "mlp" in text:
        targets = ["up_proj", "gate_proj", "down_proj"]
    stated = dict(record) | {"lora": text.replace("rank", "r")}
    return lora_of(
        stated, targets=targets, dora="dora" in text.lower(), rslora="rslora" in text.lower()
    )


def _peft_run(record: Record, setup: dict[str, object]) -> Run:
    return Run(model=model_of(record), gpu=card_of(record), setup=setup, cited=PEFT_CITED)
