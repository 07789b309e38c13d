"""The keys of a training stack's files: each is read, said to change no memory, or refused.

What a key is, is data (``memplan/data/stacks``): ``read`` by the stack's reader; ``quiet``, which
changes no memory; ``left_out``, which adds what is not counted; ``upper``, which takes away what is
counted all the same; ``refused``; ``renamed``, an older spelling of another. Nested keys are written
with dots, and a key stands for everything below it that has no name of its own. ``*`` is any one part.
``idle`` has values with which a key does nothing, besides those with which none does (``OFF``). ``closed`` are keys
that stand for themselves alone.

``benchmarks/stack_keys.py`` reads from a stack's own classes which keys it has; a test says which are in no table.
"""

from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path

from memplan.fast_dataclass import dataclass

_FOLDER = Path(__file__).parent.parent / "data" / "stacks"

OFF: tuple[object, ...] = (None, False, "", 0, 0.0, "no", "none", "None", "null", [], {}, ())
"""Values with which a key does nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyTable:
    """What each key of a stack's file is."""

    source: str
    """The stack's version, and where its keys are declared."""
    arguments: bool = False
    """transformers' training arguments may stand among them."""
    read: tuple[str, ...] = ()
    quiet: tuple[str, ...] = ()
    left_out: Mapping[str, str]
    upper: Mapping[str, str]
    refused: Mapping[str, str]
    renamed: Mapping[str, str]
    """Older spellings, and today's; without one where nothing took its place."""
    idle: Mapping[str, tuple[object, ...]]
    """Values with which a key does nothing."""
    closed: tuple[str, ...] = ()
    """Names that stand for themselves alone: what is below them and has no name is no key."""
    fates: "Mapping[str, Fate]"
    """Of every name that the table itself has."""

    @property
    def known(self) -> list[str]:
        """Every key by its name today."""
        return [*self.fates, *(_arguments().fates if self.arguments else ())]

    def fate(self, key: str) -> "tuple[str, Fate | None]":
        """The longest name that covers a key, and what becomes of it; None: there is no such key.

        >>> key_table("axolotl").fate("datasets.path")
        ('datasets', <Fate.QUIET: 'quiet'>)
        """
        if key in self.fates:
            return key, self.fates[key]
        names = [name for name in self.fates if _covers(name, key)]
        if names:
            longest = max(names, key=lambda name: (name.count("."), name.count("*") == 0))
            return (key, None) if longest in self.closed else (longest, self.fates[longest])
        if any(name.startswith(f"{key}.") for name in self.fates):
            return key, Fate.SECTION
        if key in self.renamed:
            return self.fate(self.renamed[key]) if self.renamed[key] else (key, Fate.QUIET)
        return _arguments().fate(key) if self.arguments else (key, None)

    def is_off(self, name: str, value: object) -> bool:
        """Whether a key does nothing with a value."""
        own = self.idle.get(name)
        if own is None and self.arguments:
            own = _arguments().idle.get(name)
        same = (
            isinstance(value, bool) is isinstance(each, bool) and value == each
            for each in own or ()
        )
        return value in OFF or any(same)

    def text(self, name: str, fate: "Fate") -> str:
        """What is said of a key that is left out, makes the figures upper bounds, or is refused."""
        texts = {
            Fate.LEFT_OUT: self.left_out, Fate.UPPER: self.upper, Fate.REFUSED: self.refused,
        }  # fmt: skip
        return texts[fate].get(name) or _arguments().text(name, fate)


class Fate(Enum):
    """What becomes of a key."""

    READ = "read"
    QUIET = "quiet"
    LEFT_OUT = "left_out"
    UPPER = "upper"
    REFUSED = "refused"
    SECTION = "section"
    """It has keys of its own, and none here."""


@cache
def key_table(stack: str) -> KeyTable:
    """The keys of a stack's files.

    >>> "base_model" in key_table("axolotl").read
    True
    """
    from memplan.sources.files import read_mapping

    values = read_mapping(_FOLDER / f"{stack}.yaml")
    idle = values.get("idle")
    return KeyTable(
        source=str(values["source"]),
        arguments=values.get("arguments") is True,
        read=_names(values.get("read")),
        quiet=_names(values.get("quiet")),
        left_out=_texts(values.get("left_out")),
        upper=_texts(values.get("upper")),
        refused=_texts(values.get("refused")),
        renamed=_texts(values.get("renamed")),
        closed=_names(values.get("closed")),
        idle={key: tuple(each) for key, each in idle.items()} if isinstance(idle, dict) else {},
        fates={
            str(name): fate
            for fate in Fate
            if fate is not Fate.SECTION
            for name in _listed(values.get(fate.value))
        },
    )


def _listed(names: object) -> list[object]:
    return list(names) if isinstance(names, list | dict) else []


def _arguments() -> KeyTable:
    """transformers' and TRL's training arguments, which several stacks take among their own keys."""
    return key_table("training_arguments")


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _texts(value: object) -> dict[str, str]:
    return {str(key): str(text) for key, text in value.items()} if isinstance(value, dict) else {}


def _covers(name: str, key: str) -> bool:
    """Whether a name of a table is the key, or holds it.

    >>> _covers("datasets", "datasets.path"), _covers("*.seed", "data.seed"), _covers("a", "ab")
    (True, True, False)
    """
    if name == key or key.startswith(f"{name}."):
        return True
    if "*" not in name:
        return False
    wanted, parts = name.split("."), key.split(".")
    return len(parts) >= len(wanted) and all(
        each in ("*", part) for each, part in zip(wanted, parts, strict=False)
    )
