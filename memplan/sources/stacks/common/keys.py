"""The values of one file of a training stack's: what has been looked at, and what is left.

What becomes of what is left, the stack's table says (``memplan.sources.key_tables``).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from memplan.errors import ConfigError, did_you_mean, nearest
from memplan.fast_dataclass import dataclass
from memplan.sources.key_tables import OFF, Fate, KeyTable
from memplan.sources.stacks.presets import Preset
from memplan.text import shown

MAX_REFERENCES = 20
"""How many values may refer to one another in a row."""
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.\-]+)(?:,\s*([^{}]*))?\}")
"""``${model.name}``, and with what stands for it where it is not there ``${oc.select:model.name, none}``."""


class Keys:
    """The values of one file under flat names, and which of them have been looked at."""

    def __init__(
        self,
        values: Mapping[str, object],
        table: KeyTable,
        preset: Preset,
        *,
        source: str,
        folder: Path,
    ) -> None:
        self.table = table
        self.preset = preset
        self.source = source
        self.folder = folder
        self.values = dict(flattened(values))
        self.used: set[str] = set()
        self.taken: set[str] = set()
        """Keys that are not there, whose defaults were asked for."""
        for old, new in table.renamed.items():
            if old in self.values and new not in self.values:
                self.values[new] = self.values[old]
                self.used.add(old)
        self.values = {key: self._resolved(value) for key, value in self.values.items()}

    # -- values ----------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Whether the file gives the key, or any below it."""
        below = f"{key}."
        return key in self.values or any(each.startswith(below) for each in self.values)

    def take(self, key: str) -> object:
        """The value of a key, or else the stack's default."""
        if key not in self.values:
            self.taken.add(key)
            return self.preset.value(key)
        self.used.add(key)
        value = self.values[key]
        if isinstance(value, str) and "${" in value:
            self.refuse(key, f"{shown(value)} is filled in when the job runs: write its value")
        return value

    def section(self, key: str) -> dict[str, object] | None:
        """A mapping of the file as it stands; None where it is not there, or empty."""
        below = f"{key}."
        found: dict[str, object] = {}
        for name, value in self.values.items():
            if name.startswith(below):
                self.used.add(name)
                _put(found, name.removeprefix(below).split("."), value)
        whole = self.take(key)
        if not found and isinstance(whole, Mapping):
            return dict(whole)
        return found or None

    def flag(self, key: str) -> bool:
        """True or false; null is false."""
        value = self.take(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        text = str(value).lower()
        if text not in ("true", "false", "yes", "no", "1", "0"):
            self.refuse(key, f"write true or false, not {shown(value)}")
        return text in ("true", "yes", "1")

    def count(self, key: str) -> int | None:
        """A whole number from 1 up; None where there is none."""
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(key, f"write a whole number from 1 up, not {shown(value)}")
        return value

    def number(self, key: str) -> float:
        """A number; null is 0."""
        value = self.take(key)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, f"write a number, not {shown(value)}")
        return float(value)

    def text(self, key: str) -> str | None:
        """A text; None where there is none."""
        value = self.take(key)
        if value is None or value == "":
            return None
        if isinstance(value, Mapping | list):
            self.refuse(key, f"write one value, not {shown(value)}")
        return str(value)

    def model(self, key: str) -> str | None:
        """A model's name; a flag that has no value, as in a script, is none."""
        if isinstance(self.values.get(key), bool):
            self.refuse(key, "write a model's name or path")
        return self.text(key)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names, which may be written with commas."""
        value = self.take(key)
        if value is None or value == "":
            return ()
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise self.wrong(key, f"write names, not {shown(value)}")

    def modules(self, key: str) -> tuple[str, ...] | str:
        """Modules as peft takes them: a list has ends of their names, a text is a pattern for whole names."""
        value = self.take(key)
        return value if isinstance(value, str) and value else self.names(key)

    def on(self, key: str) -> bool:
        """Whether a key is given and does something."""
        return self.take(key) not in OFF

    def choice(self, key: str, known: Mapping[str, object]) -> object:
        """What a word stands for; None where there is none."""
        word = self.text(key)
        if word is None:
            return None
        if word not in known:
            hint = did_you_mean(word, list(known)) or f" There are: {', '.join(known)}"
            self.refuse(key, f"{shown(word)} is not modelled.{hint}")
        return known[word]

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Say what is wrong with a key, and where it is."""
        raise self.wrong(key, problem)

    def wrong(self, key: str, problem: str) -> ConfigError:
        """The error of a key."""
        return ConfigError(f"{self.source}: {key}: {problem}")

    # -- what is left ----------------------------------------------------------------------------

    def finish(self, quiet: list[str]) -> "Leftovers":
        """Account for the keys that no one has looked at; refuse those there are not.

        ``quiet`` are keys that have been found to change no memory.
        """
        quiet = [*quiet]
        idle: list[str] = []
        left_out: list[str] = []
        notes: list[str] = []
        for key, value in self.values.items():
            if key in self.used:
                continue
            name, fate = self.table.fate(key)
            if fate is None:
                self.refuse(key, f"no key of {self.table.source}.{self._guess(key)}")
            is_off = self.table.is_off(name, value) or self._is_off(name)
            if is_off and fate not in (Fate.QUIET, Fate.READ):
                continue
            if fate is Fate.LEFT_OUT:
                left_out.append(f"{name} ({self.table.text(name, fate)})")
            elif fate is Fate.UPPER:
                text = self.table.text(name, fate)
                notes.append(f"{name} {text}, which is not modelled: the figures are upper bounds")
            elif fate is Fate.SECTION:
                self.refuse(key, f"write a mapping of its own keys, not {shown(value)}")
            elif fate is Fate.REFUSED:
                self.refuse(key, self.table.text(name, fate))
            else:
                (quiet if fate is Fate.QUIET else idle).append(key)
        notes += [f"{old} is {new} today" for old, new in self._renamed()]
        if quiet:
            notes.append(f"do not change memory: {', '.join(dict.fromkeys(map(_top, quiet)))}")
        if idle:
            notes.append(f"do nothing here: {', '.join(idle)}")
        return Leftovers(left_out=tuple(dict.fromkeys(left_out)), notes=tuple(dict.fromkeys(notes)))

    def _is_off(self, section: str) -> bool:
        """Whether a section has a switch of its own, and it is off."""
        switches = (self.values.get(f"{section}.{name}", True) for name in ("enable", "enabled"))
        return any(value in OFF for value in switches)

    def _renamed(self) -> Iterator[tuple[str, str]]:
        for old, new in self.table.renamed.items():
            if old in self.values:
                yield old, new

    def _guess(self, key: str) -> str:
        """The nearest key: of those in the same section, then of all."""
        folder, _, last = key.rpartition(".")
        beside = [
            each.rpartition(".")[2]
            for each in self.table.known
            if each.rpartition(".")[0] == folder
        ]
        close = nearest(last, beside)
        if close:
            return f" Did you mean {f'{folder}.{close}' if folder else close!r}?".replace("''", "'")
        return did_you_mean(key, self.table.known)

    def _resolved(self, value: object) -> object:
        """The value with references to other keys (``${model.name}``) filled in."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(value, str) or "${" not in value:
                return value
            whole = _REFERENCE.fullmatch(value)
            if whole and whole[1] in self.values:
                value = self.values[whole[1]]
                continue
            if whole and whole[2] is not None:
                return _plain(whole[2])
            filled = _REFERENCE.sub(self._referred, value)
            if filled == value:
                return value
            value = filled
        return value

    def _referred(self, match: re.Match[str]) -> str:
        return str(self.values.get(match[1], match[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    """What the keys that no reader looked at come to."""

    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def flattened(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Keys of nested mappings joined with dots; an empty mapping stays one.

    >>> dict(flattened({"model": {"name": "llama3", "args": {}}, "steps": 3}))
    {'model.name': 'llama3', 'model.args': {}, 'steps': 3}
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(text: str) -> object:
    """A value as YAML has it.

    >>> _plain("512"), _plain("false"), _plain("null"), _plain("vllm")
    (512, False, None, 'vllm')
    """
    words = {"true": True, "false": False, "null": None, "": None}
    if text.lower() in words:
        return words[text.lower()]
    return int(text) if text.isdecimal() else text


def _put(mapping: dict[str, object], place: list[str], value: object) -> None:
    for name in place[:-1]:
        inner = mapping.setdefault(name, {})
        assert isinstance(inner, dict)
        mapping = inner
    mapping[place[-1]] = value


def _top(key: str) -> str:
    """A key as it is said: of nested ones the first two parts."""
    return ".".join(key.split(".")[:2])
