"""Options that several commands share: one spelling, one help text, one group in the help.

Those that set a field of the training setup alone are in ``memplan.options.rows.settings``; what only one command has is
declared beside it. ``memplan.options.questions`` says which question has which.
"""

from enum import StrEnum

from memplan.options.largest import or_max, read_whole
from memplan.options.numbers import read_shard
from memplan.options.panels import (
    CHECK_PANEL,
    ENGINE_PANEL,
    FILES_PANEL,
    HARDWARE_PANEL,
    MODEL_PANEL,
    OUTPUT_PANEL,
)
from memplan.options.table import Option


class OutputFormat(StrEnum):
    """How an answer is written."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"


class RowFormat(StrEnum):
    """How many answers are written."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
    MARKDOWN = "markdown"


# -- the model -----------------------------------------------------------------------------------

TASK = Option(
    flag="--task", kind=str | None, panel=MODEL_PANEL,
    help_text="base, causal-lm, seq2seq-lm, masked-lm, sequence-classification, ...; by default what "
    "the config's architectures say.",
)  # fmt: skip
NUM_LABELS = Option(
    flag="--num-labels", kind=int | None, metavar="N", minimum=1, panel=MODEL_PANEL,
    help_text="Labels of a classification task.",
)  # fmt: skip
MODEL = (
    TASK,
    Option(
        flag="--family", kind=str | None, panel=MODEL_PANEL,
        help_text="Read the config as this family's, when its own is not known.",
    ),
    Option(
        flag="--allow-guess", kind=bool, default=False, metavar=None, panel=MODEL_PANEL,
        help_text="Read a type that is not known as the one its keys are most like.",
    ),
    Option(
        flag="--allow-unknown-keys", kind=bool, default=False, metavar=None, panel=MODEL_PANEL,
        help_text="Read a config on where one of its keys seems to be misspelt, and say so.",
    ),
    NUM_LABELS,
    Option(
        flag="--revision", kind=str | None, metavar="REF", panel=MODEL_PANEL,
        help_text="Branch, tag or commit of a Hugging Face model.",
    ),
    Option(
        flag="--token", kind=str | None, metavar="TOKEN", panel=MODEL_PANEL,
        help_text="Hugging Face token; by default the one you logged in with.",
    ),
)  # fmt: skip
"""How a model's name is read."""
NUM_LAYERS = Option(
    flag="--num-layers", kind=int | None, metavar="N|max", panel=MODEL_PANEL, parser=or_max(read_whole),
    show_default=False,
    help_text="Layers of each stack, in the model's own pattern; max: the most that fit. "
    "[default: the model's]",
)  # fmt: skip

# -- what it runs on -----------------------------------------------------------------------------

GPUS = Option(
    flag="--gpus", kind=int, default=1, metavar="N", minimum=1, panel=HARDWARE_PANEL,
    help_text="GPUs in all, over all nodes.",
    axis_help="Numbers of GPUs: 1,2,4, 0-3 (every integer) or 1..32 (doubling).",
)  # fmt: skip
NODES = Option(
    flag="--nodes", kind=int | None, metavar="N", minimum=1, panel=HARDWARE_PANEL, show_default=False,
    help_text="Nodes that the GPUs are divided over. [default: one per 8 GPUs]",
    axis_help="Numbers of nodes. [default: one per 8 GPUs]",
)  # fmt: skip
CARDS = (
    Option(
        flag="--gpu", kind=list[str] | None, metavar="NAMES", panel=HARDWARE_PANEL, show_default=False,
        completes="gpus",
        help_text="GPUs to judge by, as `memplan gpus` lists them: a100,h100; a100@60GiB where others leave so much of it, 46GiB, "
        "local (those here), or a YAML file. "
        "[default: v100-32gb, a100-80gb, h100-80gb]",
    ),
    Option(
        flag="--gpu-memory", kind=str | None, metavar="SIZE", panel=HARDWARE_PANEL,
        help_text="Usable memory of a card that is not listed, such as 46GiB.",
    ),
)  # fmt: skip
CPU_MEMORY = Option(
    flag="--cpu-memory", also=("--host-ram",), kind=str | None, metavar="SIZE", panel=HARDWARE_PANEL,
    help_text="CPU RAM of one node, such as 512GiB: judged too. [default of plans and hints: that of a "
    "usual node of the card]",
)  # fmt: skip
POOLS = Option(
    flag="--pools", kind=str | None, metavar="FILE", panel=HARDWARE_PANEL,
    help_text="A YAML file of what a platform has: names, cards, counts, quotas, prices. The answer is of the best pool.",
)  # fmt: skip

# -- the engine ----------------------------------------------------------------------------------

ENGINE = Option(
    flag="--engine", kind=str | None, metavar="NAMES", panel=ENGINE_PANEL,
    help_text="ddp, deepspeed, fsdp (FSDP2), fsdp1 or megatron, or several. [default: all that are compared]",
    axis_help="ddp, deepspeed, fsdp (FSDP2), fsdp1 or megatron.",
)  # fmt: skip
ZERO = Option(
    flag="--zero", kind=str | None, metavar="STAGES", axis_metavar="LIST", panel=ENGINE_PANEL,
    help_text="DeepSpeed's ZeRO stages, such as 2 or 1-3.",
    axis_help="DeepSpeed's ZeRO stages: 0-3.",
)  # fmt: skip
OFFLOAD = (
    Option(
        flag="--offload", kind=str | None, panel=ENGINE_PANEL,
        help_text="Only setups that offload so: none, cpu or nvme.",
        axis_help="Where the optimizer is: none, cpu, nvme.",
    ),
    Option(
        flag="--offload-param", kind=str | None, panel=ENGINE_PANEL,
        help_text="Only setups whose parameters are so: none, cpu or nvme.",
        axis_help="Where parameters are: none, cpu, nvme.",
    ),
)  # fmt: skip
FSDP_STRATEGY = Option(
    flag="--fsdp-strategy", kind=str | None, panel=ENGINE_PANEL,
    help_text="FSDP's: full_shard, shard_grad_op, hybrid or no_shard.",
    axis_help="full_shard, shard_grad_op, hybrid, no_shard.",
)  # fmt: skip
ENGINE_OPTION = Option(
    flag="--engine-option", kind=list[str] | None, metavar="KEY=VALUE", panel=ENGINE_PANEL,
    help_text="A setting of the engine's own; repeatable.",
)  # fmt: skip

# -- how it trains -------------------------------------------------------------------------------

GLOBAL_BATCH = Option(
    flag="--global-batch-size", kind=int | None, metavar="N", minimum=1,
    help_text="Sequences of one step over all GPUs: fixes the accumulation.",
)  # fmt: skip
ALLOW = Option(
    flag="--allow", kind=str | None, metavar="NAMES", show_default=False,
    help_text="What may be given up to make it fit, the least of it first: 8bit (the optimizer's states), "
    "lora, qlora.",
)  # fmt: skip
PRECISION = Option(
    flag="--precision", kind=str | None,
    help_text="fp32, bf16, bf16-autocast, bf16-amp, bf16-mixed, bf16-master, or fp16: what the engine "
    "calls so (fp16-amp, fp16-mixed, fp16-master). [default: the engine's]",
    axis_help="bf16-master, bf16-mixed, fp32, ...",
)  # fmt: skip
SETUP = Option(
    flag="--setup", kind=str | None, metavar="FILE", panel=FILES_PANEL,
    help_text="A YAML file that holds a whole training setup, or a training stack's own file: axolotl, "
    "LLaMA-Factory, Lightning, NeMo, prime-rl, torchtitan, torchtune, TRL, verl.",
)  # fmt: skip
FILES = (
    SETUP,
    Option(
        flag="--preset", kind=str | None, panel=FILES_PANEL,
        help_text="What a training stack does by default: axolotl, hf-trainer, lightning, litgpt-full, "
        "litgpt-lora, litgpt-pretrain, llama-factory, llama-factory-v1, "
        "megatron-lm, nanogpt, nanotron, "
        "nemo, prime-rl, torchtitan, torchtune, trl-distillation, trl-dpo, trl-grpo, trl-kto, "
        "trl-orpo, trl-reward, trl-rloo, trl-sft, unsloth, unsloth-cli, verl.",
    ),
    Option(
        flag="--training-args", kind=str | None, metavar="FILE", panel=FILES_PANEL,
        help_text="Hugging Face TrainingArguments or a TRL config, JSON or YAML.",
    ),
)  # fmt: skip
"""What a setup starts from."""
LAUNCH_FILES = (
    Option(
        flag="--deepspeed-config", kind=str | None, metavar="FILE", panel=FILES_PANEL,
        help_text="DeepSpeed's ds_config.json.",
    ),
    Option(
        flag="--accelerate-config", kind=str | None, metavar="FILE", panel=FILES_PANEL,
        help_text="accelerate's YAML: FSDP, DeepSpeed or plain.",
    ),
)  # fmt: skip
"""What it is launched with."""

# -- what is printed -----------------------------------------------------------------------------

FORMAT = Option(
    flag="--format", kind=OutputFormat, default=OutputFormat.TABLE, metavar="FORMAT", panel=OUTPUT_PANEL,
    help_text="table, json, csv or markdown.",
)  # fmt: skip
ROW_FORMAT = Option(
    flag="--format", kind=RowFormat, default=RowFormat.TABLE, metavar="FORMAT", panel=OUTPUT_PANEL,
    help_text="table, json, jsonl, csv or markdown.",
)  # fmt: skip
LEGEND = Option(
    flag="--legend", kind=bool, default=False, metavar=None, panel=OUTPUT_PANEL,
    help_text="Explain every word below the answer; alone: every word.",
)  # fmt: skip
PICTURES = (
    Option(
        flag="--report", kind=str | None, metavar="FILE", panel=OUTPUT_PANEL,
        help_text="Write a page with pictures too: report.html, one file that needs no network; or the "
        "drawing alone: picture.svg.",
    ),
    Option(
        flag="--chart", kind=bool, default=False, metavar=None, panel=OUTPUT_PANEL,
        help_text="Draw the answer below the table, in characters.",
    ),
)  # fmt: skip
EMIT = (
    Option(
        flag="--emit", kind=str | None, metavar="KIND", panel=OUTPUT_PANEL,
        help_text="Write the setup for deepspeed, accelerate, training-args, axolotl, trl-sft, llama-factory, "
        "torchtune, unsloth, torchtitan, megatron or deepspeed+megatron, or its job for slurm, kubernetes, kueue, "
        "skypilot or ray instead.",
    ),
    Option(
        flag="--output", kind=str | None, metavar="FILE", panel=OUTPUT_PANEL,
        help_text="Where --emit writes; TrainingArguments become YAML in a .yaml file, torchtitan's "
        "flags TOML in a .toml file.",
    ),
)  # fmt: skip
JOBS = Option(
    flag="--jobs", kind=int, default=1, metavar="N", minimum=0, panel=OUTPUT_PANEL,
    help_text="Processes to spread the work over; 0: one for each core. The answer is the same.",
)  # fmt: skip
SHARD = Option(
    flag="--shard", kind=str | None, metavar="I/N", panel=OUTPUT_PANEL, parser=read_shard,
    help_text="Do the I-th of N parts of the grid, for array jobs: 1/4 to 4/4. In their order, rows are those of the whole.",
)  # fmt: skip
FAIL_ON = Option(
    flag="--fail-on", kind=str | None, metavar="VERDICT", panel=CHECK_PANEL,
    help_text="What the check fails on: oom, or tight as well. [default: oom]",
)  # fmt: skip
CHECKS = (
    Option(
        flag="--check", kind=str | None, metavar="[all|any]", panel=CHECK_PANEL,
        help_text="Fail unless all setups, or any, are within every GPU's memory.",
    ),
    FAIL_ON,
    Option(
        flag="--baseline", kind=str | None, metavar="FILE", panel=CHECK_PANEL,
        help_text="Show what moved since this --format json output; fail on a regression.",
    ),
    Option(
        flag="--tolerance", kind=str | None, metavar="SHARE", panel=CHECK_PANEL,
        help_text="How much a peak may grow since the baseline, such as 2%. [default: 0%]",
    ),
    Option(
        flag="--unmatched", kind=str | None, metavar="[fail|allow]", panel=CHECK_PANEL,
        help_text="Rows that only the baseline or only this answer has, or another model: fail, or allow "
        "them. [default: fail]",
    ),
    Option(
        flag="--annotate", kind=str | None, metavar="FILE", panel=CHECK_PANEL,
        help_text="Write GitHub's annotations of what turned, at this file of the repository, to stderr.",
    ),
)  # fmt: skip
