"""What was typed, by the options' Python names."""

from typing import Any

from memplan.options.asked import Asked


def asked_of(ctx: Any) -> Asked:
    """Every option of the command that runs, and which of them were typed."""
    from memplan.cli.unused import given_options

    # Typer keeps an empty tuple for a list that nobody gave, and hands over None.
    values = {name: None if value == () else value for name, value in ctx.params.items()}
    return Asked(values=values, given=frozenset(given_options(ctx)))
