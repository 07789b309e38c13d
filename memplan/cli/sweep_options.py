"""Options that take several values, and what is checked at the end: for sweeps and plans."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from memplan.cli.options import complete_gpus
from memplan.options.panels import ENGINE_PANEL, HARDWARE_PANEL, OUTPUT_PANEL, TRAINING_PANEL

CHECK_PANEL = "Checks (exit code 5 when one fails)"
_LISTS = "1,2,4, 0-3 (every integer) or 1..32 (doubling)"


class RowFormat(StrEnum):
    """How many answers are written."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
    MARKDOWN = "markdown"


def axis_option(name: str, help_text: str, metavar: str, panel: str = TRAINING_PANEL) -> Any:
    """An option whose text is a list or a range."""
    return typer.Option(
        name, metavar=metavar, help=help_text, rich_help_panel=panel, show_default=False
    )


GpusAxis = Annotated[
    str | None, axis_option("--gpus", f"Numbers of GPUs: {_LISTS}.", "LIST", HARDWARE_PANEL)
]
NodesAxis = Annotated[
    str | None,
    axis_option("--nodes", "Numbers of nodes. [default: one per 8 GPUs]", "LIST", HARDWARE_PANEL),
]
GpuNames = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        metavar="NAMES",
        help="GPUs to judge by, as `memplan gpus` lists them, 46GiB, or a YAML description: a100,h100. "
        "[default: v100-32gb, a100-80gb, h100-80gb]",
        rich_help_panel=HARDWARE_PANEL,
        show_default=False,
        autocompletion=complete_gpus,
    ),
]
EngineAxis = Annotated[
    str | None,
    axis_option(
        "--engine", "ddp, deepspeed, fsdp (FSDP2), fsdp1 or megatron.", "NAMES", ENGINE_PANEL
    ),
]
ZeroAxis = Annotated[
    str | None, axis_option("--zero", "DeepSpeed's ZeRO stages: 0-3.", "LIST", ENGINE_PANEL)
]
FsdpStrategyAxis = Annotated[
    str | None,
    axis_option(
        "--fsdp-strategy", "full_shard, shard_grad_op, hybrid, no_shard.", "NAMES", ENGINE_PANEL
    ),
]
OffloadAxis = Annotated[
    str | None,
    axis_option("--offload", "Where the optimizer is: none, cpu, nvme.", "NAMES", ENGINE_PANEL),
]
OffloadParamAxis = Annotated[
    str | None,
    axis_option("--offload-param", "Where parameters are: none, cpu, nvme.", "NAMES", ENGINE_PANEL),
]
GlobalBatchOption = Annotated[
    int | None,
    typer.Option(
        "--global-batch-size",
        metavar="N",
        min=1,
        help="Sequences of one step over all GPUs: fixes the accumulation.",
        rich_help_panel=TRAINING_PANEL,
    ),
]
PrecisionAxis = Annotated[
    str | None, axis_option("--precision", "bf16-master, bf16-mixed, fp32, ...", "NAMES")
]
CheckpointingAxis = Annotated[
    str | None,
    axis_option("--checkpointing", "none, full, selective, or layers: 0.5, 8, 0-7+12.", "NAMES"),
]
CheckOption = Annotated[
    str | None,
    typer.Option(
        "--check",
        metavar="[all|any]",
        help="Fail unless all setups, or any, are within every GPU's memory.",
        rich_help_panel=CHECK_PANEL,
    ),
]
FailOnOption = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        metavar="VERDICT",
        help="What the check fails on: oom, or tight as well. [default: oom]",
        rich_help_panel=CHECK_PANEL,
    ),
]
BaselineOption = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="FILE",
        help="Show what moved since this --format json output; fail on a regression.",
        rich_help_panel=CHECK_PANEL,
    ),
]
ToleranceOption = Annotated[
    str | None,
    typer.Option(
        "--tolerance",
        metavar="SHARE",
        help="How much a peak may grow since the baseline, such as 2%. [default: 0%]",
        rich_help_panel=CHECK_PANEL,
    ),
]
UnmatchedOption = Annotated[
    str | None,
    typer.Option(
        "--unmatched",
        metavar="[fail|allow]",
        help="Rows that only the baseline or only this answer has, or another model: fail, or "
        "allow them. [default: fail]",
        rich_help_panel=CHECK_PANEL,
    ),
]
AnnotateOption = Annotated[
    str | None,
    typer.Option(
        "--annotate",
        metavar="FILE",
        help="Write GitHub's annotations of what turned, at this file of the repository, to stderr.",
        rich_help_panel=CHECK_PANEL,
    ),
]
RowFormatOption = Annotated[
    RowFormat,
    typer.Option(
        "--format",
        metavar="FORMAT",
        case_sensitive=False,
        help="table, json, jsonl, csv or markdown.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
AllowOption = Annotated[
    str | None,
    axis_option(
        "--allow",
        "What may be given up to make it fit, the least of it first: 8bit (the optimizer's states), "
        "lora, qlora.",
        "NAMES",
        TRAINING_PANEL,
    ),
]
EmitOption = Annotated[
    str | None,
    typer.Option(
        "--emit",
        metavar="KIND",
        help="Write the setup for deepspeed, accelerate, training-args, axolotl, trl-sft, llama-factory, torchtune, torchtitan, megatron or deepspeed+megatron, or its job for slurm, kubernetes, kueue, skypilot or ray instead.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help="Where --emit writes; TrainingArguments become YAML in a .yaml file, torchtitan's flags TOML in a .toml file.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]


JobsOption = Annotated[
    int,
    typer.Option(
        "--jobs",
        metavar="N",
        min=0,
        help="Processes to spread the work over; 0: one for each core. The answer is the same.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
