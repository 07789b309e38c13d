"""Commands that take the options of the training setup: as one value each, or as several.

The options themselves are rows of ``memplan.options.settings``.
"""

import inspect
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Annotated, Any

import typer

from memplan.fast_dataclass import replace
from memplan.options.largest import LEAST, or_max, read_whole
from memplan.options.run_times import TIME_OPTIONS
from memplan.options.settings import GROUPED_OPTIONS, SETTING_OPTIONS
from memplan.options.table import SettingOption, Values

NO_SETTINGS: Values = {}
"""Of a command that is called from Python."""


Command = Callable[..., None]


def takes_settings(*fields: str, finds_largest: bool = False) -> Callable[[Command], Command]:
    """Give a command every option as one value, or those of some fields alone.

    They are handed over in its parameter ``settings``; ``finds_largest``: some may be ``max``.
    """
    every = (*SETTING_OPTIONS, *GROUPED_OPTIONS)
    taken = [each for each in every if not fields or each.field in fields]
    if finds_largest:
        taken = [_or_max(each) for each in taken]
    return lambda command: with_options(command, taken)


def takes_setting_axes(*, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command every option that may have several values, as text, but those of some fields."""
    taken = [each for each in SETTING_OPTIONS if each.axis_help and each.field not in without]
    added = [*map(_axis, taken), *map(_single, GROUPED_OPTIONS)]
    return lambda command: _with_parameters(command, added, into="settings")


def takes_times(command: Command) -> Command:
    """Give a command the options of time, handed over in its parameter ``times``."""
    return with_options(command, TIME_OPTIONS, into="times")


def with_options(
    command: Command, options: Iterable[SettingOption], *, into: str = "settings"
) -> Command:
    """Give a command some options, handed over in one of its parameters."""
    return _with_parameters(command, map(_single, options), into=into)


def _or_max(option: SettingOption) -> SettingOption:
    """An option that takes ``max`` too, where its value can be looked for."""
    if option.parameter not in LEAST:
        return option
    return replace(
        option,
        metavar=f"{option.metavar}|max",
        parser=or_max(option.parser or read_whole),
        help_text=f"{option.help_text.rstrip('.')}; max: the largest that fits.",
    )


def _single(option: SettingOption) -> inspect.Parameter:
    info = typer.Option(
        option.flag,
        *option.also,
        metavar=option.metavar,
        help=option.help_text,
        rich_help_panel=option.panel,
        parser=option.parser,
        show_default=option.show_default,
    )
    return inspect.Parameter(
        option.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        default=option.default,
        annotation=Annotated[option.kind, info],
    )


def _axis(option: SettingOption) -> inspect.Parameter:
    info = typer.Option(
        option.flag,
        *option.also,
        metavar="LIST" if option.metavar == "N" else "NAMES",
        help=option.axis_help,
        rich_help_panel=option.panel,
        show_default=False,
    )
    return inspect.Parameter(
        option.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, info],
    )


def _with_parameters(command: Command, added: Iterable[inspect.Parameter], *, into: str) -> Command:
    """The command with parameters in the place of the one that then holds them."""
    found: list[inspect.Parameter] = []
    names: list[str] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name != into:
            found.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        for each in added:
            found.append(each)
            names.append(each.name)

    @wraps(command)
    def taking(**values: Any) -> None:
        values[into] = {name: values.pop(name) for name in names}
        command(**values)

    taking.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    return taking
