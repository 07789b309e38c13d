"""Lengths of sequences read from a file: one a line, or JSON lines that hold them or token ids."""

import json
from pathlib import Path

from memplan.errors import ConfigError
from memplan.training.lengths import Lengths

_KEYS = ("length", "num_tokens", "n_tokens", "input_length", "seq_len")
"""Keys of a JSON line that hold a length."""
_LISTS = ("input_ids", "tokens", "token_ids")
"""Keys that hold the tokens themselves."""


def read_lengths(text: str) -> Lengths | None:
    """What ``--lengths`` says: a histogram, percentiles, or a file with settings behind it.

    Raises ``SetupError`` or ``ConfigError`` for what cannot be read.
    """
    path, comma, settings = text.partition(",")
    file = Path(path)
    if not path or "=" in path or ":" in path[1:] or not file.exists():
        return Lengths.read(text)
    found = Lengths.of(_counted(file))
    if not comma:
        return found
    shares = ",".join(f"{length}:{share!r}" for length, share in found.shares)
    return Lengths.read(f"{shares},{settings}")


def _counted(path: Path) -> list[int]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path}: cannot be read: {error}"
        raise ConfigError(msg) from None
    found = [
        _length(line.strip(), f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not any(found):
        msg = f"{path}: holds no lengths; expected one a line, or JSON lines with {_KEYS[0]}"
        raise ConfigError(msg)
    return [each for each in found if each]


def _length(line: str, place: str) -> int:
    if line.isdecimal():
        return int(line)
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict):
        for key in _KEYS:
            if isinstance(row.get(key), int) and row[key] >= 0:
                return int(row[key])
        for key in _LISTS:
            if isinstance(row.get(key), list):
                return len(row[key])
    msg = f"{place}: expected a length, or JSON with {', '.join((*_KEYS, *_LISTS))}"
    raise ConfigError(msg)
