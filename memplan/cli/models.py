"""``memplan models``."""

from typing import Annotated

import typer

from memplan.cli.options import (
    FamilyOption,
    FormatOption,
    NumLabelsOption,
    OutputFormat,
    RevisionOption,
    TaskOption,
    TokenOption,
)


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A built-in name, a Hugging Face id, a config.json or its folder, a YAML spec.",
            show_default=False,
        ),
    ] = None,
    task: TaskOption = None,
    family: FamilyOption = None,
    num_labels: NumLabelsOption = None,
    revision: RevisionOption = None,
    token: TokenOption = None,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """List the built-in models, or show where one model's parameters are."""
    if name is None:
        _list(output_format)
        return
    from memplan.graph.counts import count_parameters
    from memplan.report.models import model_rows, print_model, write_rows
    from memplan.sources.models import load_model

    spec = load_model(
        name, task, family=family, num_labels=num_labels, revision=revision, token=token
    )
    counts = count_parameters(spec)
    if output_format is OutputFormat.TABLE:
        from rich.console import Console

        print_model(Console(highlight=False), spec, counts)
        return
    typer.echo(write_rows(model_rows(spec, counts), output_format.value))


def _list(output_format: OutputFormat) -> None:
    from memplan.report.models import CatalogRow, catalog_rows, print_catalog, write_rows
    from memplan.sources.registry import builtin_names, find_builtin

    found = [model for name in builtin_names() if (model := find_builtin(name)) is not None]
    rows = [
        CatalogRow(name=model.name, family=model.family, hub_id=model.hub_id, aliases=model.aliases)
        for model in found
    ]
    if output_format is OutputFormat.TABLE:
        from rich.console import Console

        print_catalog(Console(highlight=False), rows)
        return
    typer.echo(write_rows(catalog_rows(rows), output_format.value))
