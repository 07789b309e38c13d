"""prime-rl's trainer benchmarks: FSDP2 over fp32 shards, each layer compiled, random tokens.

``src/prime_rl/trainer`` at 85a9dc0e7: supervised, the logits are kept in fp32 in the loop's ``out`` until backward
has run; RL never has all of them (``models/layers/lm_head.py``, ``FusedOutputLinear``, 2048 words at a time), for
which a cut cross-entropy is the nearest.
"""

import re
from typing import Any

from tests.measured.runs import Record, Run, basics, card_of, lora_of, model_of

CITED = (
    "PrimeIntellect-ai/prime-rl benchmarks/scripts/run_single_benchmark.py, src/prime_rl/trainer/{model,rl/train,sft/train}.py",
    "PrimeIntellect-ai/prime-rl .github/workflows/benchmarks.yaml",
)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""``LoRAConfig.target_modules`` of ``src/prime_rl/configs/trainer.py``."""


def prime_rl(record: Record) -> Run:
    """A baseline, or a run that died."""
    setup = basics(record) | {
        "allocator": "expandable",
        "engine": "fsdp",
        "precision": "bf16-mixed",
        "optimizer": "adamw-foreach",
        "compile": "layer",
        "gradient_accumulation_steps": record.get("grad_accum") or 2,
        "engine_options": {"init_device": "to_empty", "sync_each_batch": True},
    }
    if "trainer rl" in record["other"] or "-rl-" in record["id"]:
        setup["loss"] = "cut"
    else:
        setup |= {"outputs_held": True, "upcast_outputs": True}
    if "offload" in str(record["checkpointing"]):
        setup["offload_activations"] = 1.0
    if record["lora"] != "none":
        setup["adapter"] = lora_of(record, targets=TARGETS)
    return Run(model=_model(record), gpu=card_of(record), setup=setup, cited=CITED)


def _model(record: Record) -> str | dict[str, Any]:
    if re.search("INTELLECT-3", record["model"]):
        return "glm-4.5-air"
    return model_of(record)
