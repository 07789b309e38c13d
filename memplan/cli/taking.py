"""Commands that take options: rows of ``memplan.options``, made into Typer's parameters.

A command declares its arguments itself; its options are handed over in its parameter ``values``, by name.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from memplan.options.table import Option, Values

NO_VALUES: Values = {}
"""What stands for the options in a command's signature."""
Command = Callable[..., None]


def complete_models(incomplete: str) -> list[str]:
    """For a shell: the built-in names, or files, that begin so."""
    from memplan.cli.completion import model_names

    return model_names(incomplete)


def complete_gpus(incomplete: str) -> list[str]:
    """For a shell: the GPUs that begin so, after the last comma."""
    from memplan.cli.completion import gpu_words

    return gpu_words(incomplete)


_COMPLETIONS = {"models": complete_models, "gpus": complete_gpus}
MODEL_HELP = (
    "A built-in name (t5-3b), a Hugging Face id or page, a config.json or its folder, or a YAML "
    "spec."
)
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


def takes(*options: Option) -> Callable[[Command], Command]:
    """Give a command these options, in the order of its help."""

    def with_options(command: Command) -> Command:
        own = inspect.signature(command).parameters.values()
        kept = [each for each in own if each.name != "values"]

        @wraps(command)
        def taking(**found: Any) -> None:
            values = {option.parameter: found.pop(option.parameter) for option in options}
            command(**found, values=values)

        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in kept]
        taking.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*parameters, *map(_parameter, options)]
        )
        return taking

    return with_options


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
