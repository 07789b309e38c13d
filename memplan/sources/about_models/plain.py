"""Objects' settings as a file would have them."""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any


def plain(values: Mapping[str, Any]) -> dict[str, object]:
    """Settings as a file would have them: enums by their values, sets as lists, everything else as text.

    >>> plain({"r": 8, "target_modules": {"v_proj", "q_proj"}, "dtype": object})["target_modules"]
    ['q_proj', 'v_proj']
    """
    found: dict[str, object] = json.loads(json.dumps(values, default=_plain))
    return found


def _plain(value: Any) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return str(value).removeprefix("torch.")
