"""What an emitter hands back, and how it becomes text."""

import json
from collections.abc import Mapping
from dataclasses import field

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass
from memplan.training.setup import TrainingSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A file that goes with what is written, and that it names."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Emitted:
    """A setup in a framework's own words."""

    values: Mapping[str, object]
    """Keys and values; for torchtitan, flags and their values."""
    setup: TrainingSetup
    """What the framework will run when told so: where it knows but one way of its own, that."""
    by_hand: Mapping[str, object] = field(default_factory=dict)
    """Fields of the setup that the values do not say: given beside them they are read as the setup."""
    notes: tuple[str, ...] = ()
    """What is not in ``values`` and has to be said elsewhere."""
    beside: Beside | None = None
    only_in_files: frozenset[str] = frozenset()
    """Names that a file takes and the command line does not."""
    last_words: tuple[str, ...] = ()
    """What stands behind the flags."""

    @property
    def json(self) -> str:
        """The values as JSON."""
        return json.dumps(self.values, indent=2)

    @property
    def yaml(self) -> str:
        """The values as YAML, in block style."""
        return "\n".join(_yaml_lines(self.values, indent=0))

    @property
    def toml(self) -> str:
        """The values as TOML, names with a dot in the table before it."""
        tables: dict[str, list[str]] = {}
        for name, value in self.values.items():
            table, _, key = name.rpartition(".")
            tables.setdefault(table, []).append(f"{key} = {json.dumps(value)}")
        return "\n\n".join(f"[{table}]\n{chr(10).join(lines)}" for table, lines in tables.items())

    @property
    def flags(self) -> str:
        """The values as command-line flags, one a line, to be pasted into a shell."""
        lines = [
            f"--{name}" if value is True else f"--{name} {_word(value)}"
            for name, value in self.values.items()
            if name not in self.only_in_files
        ]
        return " \\\n".join((*lines, *self.last_words))


def _word(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def refuse(problem: str) -> SetupError:
    """The error for a setup that a framework cannot be told."""
    return SetupError(f"emit: {problem}")


def _yaml_lines(values: Mapping[str, object], *, indent: int) -> list[str]:
    lines = []
    margin = " " * indent
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{margin}{key}:")
            lines += _yaml_lines(value, indent=indent + 2)
        else:
            lines.append(f"{margin}{key}: {_yaml_scalar(value)}")
    return lines


_PLAIN_WORDS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./")
_YAML_WORDS = frozenset({"yes", "no", "on", "off", "true", "false", "null", "y", "n", ""})


def _yaml_scalar(value: object) -> str:
    """One value; text that YAML would take for something else is quoted, as JSON quotes it."""
    if isinstance(value, str):
        plain = set(value) <= _PLAIN_WORDS and value[:1].isalpha()
        return value if plain and value.lower() not in _YAML_WORDS else json.dumps(value)
    return json.dumps(value)
