"""The ``memplan`` command as Typer has it: help, completion, and what is wrong with a command line."""

import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from memplan.cli.commands import ABOUT, COMMANDS, COMPLETION_VARIABLE, MOST_COLUMNS, TOP_OPTIONS
from memplan.cli.output import terminal
from memplan.cli.taking import Command
from memplan.cli.with_typer.parameters import function_of
from memplan.cli.words.coercion import read_plainly
from memplan.cli.words.machine_defaults import machine_defaults
from memplan.cli.words.typed_words import own_command_line
from memplan.errors import ExitCode, did_you_mean

_TyperUsageError: type[Any] = typer.BadParameter.__mro__[1]
# Typer exports BadParameter but not its base, which every mistake on the command line derives from.

HELP_TOPIC = "memplan.help"
"""Where a context keeps which part of the help is asked for."""
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": MOST_COLUMNS}


class MemplanCommand(TyperCommand):
    """A command whose help keeps the options in groups (their ``rich_help_panel``)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line without pydantic."""
        from memplan.cli.words.unused import refuse_repeated

        if args == ["--legend"] and "--legend" in {each.opts[0] for each in self.params}:
            terminal.say_legend(True, is_table=True)
            raise typer.Exit
        read_plainly(self.get_params(ctx))
        args = own_command_line(self.params, self._without_topic(ctx, args))
        if len(args) > 1:
            refuse_repeated(self, ctx, args)
        ctx.default_map = machine_defaults(self, args)
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line; some versions of Typer put braces round MODEL."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def _without_topic(self, ctx: Any, args: list[str]) -> list[str]:
        """The command line without the topic that help is asked for, which is kept."""
        if not {"--help", "-h"}.intersection(args):
            return args
        from memplan.cli.with_typer.help_pages import EVERYTHING, help_topic, topics_of

        rest, topic = help_topic(args, (*topics_of(self.params), EVERYTHING))
        ctx.meta[HELP_TOPIC] = topic
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options that most people use; or those of the topic asked for."""
        from memplan.cli.with_typer.help_pages import (
            COMMON,
            EVERYTHING,
            topics_of,
            write_first_page,
            write_rows,
        )

        topic, params = ctx.meta.get(HELP_TOPIC, ""), self.get_params(ctx)
        arguments = [each for each in params if each.param_type_name == "argument"]
        is_short = not topic and self.name in COMMON
        if is_short:
            params = arguments
        elif topic and topic != EVERYTHING:
            params = topics_of(params)[topic]
        for title, rows in _grouped(params, ctx).items():
            with formatter.section(title):
                write_rows(formatter, rows)
        if is_short and self.name is not None:
            write_first_page(formatter, self.name, topics_of(self.params))


WORDS = ("help", "version", "legend")
"""Options that people type as if they were commands."""


class MemplanGroup(TyperGroup):
    """The top command: imports a subcommand's module when it runs, not when it is listed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before the command without pydantic."""
        read_plainly(self.get_params(ctx))
        if args and args[0] in WORDS:
            args = [*args[1:2], f"--{args[0]}", *args[2:]]
        if args and args[0].startswith("-"):
            args = own_command_line(self.params, args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the commands' names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Import and build one command; None when there is no such command."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Find the command, or refuse it with the nearest name."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], tuple(COMMANDS)) or f" There are: {', '.join(COMMANDS)}"
            ctx.fail(f"there is no command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the list of commands without importing any."""
        from memplan.cli.with_typer.help_pages import write_rows

        with formatter.section("Commands"):
            write_rows(formatter, list(COMMANDS.items()))


def load_command(name: str) -> Any:
    """Import the module of one command and build the command."""
    return _built(name, getattr(import_module(f"memplan.cli.{name}"), name))


@cache
def _built(name: str, command: Command) -> Any:
    """The command, built once: what is said of an error asks for it again."""
    app = _typer_app()
    app.command(name, cls=MemplanCommand, context_settings=_SETTINGS)(function_of(command))
    return typer.main.get_command(app)


def _typer_app() -> typer.Typer:
    """Return an empty app: plain help needs no import of rich, and errors are ours to print."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _grouped(params: Sequence[Any], ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Return each group's rows: a parameter's name and its help."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        name, text = param.get_help_record(ctx) or ("", "")
        if not name:
            continue
        title = getattr(param, "rich_help_panel", None) or "Options"
        if param.param_type_name == "argument":
            name, title = param.metavar or param.name.upper(), "Arguments"
        groups.setdefault(title, []).append((name, text))
    return groups


def _install_completion(shell: str | None) -> None:
    if shell is not None:
        from memplan.cli.with_typer.completion import install

        typer.echo(install(shell))
        raise typer.Exit


def _legend(is_asked: bool) -> None:
    if is_asked:
        terminal.say_legend(True, is_table=True)
        raise typer.Exit


def _show_completion(shell: str | None) -> None:
    if shell is not None:
        from memplan.cli.with_typer.completion import script

        typer.echo(script(shell))
        raise typer.Exit


_SHELL = " [SHELL]"


def _own(flag: str, *, value: str = "", callback: Any = None) -> Any:
    """One of the top command's options."""
    told = TOP_OPTIONS[f"{flag}{value}"]
    return typer.Option(
        flag,
        metavar=value.strip() or None,
        callback=callback,
        is_eager=callback is not None,
        help=told,
    )


def top(
    ctx: typer.Context,
    version: Annotated[bool, _own("--version")] = False,
    verbose: Annotated[bool, _own("--verbose")] = False,
    legend: Annotated[bool, _own("--legend", callback=_legend)] = False,
    install_completion: Annotated[
        str | None, _own("--install-completion", value=_SHELL, callback=_install_completion)
    ] = None,
    show_completion: Annotated[
        str | None, _own("--show-completion", value=_SHELL, callback=_show_completion)
    ] = None,
) -> None:
    """See ``ABOUT``."""
    if verbose and not version:
        ctx.fail("--verbose means nothing without --version")
    if version:
        from memplan.cli.versions import version_text

        typer.echo(version_text(verbose=verbose))
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def build() -> Any:
    """Build the top command."""
    app = _typer_app()
    app.callback(
        cls=MemplanGroup, help=ABOUT, context_settings=_SETTINGS, invoke_without_command=True
    )(top)
    return typer.main.get_command(app)


def answer(arguments: Sequence[str]) -> int:
    """Run ``memplan`` with these arguments and return the exit code; a mistake on the command line is told."""
    if COMPLETION_VARIABLE in os.environ:
        from memplan.cli.with_typer.completion import prepare

        prepare()
    try:
        return build().main(list(arguments), prog_name="memplan", standalone_mode=False) or 0
    except _TyperUsageError as error:
        return terminal.fail(_usage_message(error, arguments), code=ExitCode.USAGE)


def _usage_message(error: Any, arguments: Sequence[str]) -> str:
    """Say in one line what was wrong with the command line, and where to look."""
    message = error.format_message().rstrip(".")
    if hasattr(error, "possibilities"):
        from memplan.options.other_names import other_name

        known = tuple(name for param in error.ctx.command.params for name in param.opts)
        told = other_name(error.option_name, known)
        hint = f" {told[:1].upper()}{told[1:]}." if told else did_you_mean(error.option_name, known)
        message = f"there is no option {error.option_name}.{hint}"
    message = _left_over(arguments) or message
    command = "".join(f" {name}" for name in arguments[:1] if name in COMMANDS)
    return f"{message}{'' if message[-1] in '.?' else '.'} Try 'memplan{command} --help'."


def _left_over(arguments: Sequence[str]) -> str:
    """What to say of a value behind an option that takes none, where its name has one elsewhere."""
    from memplan.options.other_names import VALUED_ELSEWHERE

    for option, word in pairwise(arguments):
        if option in VALUED_ELSEWHERE and not word.startswith("-"):
            return f"{option} takes no value: {word} is {VALUED_ELSEWHERE[option]}"
    return ""
