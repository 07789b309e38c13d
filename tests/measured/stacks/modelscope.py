"""ms-swift's benchmark of 2024 and Qwen's own table: Qwen-1 in remote code, HF Trainer, LoRA.

ms-swift (``docs/source_en/LLM/Benchmark.md`` before b40f31df7): adamw_torch, each sample cut at the length that
is benchmarked, adapters on the model's DEFAULT targets. Its Qwen is memplan's Qwen2 in all that has bytes but
the head count of keys and the one matrix of queries, keys and values (``c_attn``).
"""

import re

from tests.measured.runs import (
    Record,
    Run,
    basics,
    card_of,
    lora_of,
    model_of,
)

QWEN_ATTENTION = ["q_proj", "k_proj", "v_proj"]
"""``c_attn`` of Qwen-1 is these three in one."""
QWEN_SCRIPT = [*QWEN_ATTENTION, "o_proj", "gate_proj", "up_proj", "down_proj"]
"""``finetune.py``'s c_attn, c_proj (of both parts), w1, w2."""
SWIFT_CITED = (
    "modelscope/ms-swift docs/source_en/LLM/Benchmark.md and swift/llm/utils/model.py (targets), 2024",
)


def ms_swift(record: Record) -> Run:
    """A row of ``Benchmark.md``."""
    setup = basics(record) | {"optimizer": "adamw-foreach", "loss": "shifted"}
    steps = re.search(r"grad accumulation (\d+)", record["other"])
    if steps:
        setup["gradient_accumulation_steps"] = int(steps[1])
    if record["lora"] == "none":
        setup["precision"] = "bf16"
        return _run(record, setup)
    setup["precision"] = "bf16-autocast"
    setup["adapter"] = lora_of(record, targets=_targets(record), dtype="fp32")
    if "gptq" in record["precision"]:
        setup["quantize"] = "gptq"
        if "int8" in record["precision"]:
            setup["engine_options"] = {"quant_bits": 8}
    elif "bnb" in record["precision"]:
        setup |= {"quantize": "nf4", "engine_options": {"double_quant": True}}
    return _run(record, setup)


def _run(record: Record, setup: dict[str, object]) -> Run:
    return Run(model=model_of(record), gpu=card_of(record), setup=setup, cited=SWIFT_CITED)


def _targets(record: Record) -> list[str] | str:
    return "all-linear" if "all linear" in record["lora"] else QWEN_ATTENTION


def qwen(record: Record) -> Run:
    """A row of Qwen's "Profiling of Memory and Speed": what measured it is not stated."""
    setup = basics(record) | {
        "precision": "bf16-autocast",
        "optimizer": "adamw-foreach",
        "loss": "shifted",
        "gradient_accumulation_steps": 8,
    }
    saved = ["embed_tokens", "lm_head"] if "trainable wte" in record["lora"] else []
    adapter = lora_of(record, targets=QWEN_SCRIPT, dtype="fp32")
    if saved:
        adapter["lora"]["modules_to_save"] = saved
    setup["adapter"] = adapter
    if "GPTQ" in record["precision"]:
        setup["quantize"] = "gptq"
    return Run(
        model=model_of(record),
        gpu=card_of(record),
        setup=setup,
        cited=("QwenLM/Qwen finetune.py, finetune/finetune_{lora,qlora}_single_gpu.sh",),
    )
