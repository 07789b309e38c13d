"""What is typed and plays no part is refused, never passed over."""

from collections.abc import Collection, Sequence
from typing import Any

from memplan.errors import UsageError


def given_options(ctx: Any) -> dict[str, str]:
    """Parameters given on the command line: name -> as it is typed."""
    found = {}
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name)
        if source is not None and source.name == "COMMANDLINE":
            is_argument = param.param_type_name == "argument"
            found[param.name] = param.metavar if is_argument else param.opts[0]
    return found


def said_options(ctx: Any) -> set[str]:
    """The same, and those that the user's own configuration has a value of."""
    sources = {param.name: ctx.get_parameter_source(param.name) for param in ctx.command.params}
    said = ("COMMANDLINE", "DEFAULT_MAP")
    return {name for name, each in sources.items() if each is not None and each.name in said}


def refuse_unused(ctx: Any, option: str, used: Collection[str]) -> None:
    """Raise ``UsageError`` for what was given and ``option`` makes no use of.

    ``used`` are the names of the command's parameters that play a part beside it.
    """
    refuse(option, [text for name, text in given_options(ctx).items() if name not in used])


def refuse_without(ctx: Any, names: Collection[str], needed: str) -> None:
    """Raise ``UsageError`` where one of these was given, which mean nothing without another."""
    idle = [text for name, text in given_options(ctx).items() if name in names]
    if idle:
        msg = f"{' and '.join(idle)}: means nothing without {needed}: add that, or leave it out"
        raise UsageError(msg)


def refuse(option: str, unused: Sequence[str]) -> None:
    """Raise ``UsageError`` for what an option makes no use of."""
    if unused:
        msg = f"{option} makes no use of {' and '.join(unused)}: leave it out, or run twice"
        raise UsageError(msg)


def refuse_repeated(command: Any, ctx: Any, args: Sequence[str]) -> None:
    """Raise ``UsageError`` for an option that takes one value and is given twice."""
    _, _, order = command.make_parser(ctx).parse_args(args=list(args))
    for position, param in enumerate(order):
        is_option = param.param_type_name == "option"
        if is_option and not param.multiple and param in order[:position]:
            msg = f"{param.opts[0]} is given twice, and takes one value: which is meant?"
            raise UsageError(msg)
