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
FSDP_OPTIONS = {"init_device": "meta", "use_orig_params": True, "reentrant_checkpointing": True}
"""``fsdp_cpu_ram_efficient_loading: true``; accelerate's ``fsdp_use_orig_params`` where the file is silent;
transformers' ``use_reentrant`` before 5."""
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
SANTACODER_TARGETS = ["c_attn"]
"""The list in ``scenarios.yaml`` also names ``c_attn``, of which GPT-BigCode has one a layer."""
EARLIER_TRANSFORMERS = ("fms-granite-", "fms-liger-", "fms-orca-")
"""Records of transformers 4.45.2 (``refs/requirements_{granite,liger}.txt``) and 4.43.3 (``refs_orca``)."""
WHOLE_ROW_CHECKPOINTS = ("mixtral-8x7b",)
"""TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ's main branch has one group a row; the others' groups of 128."""
OLD_LOSSES = ("santacoder",)
"""Models whose class still had its own loss in 4.48, in the logits' dtype (``GPTBigCodeForCausalLM``)."""


def fms_acceleration(record: Record) -> Run:
    """A row of one of the CSV files."""
    configuration = _framework_configuration(record)
    if is_model_parallel(record) or "scattermoe" in configuration:
        raise LackingError(feature="ScatterMoE")
    setup = basics(record) | {"optimizer": "adamw-foreach"}
    setup |= _precision(record, configuration) | _kernels(record, configuration)
    if record["n_gpus"] > 1:
        setup["engine"] = "fsdp1"
        setup["engine_options"] = setup.get("engine_options", {}) | FSDP_OPTIONS
    if record["lora"] != "none":
        setup["adapter"] = _adapter(record, configuration)
    return Run(model=model_of(record), gpu=card_of(record), setup=setup, cited=CITED)


def _framework_configuration(record: Record) -> str:
    found = re.search(r"framework_config=([^;]+)", record["other"])
    return found[1] if found else "none"


def _is_autocast(record: Record) -> bool:
    return bool(re.search(r"bf16: True|fp16: True|autocast|mixed", record["precision"]))


def _precision(record: Record, configuration: str) -> Settings:
    """The weights' dtype, with ``bf16: True`` or ``fp16: True`` under autocast.

    accelerate then wraps the model's outputs to fp32, and under FSDP makes fp32 shards of what is trained.
    """
    half = "fp16" if "float16" in record["precision"].replace("bfloat16", "") else "bf16"
    is_trained_whole = record["lora"] == "none"
    settings: Settings = {"precision": half}
    if _is_autocast(record) or "gptq" in configuration:
        is_mixed = record["n_gpus"] > 1 and is_trained_whole
        settings = {"precision": f"{half}-mixed" if is_mixed else "bf16-autocast"}
        settings["upcast_outputs"] = True
        settings["engine_options"] = {"autocast": True} if is_mixed else {}
    if "bnb" in configuration:
        is_prepared = configuration.startswith("baseline") and record["n_gpus"] == 1
        settings["quantize"] = "nf4"
        settings["engine_options"] = {
            "double_quant": True,
            "compute_dtype": half,
            "prepare_for_kbit": is_prepared,
        }
        if record["n_gpus"] > 1:
            settings["engine_options"]["quant_storage"] = half
    elif "gptq" in configuration:
        settings["quantize"] = "gptq"
        if record["model"] in WHOLE_ROW_CHECKPOINTS:
            settings["quantize"] = {"kind": "gptq", "block_size": -1}
    return settings


def _kernels(record: Record, configuration: str) -> Settings:
    """Plain: the loss of the pinned transformers. FOAK: its loss, or Liger's, and fused norms.

    Its loss is in place of ``torch.nn.CrossEntropyLoss`` in GPT-BigCode, so in the logits' own dtype.
    """
    rebinds = record["id"].startswith(EARLIER_TRANSFORMERS)
    kernels: Settings = {"kernels": "hf4"}
    if "foak" not in configuration:
        if record["model"] in OLD_LOSSES:
            return kernels | {"loss": "shifted_uncast"}
        return kernels | {"loss": "shifted" if rebinds else "shifted_apart"}
    if record["model"] in OLD_LOSSES:
        return kernels | {"loss": "foak_uncast"}
    if "liger" in configuration:
        return kernels | {"norm": "fused", "loss": "fused_linear"}
    return kernels | {"norm": "fused", "loss": "foak_rebound" if rebinds else "foak"}


def _adapter(record: Record, configuration: str) -> Settings:
    """peft makes adapters fp32, but not under FSDP over a quantized base (trl's ``is_sharded_qlora``)."""
    targets = SANTACODER_TARGETS if record["model"] == "santacoder" else LORA_TARGETS
    is_bf16 = configuration.startswith("baseline")
    return lora_of(record, targets=targets, dtype="bf16" if is_bf16 else "fp32")
