"""A short text that two models share exactly where they are of one shape.

What a model is called and where it was read does not count, so that it survives another folder,
another machine, another copy. What is as it would be anyway does not count either, so that a part
that memplan learns to describe leaves the fingerprints of other models alone.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum

from memplan.model.spec import ModelSpec

LENGTH = 16
"""Hexadecimal digits of a fingerprint."""

_NAMES = frozenset({"name", "source", "guess", "blueprint"})
"""Fields of ``ModelSpec`` that are no part of its shape, or say it once more."""


def model_fingerprint(model: ModelSpec) -> str:
    """The fingerprint of a model's shape and task."""
    from hashlib import sha256  # only for what is kept

    parts = [
        f"{each.name}={_canonical(getattr(model, each.name))}"
        for each in fields(model)
        if each.name not in _NAMES
    ]
    return sha256("\n".join(parts).encode()).hexdigest()[:LENGTH]


def _canonical(value: object) -> str:
    """A value as text, the same in every process: sets in order, enums by what they stand for."""
    if isinstance(value, Enum):
        return str(value.value) if not isinstance(value.value, tuple) else value.name
    if is_dataclass(value) and not isinstance(value, type):
        given = (
            f"{each.name}={_canonical(getattr(value, each.name))}"
            for each in fields(value)
            if each.default is MISSING or getattr(value, each.name) != each.default
        )
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, Mapping):
        pairs = sorted(f"{_canonical(key)}: {_canonical(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_canonical(each) for each in value)}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_canonical(each) for each in value))}}}"
    return repr(value)
