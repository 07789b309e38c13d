"""Options that several commands share: one spelling, one help text, one group in the help.

Every one has a ``metavar``, so that the help reads the same under every version of Typer.
"""

from enum import StrEnum
from typing import Annotated

import typer

from memplan.options.panels import HARDWARE_PANEL, MODEL_PANEL, OUTPUT_PANEL


class OutputFormat(StrEnum):
    """How an answer is written."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"


MODEL_HELP = (
    "A built-in name (t5-3b), a Hugging Face id or page, a config.json or its folder, or a YAML "
    "spec."
)


def complete_models(incomplete: str) -> list[str]:
    """For a shell: the built-in names, or files, that begin so."""
    from memplan.cli.completion import model_names

    return model_names(incomplete)


def complete_gpus(incomplete: str) -> list[str]:
    """For a shell: the GPUs that begin so, after the last comma."""
    from memplan.cli.completion import gpu_words

    return gpu_words(incomplete)


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=MODEL_HELP,
        show_default=False,
        autocompletion=complete_models,
    ),
]
OptionalModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=MODEL_HELP,
        show_default=False,
        autocompletion=complete_models,
    ),
]
FamilyOption = Annotated[
    str | None,
    typer.Option(
        "--family",
        metavar="NAME",
        help="Read the config as this family's, when its own is not known.",
        rich_help_panel=MODEL_PANEL,
    ),
]
AllowGuessOption = Annotated[
    bool,
    typer.Option(
        "--allow-guess",
        help="Read a type that is not known as the one its keys are most like.",
        rich_help_panel=MODEL_PANEL,
    ),
]
AllowUnknownKeysOption = Annotated[
    bool,
    typer.Option(
        "--allow-unknown-keys",
        help="Read a config on where one of its keys seems to be misspelt, and say so.",
        rich_help_panel=MODEL_PANEL,
    ),
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="NAME",
        help="base, causal-lm, seq2seq-lm, masked-lm, sequence-classification, ...; "
        "by default what the config's architectures say.",
        rich_help_panel=MODEL_PANEL,
    ),
]
NumLabelsOption = Annotated[
    int | None,
    typer.Option(
        "--num-labels",
        metavar="N",
        min=1,
        help="Labels of a classification task.",
        rich_help_panel=MODEL_PANEL,
    ),
]
RevisionOption = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="REF",
        help="Branch, tag or commit of a Hugging Face model.",
        rich_help_panel=MODEL_PANEL,
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="Hugging Face token; by default the one you logged in with.",
        rich_help_panel=MODEL_PANEL,
    ),
]
GpuOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        metavar="NAMES",
        help="GPUs to judge by, as `memplan gpus` lists them, 46GiB, local (those here), or a YAML file: a100,h100. "
        "[default: v100-32gb, a100-80gb, h100-80gb]",
        rich_help_panel=HARDWARE_PANEL,
        show_default=False,
        autocompletion=complete_gpus,
    ),
]
GpuMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory",
        metavar="SIZE",
        help="Usable memory of a card that is not listed, such as 46GiB.",
        rich_help_panel=HARDWARE_PANEL,
    ),
]
CpuMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--cpu-memory",
        "--host-ram",
        metavar="SIZE",
        help="CPU RAM of one node, such as 512GiB: judged too. [default of plans and hints: that of a "
        "usual node of the card]",
        rich_help_panel=HARDWARE_PANEL,
    ),
]
NumGpusOption = Annotated[
    int,
    typer.Option(
        "--gpus",
        metavar="N",
        min=1,
        help="GPUs in all, over all nodes.",
        rich_help_panel=HARDWARE_PANEL,
    ),
]
NumNodesOption = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        metavar="N",
        min=1,
        help="Nodes that the GPUs are divided over. [default: one per 8 GPUs]",
        rich_help_panel=HARDWARE_PANEL,
        show_default=False,
    ),
]
FormatOption = Annotated[
    OutputFormat,
    typer.Option(
        "--format",
        metavar="FORMAT",
        case_sensitive=False,
        help="table, json, csv or markdown.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
LegendOption = Annotated[
    bool,
    typer.Option(
        "--legend",
        help="Explain every word below the answer.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
AssumptionsOption = Annotated[
    bool,
    typer.Option(
        "--assumptions",
        help="List everything that was assumed, not only what fits into three lines.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
