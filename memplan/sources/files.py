"""Reads the files that people hand to memplan: JSON and YAML that hold a mapping.

Whatever can be wrong with a file is one ``ConfigError`` that names the file, the place in it and
the problem. What the values mean is for the caller to judge.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from memplan.errors import ConfigError
from memplan.units import MIB

if TYPE_CHECKING:
    import yaml

MAX_JSON_BYTES = 16 * MIB
"""Largest JSON file that is read [bytes]. The configs of published models are below 1 MiB."""

MAX_YAML_BYTES = 1 * MIB
"""Largest YAML file that is read [bytes]: people write these, and the parser is slow."""

MAX_DEPTH = 100
"""Deepest nesting that is read. A few thousand levels would exhaust Python's stack later, and some
tens of thousands crash libyaml's."""

YAML_SUFFIXES = frozenset({".yaml", ".yml"})

_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep"
_KINDS: dict[type, str] = {
    type(None): "nothing", list: "a list", str: "one text", bool: "true or false",
    int: "one number", float: "one number",
}  # fmt: skip


def read_mapping(path: str | Path) -> dict[str, object]:
    """Read a YAML file (``.yaml`` or ``.yml``) or a JSON file (any other suffix).

    Raises ``ConfigError`` when the file cannot be read, is too large, is not what its suffix says,
    or holds anything but a mapping with text as keys, each given once, and finite numbers.
    """
    if Path(path).suffix.lower() not in YAML_SUFFIXES:
        return read_json_mapping(path)
    label = str(path)
    text = _read_text(Path(path), label=label, max_bytes=MAX_YAML_BYTES)
    return _check_mapping(_parse_yaml(text, label=label), label=label, kind="keys and values")


def read_json_mapping(path: str | Path, *, label: str | None = None) -> dict[str, object]:
    """Read a JSON file that holds an object.

    ``label`` replaces the path in messages, where the path would tell the user nothing. Raises
    ``ConfigError`` as ``read_mapping`` does.
    """
    label = label or str(path)
    text = _read_text(Path(path), label=label, max_bytes=MAX_JSON_BYTES)
    return _check_mapping(_parse_json(text, label=label), label=label, kind="a JSON object")


def _refuse(label: str, problem: str) -> NoReturn:
    msg = f"{label}: {problem}"
    raise ConfigError(msg) from None


def _read_text(path: Path, *, label: str, max_bytes: int) -> str:
    try:
        # Asked first, so that a huge file is refused unread.
        num_bytes = path.stat().st_size
        data = b"" if num_bytes > max_bytes else _read_at_most(path, max_bytes + 1)
    except FileNotFoundError:
        _refuse(label, "there is no such file")
    except IsADirectoryError:
        _refuse(label, "is a folder, not a file")
    except PermissionError:
        _refuse(label, "may not be read: check its permissions")
    except (OSError, ValueError) as error:
        _refuse(label, f"cannot be read: {getattr(error, 'strerror', None) or error}")
    if max(num_bytes, len(data)) > max_bytes:
        limit = f"{max_bytes // MIB} MiB"
        _refuse(label, f"is larger than {limit}: a config or spec is a few kilobytes of text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse(label, f"is not text: byte {error.start + 1} is not UTF-8")


def _read_at_most(path: Path, num_bytes: int) -> bytes:
    """Read no more than this, whatever the file says of its size: a device may never end."""
    with path.open("rb") as file:
        return file.read(num_bytes)


def _parse_json(text: str, *, label: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_to_object)
    except _RepeatedKeyError as error:
        _refuse(label, f"the key {error.args[0]!r:.60} is given twice: keep the one that is meant")
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        _refuse(label, f"is not JSON: {error.msg} at {place}")
    except ValueError:
        # Python refuses integers of more than 4300 digits.
        _refuse(label, "holds a number with thousands of digits")
    except RecursionError:
        _refuse(label, _TOO_DEEP)


class _RepeatedKeyError(ValueError):
    """A JSON object has two values under one key; Python would take the last in silence."""


def _to_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKeyError(key)
            seen.add(key)
    return found


def _parse_yaml(text: str, *, label: str) -> object:
    import yaml

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_yaml_events(text, base, label=label)
        return yaml.load(text, Loader=_strict_loader(base))
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        _refuse(label, f"is not YAML: {error.problem or error.context}{place}")
    except yaml.YAMLError as error:
        _refuse(label, f"is not YAML: {str(error).splitlines()[0]}")
    except (ValueError, LookupError, AttributeError, TypeError):
        # PyYAML's constructors let these out for values such as `!!bool x` or 2024-99-99.
        _refuse(label, "is not YAML: a value does not have the form that its type asks for")


def _check_yaml_events(text: str, loader: Any, *, label: str) -> None:
    """Refuse what must not reach the constructor: deep nesting, and aliases.

    Nesting crashes libyaml's recursive constructor; a few aliases can stand for billions of values.
    """
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            _refuse(label, f"holds the alias *{event.anchor}: write the value out instead")
        if depth > MAX_DEPTH:
            _refuse(label, _TOO_DEEP)


def _strict_loader(base: Any) -> Any:
    """Return a loader that refuses a key given twice, and reads ``1e-5`` as a number.

    YAML 1.1, which PyYAML follows, takes a number without a dot and a signed exponent for text.
    """
    import re

    import yaml

    class StrictLoader(base):  # type: ignore[misc]
        def construct_mapping(self, node: "yaml.MappingNode", deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                name = str(key.value)
                if name in seen:
                    problem = f"the key {name!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(name)
            return super().construct_mapping(node, deep=deep)

    exponent = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+")
    StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))
    return StrictLoader


def _check_mapping(value: object, *, label: str, kind: str) -> dict[str, object]:
    if not isinstance(value, dict):
        _refuse(label, f"must hold {kind}, not {_KINDS.get(type(value), 'a value')}")
    if not _is_shallow(value):
        _refuse(label, _TOO_DEEP)
    for key, item in value.items():
        if not isinstance(key, str):
            _refuse(label, f"the key {key!r} is not text: put it in quotes")
        if isinstance(item, float) and not math.isfinite(item):
            _refuse(label, f"{key!r} is {item}, which is not a number: give one or leave it out")
    return value


def _is_shallow(value: object) -> bool:
    """Say whether the nesting stays within ``MAX_DEPTH``, level by level rather than recursively."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return True
    return False


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
