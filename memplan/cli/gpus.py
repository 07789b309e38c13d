"""``memplan gpus``."""

from typing import Annotated

import typer

from memplan.cli.options import FormatOption, OutputFormat, complete_gpus
from memplan.cli.terminal import say


def gpus(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="An id, a short name (h100), a device name as torch prints it, or a YAML file.",
            show_default=False,
            autocompletion=complete_gpus,
        ),
    ] = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """List the GPU catalog, or show one GPU with its sources."""
    from memplan.report.gpus import gpus_csv, gpus_json, gpus_markdown, print_gpu, print_gpus
    from memplan.sources.catalog import all_gpus
    from memplan.sources.gpus import load_gpus

    shown = all_gpus() if name is None else load_gpus(name)
    if output_format is OutputFormat.TABLE:
        from memplan.report.console import TerminalConsole

        console = TerminalConsole()
        print_gpus(console, shown) if name is None else print_gpu(console, shown[0])
        return
    writers = {"json": gpus_json, "csv": gpus_csv, "markdown": gpus_markdown}
    say(writers[output_format.value](shown))
