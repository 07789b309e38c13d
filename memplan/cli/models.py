"""``memplan models``."""

from typing import Annotated

import typer

from memplan.cli.options import (
    AllowGuessOption,
    AllowUnknownKeysOption,
    FamilyOption,
    FormatOption,
    NumLabelsOption,
    OutputFormat,
    RevisionOption,
    TaskOption,
    TokenOption,
)
from memplan.cli.terminal import say


def models(
    ctx: typer.Context,
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
    allow_guess: AllowGuessOption = False,
    allow_unknown_keys: AllowUnknownKeysOption = False,
    num_labels: NumLabelsOption = None,
    revision: RevisionOption = None,
    token: TokenOption = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show one model's modules, equal layers once.")
    ] = False,
    output_format: FormatOption = OutputFormat.TABLE,
) -> None:
    """List the built-in models, or show where one model's parameters are."""
    from memplan.cli.unused import refuse, refuse_without

    if name is None:
        refuse_without(ctx, ctx.params.keys() - {"output_format"}, "a MODEL")
        _list(output_format)
        return
    if tree and output_format in (OutputFormat.CSV, OutputFormat.MARKDOWN):
        refuse(f"--format {output_format.value}", ["--tree"])
    from memplan.graph.counts import count_parameters
    from memplan.report.models import model_rows, print_model, print_tree, write_rows
    from memplan.sources.models import load_model

    spec = load_model(
        name,
        task,
        family=family,
        num_labels=num_labels,
        revision=revision,
        token=token,
        allow_guess=allow_guess,
        allow_unknown_keys=allow_unknown_keys,
    )
    counts = count_parameters(spec)
    rows = model_rows(spec, counts)
    if tree or output_format is OutputFormat.JSON:
        from memplan.graph.model import record_model
        from memplan.graph.module_tree import module_tree
        from memplan.graph.options import TapeOptions

        root = module_tree(record_model(spec, TapeOptions()), spec.name)
        if output_format is OutputFormat.JSON:
            rows[0]["tree"] = root.to_dict()
        if tree and output_format is OutputFormat.TABLE:
            from memplan.report.console import TerminalConsole

            print_tree(TerminalConsole(), root)
            return
    if output_format is OutputFormat.TABLE:
        from memplan.report.console import TerminalConsole

        print_model(TerminalConsole(), spec, counts)
        return
    say(write_rows(rows, output_format.value))


def _list(output_format: OutputFormat) -> None:
    from memplan.report.models import CatalogRow, catalog_rows, print_catalog, write_rows
    from memplan.sources.registry import builtin_names, find_builtin

    found = [model for name in builtin_names() if (model := find_builtin(name)) is not None]
    rows = [
        CatalogRow(name=model.name, family=model.family, hub_id=model.hub_id, aliases=model.aliases)
        for model in found
    ]
    if output_format is OutputFormat.TABLE:
        from memplan.report.console import TerminalConsole

        print_catalog(TerminalConsole(), rows)
        return
    say(write_rows(catalog_rows(rows), output_format.value))
