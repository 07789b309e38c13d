"""Options that describe how a model is trained, and the setup made from them.

``estimate`` takes each as one value; a sweep takes lists of the same names.
"""

from typing import Annotated, Any

import typer

from memplan.options.panels import ENGINE_PANEL, FILES_PANEL, TRAINING_PANEL


def _option(name: str, help_text: str, metavar: str = "NAME", panel: str = ENGINE_PANEL) -> Any:
    return typer.Option(name, metavar=metavar, help=help_text, rich_help_panel=panel)


EngineOption = Annotated[
    str | None,
    _option(
        "--engine",
        "ddp, deepspeed, fsdp (FSDP2), fsdp1 or megatron, or several. [default: all that are compared]",
        "NAMES",
    ),
]
ZeroOption = Annotated[
    str | None, _option("--zero", "DeepSpeed's ZeRO stages, such as 2 or 1-3.", "STAGES")
]
OffloadOption = Annotated[
    str | None, _option("--offload", "Only setups that offload so: none, cpu or nvme.")
]
OffloadParamOption = Annotated[
    str | None,
    _option("--offload-param", "Only setups whose parameters are so: none, cpu or nvme."),
]
FsdpStrategyOption = Annotated[
    str | None,
    _option("--fsdp-strategy", "FSDP's: full_shard, shard_grad_op, hybrid or no_shard."),
]
PrecisionOption = Annotated[
    str | None,
    _option(
        "--precision",
        "fp32, bf16, bf16-autocast, bf16-amp, bf16-mixed, bf16-master, or fp16: what the engine "
        "calls so (fp16-amp, fp16-mixed, fp16-master). "
        "[default: the engine's]",
        panel=TRAINING_PANEL,
    ),
]
EngineOptionOption = Annotated[
    list[str] | None,
    _option("--engine-option", "A setting of the engine's own; repeatable.", "KEY=VALUE"),
]
SetupFileOption = Annotated[
    str | None,
    _option(
        "--setup",
        "A YAML file that holds a whole training setup, or a training stack's own file: axolotl, "
        "LLaMA-Factory, Lightning, NeMo, prime-rl, torchtitan, torchtune, TRL, verl.",
        "FILE",
        panel=FILES_PANEL,
    ),
]
PresetOption = Annotated[
    str | None,
    _option(
        "--preset",
        "What a training stack does by default: axolotl, hf-trainer, lightning, litgpt-full, "
        "litgpt-lora, litgpt-pretrain, llama-factory, llama-factory-v1, nanogpt, nanotron, "
        "nemo, prime-rl, torchtitan, torchtune, trl-distillation, trl-dpo, trl-grpo, trl-kto, "
        "trl-orpo, trl-reward, trl-rloo, trl-sft, unsloth, verl.",
        panel=FILES_PANEL,
    ),
]
TrainingArgumentsOption = Annotated[
    str | None,
    _option(
        "--training-args",
        "Hugging Face TrainingArguments or a TRL config, JSON or YAML.",
        "FILE",
        panel=FILES_PANEL,
    ),
]
DeepSpeedConfigOption = Annotated[
    str | None,
    _option("--deepspeed-config", "DeepSpeed's ds_config.json.", "FILE", panel=FILES_PANEL),
]
AccelerateConfigOption = Annotated[
    str | None,
    _option(
        "--accelerate-config",
        "accelerate's YAML: FSDP, DeepSpeed or plain.",
        "FILE",
        panel=FILES_PANEL,
    ),
]
