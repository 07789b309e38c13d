"""``memplan gpus``."""

from memplan.cli.output.terminal import say
from memplan.cli.taking import NO_VALUES, Argument, takes
from memplan.errors import GpuNotFoundError
from memplan.options.rows.shared import FORMAT, OutputFormat
from memplan.options.table import Values
from memplan.units import is_size

ARGUMENT = Argument(
    parameter="name",
    metavar="NAME",
    help_text="An id, a short name (h100), a device name as torch prints it, or a YAML file; or "
    "which are listed: a part of ids (rtx), or 48GB for those with as much or more.",
    completes="gpus",
    kind=str | None,
)


@takes(FORMAT, argument=ARGUMENT)
def gpus(
    name: str | None = None,
    values: Values = NO_VALUES,
) -> None:
    """List the GPU catalog, or show one GPU with its sources."""
    from memplan.report.lookups.gpus import (
        gpus_csv,
        gpus_json,
        gpus_markdown,
        print_gpu,
        print_gpus,
    )
    from memplan.sources.cards.catalog import all_gpus, gpus_like
    from memplan.sources.gpus import load_gpus

    listed = all_gpus() if name is None else gpus_like(name)
    if name is not None and not listed and is_size(name):
        msg = f"no card that is listed has {name} or more: `memplan gpus` lists what they have"
        raise GpuNotFoundError(msg)
    shown = listed or load_gpus(name or "")
    output_format = values["format"]
    if output_format is OutputFormat.TABLE:
        from memplan.report.terminal.console import TerminalConsole

        console = TerminalConsole()
        print_gpus(console, shown, of=name or "") if listed else print_gpu(console, shown[0])
        return
    writers = {"json": gpus_json, "csv": gpus_csv, "markdown": gpus_markdown}
    say(writers[output_format.value](shown))
