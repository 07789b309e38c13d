"""``memplan models``."""

from typing import TYPE_CHECKING

from memplan.cli.output.terminal import say
from memplan.cli.taking import NO_VALUES, Argument, Context, takes
from memplan.options.rows.shared import FORMAT, MODEL, OutputFormat
from memplan.options.table import Option, Values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.model.spec import ModelSpec
    from memplan.sources.about_models.registry import BuiltinModel

TREE = Option(
    flag="--tree", kind=bool, default=False, metavar=None, panel="",
    help_text="Show one model's modules, equal layers once.",
)  # fmt: skip
CHECKPOINT = Option(
    flag="--checkpoint", kind=str | None, metavar="SIZE|FILE", panel="",
    help_text="How many parameters a checkpoint has: 42.1GB, pytorch_model.bin, model.safetensors or "
    "its index.",
)  # fmt: skip


ARGUMENT = Argument(
    parameter="name",
    metavar="MODEL",
    help_text="A model as `memplan estimate` takes it, or a part of built-in names: qwen.",
    kind=str | None,
)


@takes(*MODEL, TREE, CHECKPOINT, FORMAT, argument=ARGUMENT)
def models(
    ctx: Context,
    name: str | None = None,
    values: Values = NO_VALUES,
) -> None:
    """List the built-in models, or show where one model's parameters are."""
    from memplan.cli.words.asked import asked_of
    from memplan.cli.words.unused import given_options, refuse, refuse_unused, refuse_without

    output_format = values["format"]
    if values["checkpoint"] is not None:
        refuse_unused(ctx, "--checkpoint", {"checkpoint", "format"})
        _show_checkpoint(values["checkpoint"], output_format)
        return
    if name is None:
        refuse_without(ctx, ctx.params.keys() - {"format"}, "a MODEL")
        _list(output_format)
        return
    if (found := _holding(name)) and not given_options(ctx).keys() - {"name", "format"}:
        _list_counted(found, output_format)
        return
    if values["tree"] and output_format in (OutputFormat.CSV, OutputFormat.MARKDOWN):
        refuse(f"--format {output_format.value}", ["--tree"])
    _show(asked_of(ctx).model(name), output_format, tree=values["tree"])


def _show(spec: "ModelSpec", output_format: OutputFormat, *, tree: bool) -> None:
    """Write where a model's parameters are, or its modules."""
    from memplan.graph.counts import count_parameters
    from memplan.report.lookups.models import model_rows, print_model, print_tree, write_rows

    counts = count_parameters(spec)
    rows = model_rows(spec, counts)
    if tree or output_format is OutputFormat.JSON:
        from memplan.graph.core.options import TapeOptions
        from memplan.graph.model import record_model
        from memplan.graph.module_tree import module_tree

        root = module_tree(record_model(spec, TapeOptions()), spec.name)
        if output_format is OutputFormat.JSON:
            rows[0]["tree"] = root.to_dict()
        if tree and output_format is OutputFormat.TABLE:
            from memplan.report.terminal.console import TerminalConsole

            print_tree(TerminalConsole(), root)
            return
    if output_format is OutputFormat.TABLE:
        from memplan.report.terminal.console import TerminalConsole

        print_model(TerminalConsole(), spec, counts)
        return
    say(write_rows(rows, output_format.value))


def _show_checkpoint(text: str, output_format: OutputFormat) -> None:
    """Write what a checkpoint's size or header says of its parameters."""
    from memplan.report.lookups.models import checkpoint_rows, print_checkpoint, write_rows
    from memplan.sources.about_models.checkpoint_file import read_checkpoint

    found = read_checkpoint(text)
    if output_format is OutputFormat.TABLE:
        from memplan.report.terminal.console import TerminalConsole

        print_checkpoint(TerminalConsole(), found)
        return
    say(write_rows(checkpoint_rows(found), output_format.value))


def _holding(text: str) -> "list[BuiltinModel]":
    """The built-in models with this in their name, family or hub id; none where it names a model."""
    from os.path import exists  # which takes names that no file can have

    from memplan.sources.about_models.registry import builtins_holding, find_builtin

    if "/" in text or find_builtin(text) is not None or exists(text):  # noqa: PTH110
        return []
    return builtins_holding(text)


def _list_counted(found: "Sequence[BuiltinModel]", output_format: OutputFormat) -> None:
    """Write those models with their sizes, which are counted one by one."""
    from memplan.report.lookups.models import print_sizes, size_rows, write_rows
    from memplan.sources.models import load_model

    rows = size_rows([(load_model(model.name), model.hub_id) for model in found])
    if output_format is OutputFormat.TABLE:
        from memplan.report.terminal.console import TerminalConsole

        print_sizes(TerminalConsole(), rows)
        return
    say(write_rows(rows, output_format.value))


def _list(output_format: OutputFormat) -> None:
    from memplan.report.lookups.models import CatalogRow, print_catalog, write_rows
    from memplan.sources.about_models.registry import builtin_models

    found = builtin_models()
    rows = [
        CatalogRow(name=model.name, family=model.family, hub_id=model.hub_id, aliases=model.aliases)
        for model in found
    ]
    if output_format is OutputFormat.TABLE:
        from memplan.report.terminal.console import TerminalConsole

        print_catalog(TerminalConsole(), rows)
        return
    say(write_rows([each.to_dict() for each in found], output_format.value))
