"""Lengths of sequences read from a file: one a line, or JSON lines that hold them or token ids."""

import json
from pathlib import Path

from memplan.errors import ConfigError
from memplan.sources.files import read_text
from memplan.training.lengths import Lengths
from memplan.units import MIB

MAX_LENGTHS_BYTES = 256 * MIB
"""Largest file of lengths that is read [bytes]: token ids of some ten million tokens, or as many lengths."""
MAX_LENGTH = 10**9
"""Tokens of the longest sequence that is one."""

_KEYS = ("length", "num_tokens", "n_tokens", "input_length", "seq_len")
"""Keys of a JSON line that hold a length."""
_LISTS = ("input_ids", "tokens", "token_ids")
"""Keys that hold the tokens themselves."""


def read_lengths(text: str) -> Lengths | None:
    """What ``--lengths`` says: a histogram, percentiles, or a file with settings behind it.

    Raises ``SetupError`` or ``ConfigError`` for what cannot be read.
    """
    path, comma, settings = text.partition(",")
    if not path or "=" in path or ":" in path[1:] or not _is_there(path):
        return Lengths.read(text)
    found = Lengths.of(_counted(path))
    if not comma:
        return found
    shares = ",".join(f"{length}:{share!r}" for length, share in found.shares)
    return Lengths.read(f"{shares},{settings}")


def _is_there(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # no name of a file, as one that is too long
        return False


def _counted(path: str) -> list[int]:
    text = read_text(path, max_bytes=MAX_LENGTHS_BYTES, kind="a file of lengths")
    lines = text.splitlines()
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
    found = int(line) if line.isdecimal() and len(line) < MAX_DIGITS else _length_of_row(line)
    if found is None or not 0 <= found <= MAX_LENGTH:
        msg = f"{place}: expected a length, or JSON with {', '.join((*_KEYS, *_LISTS))}"
        raise ConfigError(msg)
    return found


MAX_DIGITS = 20
"""Of a number that is looked at: Python takes long over long ones."""


def _length_of_row(line: str) -> int | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(row, dict):
        for key in _KEYS:
            if type(row.get(key)) is int:
                return int(row[key])
        for key in _LISTS:
            if isinstance(row.get(key), list):
                return len(row[key])
    return None
