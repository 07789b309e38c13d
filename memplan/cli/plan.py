"""``memplan plan``."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli.options import (
    FamilyOption,
    GpuMemoryOption,
    ModelArgument,
    NumLabelsOption,
    RevisionOption,
    TaskOption,
    TokenOption,
)
from memplan.cli.sweep_options import (
    AttentionAxis,
    CheckpointingAxis,
    EmitOption,
    EngineAxis,
    FreezeAxis,
    GlobalBatchOption,
    GpuNames,
    GpusAxis,
    KernelsAxis,
    LossAxis,
    OptimizerAxis,
    OutputOption,
    PrecisionAxis,
    RowFormat,
    RowFormatOption,
    SetupOption,
    TrainingArgsOption,
    axis_option,
    base_setup,
    named_gpus,
    parse_share,
)

if TYPE_CHECKING:
    from memplan.search.planner import Goal, Plan
    from memplan.training.setup import TrainingSetup

PLAN_PANEL = "Goal"


def plan(
    model: ModelArgument,
    num_gpus: GpusAxis = None,
    gpu: GpuNames = None,
    gpu_memory: GpuMemoryOption = None,
    objective: Annotated[
        str,
        axis_option("--objective", "What comes first: speed, gpus or batch.", "WHAT", PLAN_PANEL),
    ] = "speed",
    headroom: Annotated[
        str,
        axis_option("--headroom", "Memory to keep free besides, such as 5%.", "SHARE", PLAN_PANEL),
    ] = "0%",
    limit: Annotated[
        int,
        typer.Option(
            "--limit", metavar="N", min=1, help="Setups to show.", rich_help_panel=PLAN_PANEL
        ),
    ] = 10,
    global_batch_size: GlobalBatchOption = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            metavar="N",
            min=1,
            help="Tokens of a sequence. [default: the context, at most 2048]",
            rich_help_panel=PLAN_PANEL,
            show_default=False,
        ),
    ] = None,
    engine: EngineAxis = None,
    precision: PrecisionAxis = None,
    checkpointing: CheckpointingAxis = None,
    optimizer: OptimizerAxis = None,
    kernels: KernelsAxis = None,
    attention: AttentionAxis = None,
    loss: LossAxis = None,
    freeze: FreezeAxis = None,
    setup: SetupOption = None,
    training_args: TrainingArgsOption = None,
    task: TaskOption = None,
    family: FamilyOption = None,
    num_labels: NumLabelsOption = None,
    revision: RevisionOption = None,
    token: TokenOption = None,
    output_format: RowFormatOption = RowFormat.TABLE,
    emit: EmitOption = None,
    output: OutputOption = None,
) -> None:
    """Search for the setups that fit, best first, and what would make the rest fit."""
    from memplan.search.planner import Goal, Objective
    from memplan.search.planner import plan as make_plan
    from memplan.search.ranges import parse_range
    from memplan.sources.models import load_model
    from memplan.training.setup import coerce_enum

    changes = {
        "seq_len": seq_len, "optimizer": optimizer, "kernels": kernels, "attention": attention,
        "loss": loss, "freeze": freeze,
    }  # fmt: skip
    base = _laid_over(base_setup(setup, training_args), changes)
    goal = Goal(
        num_gpus=_counts(num_gpus, base),
        global_batch_size=global_batch_size,
        headroom=parse_share(headroom, option="--headroom"),
        objective=coerce_enum("objective", objective, Objective),
        base=base,
        engines=_choices("engine", engine),
        precisions=_choices("precision", precision),
        checkpointing=_choices("checkpointing", checkpointing),
        limit=limit,
    )
