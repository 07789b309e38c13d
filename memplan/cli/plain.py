"""A command line that is as it should be, read without Typer.

Importing Typer takes a quarter of what one answer takes. What is asked of it here is little: to find options' values
among words. Whatever is not plain (help, an unknown option, a bad value, defaults of the user's own) is left to it, so
that there is one place that says what is wrong; ``tests/cli/test_plain.py`` holds the two against each other.
"""

from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from typing import Any, get_args, get_origin

from memplan.cli.commands import COMMANDS
from memplan.cli.taking import Argument, Command
from memplan.cli.words.coercion import reader_of
from memplan.cli.words.machine_defaults import may_be_configured
from memplan.cli.words.typed_words import own_command_line
from memplan.fast_dataclass import dataclass
from memplan.options.table import Option


class Source(Enum):
    """Where a value comes from, by Typer's names."""

    COMMANDLINE = "typed"
    DEFAULT = "default"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parameter:
    """An option or an argument, with the names that Typer's parameters have."""

    row: Option | Argument
    name: str
    opts: tuple[str, ...]
    secondary_opts: tuple[str, ...] = ()
    metavar: str | None
    is_flag: bool = False
    multiple: bool = False

    @property
    def param_type_name(self) -> str:
        """Which of the two it is."""
        return "option" if isinstance(self.row, Option) else "argument"


def parameters_of(command: Command) -> list[Parameter]:
    """A command's parameters, its argument first."""
    words = [] if command.argument is None else [_word(command.argument)]
    return [*words, *map(_option, command.options)]


def _word(argument: Argument) -> Parameter:
    name = argument.parameter
    return Parameter(row=argument, name=name, opts=(name,), metavar=argument.metavar)


def _option(option: Option) -> Parameter:
    yes, _, no = option.flag.partition("/")
    return Parameter(
        row=option,
        name=option.parameter,
        opts=(yes, *option.also),
        secondary_opts=(no,) if no else (),
        metavar=option.metavar,
        is_flag=option.parser is None and option.kind in (bool, bool | None),
        multiple=_is_list(option.kind),
    )


def _is_list(kind: Any) -> bool:
    return any(get_origin(each) is list for each in (kind, *get_args(kind)))


class PlainContext:
    """A command line that was read: what commands ask of a context of Typer's."""

    parent = None

    def __init__(self, name: str, command: Command) -> None:
        self.info_name = name
        self.called = command
        self.command = _Asked(name, parameters_of(command))
        self.params: dict[str, Any] = {}
        self.typed: dict[str, Any] = {}

    def get_parameter_source(self, name: str) -> Source:
        """Where a parameter's value comes from."""
        return Source.COMMANDLINE if name in self.typed else Source.DEFAULT

    def run(self) -> int:
        """Run the command, and return its exit code."""
        # A command is handed a list, and None where nobody gave one.
        many = {each.name for each in self.command.params if _is_list(each.row.kind)}
        found = {
            name: (list(value) or None) if name in many else value
            for name, value in self.params.items()
        }
        return self.called.run(self, found)


class _Asked:
    """What is asked of the command itself."""

    def __init__(self, name: str, params: list[Parameter]) -> None:
        self.name = name
        self.params = params

    def make_context(self, info_name: str, words: list[str], parent: Any = None) -> Any:
        """What else is typed as one, in an option's value, is Typer's to read."""
        from memplan.cli.with_typer.app import load_command

        return load_command(self.name).make_context(info_name, words, parent=parent)


class _NotPlainError(Exception):
    """Something is for Typer to read, or to refuse."""


def read(arguments: Sequence[str]) -> PlainContext | None:
    """The command line, where it is plain; None: Typer reads it, or says what is wrong with it."""
    if not arguments or arguments[0] not in COMMANDS or may_be_configured():
        return None
    name, *words = arguments
    if {"--help", "-h", "--"}.intersection(words) or words == ["--legend"]:
        return None
    command: Command = getattr(import_module(f"memplan.cli.{name}"), name)
    context = PlainContext(name, command)
    params = context.command.params
    try:
        context.typed = _typed(params, own_command_line(params, words))
        context.params = {
            each.name: _value(each, context.typed)
            for each in sorted(params, key=_as_processed(context.typed))
        }
    except (_NotPlainError, ValueError):
        return None
    return context


def _typed(params: Sequence[Parameter], words: Sequence[str]) -> dict[str, Any]:
    """What was typed, option by option and then the argument, as text; of a flag, whether it is set."""
    known = {name: each for each in params for name in (*each.opts, *each.secondary_opts)}
    found: dict[str, Any] = {}
    alone = []
    left = iter(words)
    for word in left:
        if word == "-" or not word.startswith("-"):
            alone.append(word)
            continue
        name, equals, value = word.partition("=")
        param = known.get(name)
        if (
            param is None
            or (param.is_flag and equals)
            or (param.name in found and not param.multiple)
        ):
            raise _NotPlainError
        if param.is_flag:
            found[param.name] = name in param.opts
            continue
        text = value if equals else next(left, "-")
        if not equals and text.startswith("-"):
            raise _NotPlainError
        found[param.name] = (*found.get(param.name, ()), text) if param.multiple else text
    return found | _alone(params, alone)


def _alone(params: Sequence[Parameter], words: list[str]) -> dict[str, Any]:
    """The words that no option takes, which are the argument's."""
    argument = next((each.row for each in params if isinstance(each.row, Argument)), None)
    if argument is None or _is_list(argument.kind):
        most = 0 if argument is None else len(words)
    else:
        most = 1
    if len(words) > most or (not words and argument is not None and argument.is_required):
        raise _NotPlainError
    if not words or argument is None:
        return {}
    return {argument.parameter: tuple(words) if _is_list(argument.kind) else words[0]}


def _as_processed(typed: dict[str, Any]) -> Any:
    """The order in which Typer takes parameters: as they were typed, arguments behind; and then the rest."""
    order = {name: number for number, name in enumerate(typed)}

    def place(param: Parameter) -> int:
        behind = len(order) if param.param_type_name == "argument" else len(order) + 1
        return order.get(param.name, behind)

    return place


def _value(param: Parameter, typed: dict[str, Any]) -> Any:
    """A parameter's value, as its command is promised it."""
    row = param.row
    default = row.default if isinstance(row, Option) else None
    given = typed.get(param.name, default)
    many = _is_list(row.kind)
    if given is None:
        return () if many else None
    if isinstance(row, Argument):
        return given
    read_one = reader_of(row.kind, parser=row.parser, minimum=row.minimum, maximum=row.maximum)
    if read_one is None:
        raise _NotPlainError
    return tuple(read_one(each) for each in given) if many else read_one(given)
