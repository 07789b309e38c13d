"""What users write for a member of an enum, read."""

from enum import Enum
from typing import TypeVar

from memplan.errors import SetupError, did_you_mean
from memplan.text import shown

_Kind = TypeVar("_Kind", bound=Enum)
MOST_LISTED = 12
"""Of the values that a message lists; docs/optimizers.md has the longer list."""


def coerce_enum(name: str, value: object, kind: type[_Kind]) -> _Kind:
    """The member with this value, or a ``SetupError`` that names those there are.

    >>> from memplan.training.precision import Engine
    >>> coerce_enum("engine", "fsdp", Engine).name
    'FSDP'
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, bool):
        try:
            return kind(value)
        except (ValueError, TypeError):  # the latter for what cannot be compared
            pass
    from memplan.training.meant import MEANT  # only for names that are not known

    known = [str(member.value) for member in kind]
    meant = MEANT.get(kind, {}).get(str(value).lower().replace("-", "_"))
    hint = f" Did you mean {meant}?" if meant else did_you_mean(str(value), known)
    listed = ", ".join(known)
    # Whoever comes near one is told that, anybody else what there is.
    if len(known) > MOST_LISTED and hint:
        listed = f"{len(known)} that there are ({', '.join(known[:MOST_LISTED])}, ...)"
    msg = f"{name}: {shown(value)} is not one of {listed}.{hint}"
    raise SetupError(msg)
