"""What was typed, by the options' Python names."""

from typing import TYPE_CHECKING, Any

from memplan.options.asked import Asked

if TYPE_CHECKING:
    from collections.abc import Mapping


def asked_of(ctx: Any) -> Asked:
    """Every option of the command that runs, and which of them were typed."""
    from memplan.cli.words.unused import said_options

    # Typer keeps an empty tuple for a list that nobody gave, and hands over None.
    values = {name: None if value == () else value for name, value in ctx.params.items()}
    asked = Asked(values=values, given=frozenset(said_options(ctx)))
    if not isinstance(values.get("engine"), str):
        return asked
    from memplan.options.plugged import with_engine_plugin

    return with_engine_plugin(asked, _read_options)


def _read_options(options: "Mapping[str, object]") -> Asked:
    from memplan.options.python import read_options  # which most commands do without

    return read_options(options)
