"""IBM's fms-acceleration benchmarks (``scripts/benchmarks``): HF Trainer through TRL's SFTTrainer.

What the records do not state is in that repository: ``accelerate.yaml`` (FSDP1, full shard, mixed
precision "no", each layer a unit), ``defaults.yaml`` (checkpointing, flash-attention), ``scenarios.yaml``
(targets of the adapters, ``bf16: True`` with a quantized base); and in the pinned packages
(``refs/requirements.txt``): transformers 4.48.1, trl 0.13.0, peft 0.13.2, accelerate 1.0.1.
"""

import re

from tests.measured.runs import (
    LackingError,
    Record,
    Run,
    Settings,
    basics,
    card_of,
    is_model_parallel,
    lora_of,
    model_of,
)

CITED = (
    "foundation-model-stack/fms-acceleration scripts/benchmarks/{accelerate,defaults,scenarios}.yaml",
    "transformers 4.48.1, trl 0.13.0, peft 0.13.2, accelerate 1.0.1 (refs/requirements.txt)",
)
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
SANTACODER_TARGETS = ["c_attn"]
"""The list in ``scenarios.yaml`` also names ``c_attn``, of which GPT-BigCode has one a layer."""
OLD_LOSSES = ("santacoder",)
"""Models whose class still had its own loss in 4.48, in the logits' dtype (``GPTBigCodeForCausalLM``)."""


def fms_acceleration(record: Record) -> Run:
    """A row of one of the CSV files."""
    configuration = _framework_configuration(record)
    if is_model_parallel(record) or "scattermoe" in configuration:
        raise LackingError(feature="ScatterMoE")
    setup = basics(record) | _sharding(record) | {"optimizer": "adamw-foreach"}
    setup |= _precision(record, configuration)
    setup["loss"] = _loss(record, configuration)
    if "foak" in configuration:
        setup["kernels"] = "liger"
    if record["lora"] != "none":
        setup["adapter"] = _adapter(record, configuration)
    return Run(model=model_of(record), gpu=card_of(record), setup=setup, cited=CITED)


def _framework_configuration(record: Record) -> str:
    found = re.search(r"framework_config=([^;]+)", record["other"])
    return found[1] if found else "none"


def _sharding(record: Record) -> Settings:
    if record["n_gpus"] == 1:
        return {"engine": "ddp"}
    return {"engine": "fsdp1", "engine_options": {"init_device": "meta"}}


def _precision(record: Record, configuration: str) -> Settings:
    """Pure bf16; with a quantized base ``bf16: True``, under FSDP accelerate's mixed precision."""
    if "bnb" not in configuration:
        return {"precision": "bf16"}
    options = {"double_quant": True, "compute_dtype": "bf16"}
    options["prepare_for_kbit"] = configuration.startswith("baseline") and record["n_gpus"] == 1
    if record["n_gpus"] > 1:
        options |= {"init_device": "meta"}
    return {"quantize": "nf4", "precision": "bf16-autocast", "engine_options": options}


def _loss(record: Record, configuration: str) -> str:
    if "foak" in configuration:
        return "fused"
    return "shifted_uncast" if record["model"] in OLD_LOSSES else "shifted"


def _adapter(record: Record, configuration: str) -> Settings:
    """peft makes adapters fp32, but not under FSDP over a quantized base (trl's ``is_sharded_qlora``)."""
    targets = SANTACODER_TARGETS if record["model"] == "santacoder" else LORA_TARGETS
    is_bf16 = configuration.startswith("baseline")
    return lora_of(record, targets=targets, dtype="bf16" if is_bf16 else "fp32")
