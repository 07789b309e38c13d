"""Commands made into functions with Typer's parameters."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from memplan.cli.taking import Argument, Command
from memplan.options.table import Option


def complete_models(incomplete: str) -> list[str]:
    """For a shell: the built-in names, or files, that begin so."""
    from memplan.cli.with_typer.completion import model_names

    return model_names(incomplete)


def complete_gpus(incomplete: str) -> list[str]:
    """For a shell: the GPUs that begin so, after the last comma."""
    from memplan.cli.with_typer.completion import gpu_words

    return gpu_words(incomplete)


_COMPLETIONS = {"models": complete_models, "gpus": complete_gpus}


def function_of(command: Command) -> Callable[..., int]:
    """The command as Typer takes one."""

    def taking(**found: Any) -> int:
        return command.run(found.pop("ctx", None), found)

    taking.__doc__ = command.body.__doc__
    taking.__signature__ = inspect.Signature(_parameters(command))  # type: ignore[attr-defined]
    return taking


def _parameters(command: Command) -> list[inspect.Parameter]:
    found = []
    if command.wants_context:
        kind = inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter("ctx", kind, annotation=typer.Context))
    if command.argument is not None:
        found.append(_word(command.argument))
    return [*found, *map(_parameter, command.options)]


def _word(argument: Argument) -> inspect.Parameter:
    info = typer.Argument(
        metavar=argument.metavar,
        help=argument.help_text,
        show_default=False,
        autocompletion=_COMPLETIONS.get(argument.completes),
    )
    return inspect.Parameter(
        argument.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if argument.is_required else None,
        annotation=Annotated[argument.kind, info],
    )


def _parameter(option: Option) -> inspect.Parameter:
    info = typer.Option(
        option.flag,
        *option.also,
        metavar=option.metavar,
        help=option.help_text,
        rich_help_panel=option.panel or None,
        parser=option.parser,
        show_default=option.show_default,
        min=option.minimum,
        max=option.maximum,
        autocompletion=_COMPLETIONS.get(option.completes),
    )
    return inspect.Parameter(
        option.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        default=option.default,
        annotation=Annotated[option.kind, info],
    )
