"""The values of a file of training arguments, each read as what it is to be or refused by its name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from memplan.errors import ConfigError


class ArgumentValues:
    """What a file says; the readers raise ``ConfigError`` for values of another kind."""

    def __init__(self, values: Mapping[str, object], *, source: str, folder: Path) -> None:
        self.values = values
        self.source = source
        self.folder = folder
        self.notes: list[str] = []
        """Remarks on what was read."""

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A yes or a no; null is a no."""
        value = self.values.get(key, default)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def count(self, key: str, *, default: int) -> int:
        """A whole number from 1 up."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "a whole number from 1 up")
        return value

    def nested(self, key: str) -> Mapping[str, object] | None:
        """A mapping, the JSON text of one, or the file that holds it."""
        value = self.values.get(key)
        if value in (None, "", {}):
            return None
        if isinstance(value, str) and value.startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise self.wrong(key, "a mapping, JSON text or the path of a file") from None
        if isinstance(value, str):
            from memplan.sources.files import read_mapping

            return read_mapping(self.folder / value)
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a mapping or the path of a file")
        return value

    def wrong(self, key: str, wanted: str) -> ConfigError:
        """What to raise for a value of another kind than ``wanted``."""
        shown = repr(self.values[key])
        return ConfigError(f"{self.source}: {key}: write {wanted}, not {shown[:60]}")

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise ``ConfigError``: where it stands and what is wrong with it."""
        msg = f"{self.source}: {key}: {problem}"
        raise ConfigError(msg)
