"""Options that have several values, and shares."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memplan.search.planning.concessions import Concession


def parse_share(text: str, *, option: str) -> float:
    """Read ``5%`` or ``0.05``.

    Raises ``UsageError`` for anything else, and for 5: five what?

    >>> parse_share("5%", option="--headroom"), parse_share("0.05", option="--headroom")
    (0.05, 0.05)
    """
    from memplan.errors import UsageError

    number, percent, rest = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if rest or not 0 <= share < 1:
        msg = f"{option}: {text!r} is not a share below 1: write 5% or 0.05"
        raise UsageError(msg)
    return share


def read_axes(options: Mapping[str, tuple[str, str | None]]) -> dict[str, object]:
    """The axes that were asked for: field -> (the option's name, its text)."""
    from memplan.sources.sweep_file import read_axis

    return {
        field: read_axis(field, text, option=option)
        for field, (option, text) in options.items()
        if text is not None
    }


def read_concessions(text: str | None) -> "tuple[Concession, ...]":
    """What ``--allow`` names.

    >>> [each.value for each in read_concessions("lora,qlora")]
    ['lora', 'qlora']
    """
    from memplan.search.planning.concessions import Concession
    from memplan.training.coercion import coerce_enum

    parts = [part.strip() for part in text.split(",")] if text else []
    return tuple(coerce_enum("allow", each, Concession) for each in parts)
