"""Reads the files that people hand to memplan: JSON and YAML that hold a mapping.

Whatever can be wrong with a file is one ``ConfigError`` that names the file, the place in it and
the problem. What the values mean is for the caller to judge.
"""

import json
import math
import os
import stat
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from memplan.errors import ConfigError
from memplan.sources.python_files import PYTHON, registered, split_name
from memplan.sources.shell_flags import (
    SHELL_SUFFIXES,
    flags_of,
    laid_over,
    overrides_of,
    sections_of,
)
from memplan.sources.skypilot import script_of
from memplan.text import shortened, shown
from memplan.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import yaml

MAX_JSON_BYTES = 16 * MIB
"""Largest JSON file that is read [bytes]. The configs of published models are below 1 MiB."""

MAX_YAML_BYTES = 1 * MIB
"""Largest YAML file that is read [bytes]: people write these, and the parser is slow."""

MAX_DEPTH = 100
"""Deepest nesting that is read. A few thousand levels would exhaust Python's stack later, and some
tens of thousands crash libyaml's."""

YAML_SUFFIXES = frozenset({".yaml", ".yml"})
TOML_SUFFIX = ".toml"

_LIBYAML_TOO_DEEP = "exceeded maximum nesting depth"
"""What PyYAML 6.0.4's libyaml says from 1,000 levels on, which it reaches before it hands over the first."""
_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep"
_KINDS: dict[type, str] = {
    type(None): "nothing", list: "a list", str: "one text", bool: "true or false",
    int: "one number", float: "one number",
}  # fmt: skip


_confines: tuple[Path, ...] = ()
"""Folders below which everything lies that may be read; none: everything may."""


@contextmanager
def confined_to(*folders: Path) -> "Iterator[None]":
    """Inside, files are read below these folders alone, of which the first is named, and below memplan's own.

    Links are followed before they are judged. Others are refused with a ``ConfigError``.
    """
    global _confines
    before = _confines
    package = Path(__file__).parent.parent
    _confines = tuple(each.resolve() for each in (*folders, package))
    try:
        yield
    finally:
        _confines = before


def read_mapping(path: str | Path) -> dict[str, object]:
    """Read a YAML file (``.yaml`` or ``.yml``), a TOML file (``.toml``), a shell script's flags (``.sh``, or what
    a SkyPilot task runs), what a function of a Python file returns (``.py:function``) or a JSON file (any other suffix).

    Raises ``ConfigError`` when the file cannot be read, is too large, is not what its suffix says,
    or holds anything but a mapping with text as keys, each given once, and finite numbers.
    """
    label = str(path)
    file, function = split_name(label)
    suffix = Path(file).suffix.lower()
    if suffix not in (*YAML_SUFFIXES, TOML_SUFFIX, *SHELL_SUFFIXES, PYTHON):
        return read_json_mapping(path)
    text = _read_text(Path(file), label=label, max_bytes=MAX_YAML_BYTES)
    if suffix in SHELL_SUFFIXES:
        return _read_script(text, Path(path), label=label)
    if suffix == PYTHON:
        from memplan.sources.python_files.reading import made_by  # only then

        found = made_by(text, function, label=label, folder=Path(file).absolute().parent.name)
        return _check_mapping(found, label=label, kind="keys and values")
    if suffix == TOML_SUFFIX:
        return _check_mapping(_parse_toml(text, label=label), label=label, kind="keys and values")
    values = _check_mapping(_parse_yaml(text, label=label), label=label, kind="keys and values")
    script = script_of(values)
    return values if script is None else _read_script(script, Path(path), label=label)


def _read_script(text: str, path: Path, *, label: str) -> dict[str, object]:
    """What a script's command says: Hydra's words over the configuration that it names, or flags.

    A configuration that is not found beside the script stands among its ``defaults`` by its name.
    """

    def parsed(value: str) -> object:
        try:
            return _parse_yaml(value, label=label)
        except ConfigError:
            return value

    over, named = overrides_of(text, source=label, parse=parsed)
    if not over:
        found = flags_of(text, source=label)
        if not found:
            _refuse(
                label,
                "runs nothing with flags or settings in it: name the file that its training reads",
            )
        named_file, module = found.get("config", found.get(_OLDER_CONFIG)), found.get("module")
        if isinstance(named_file, str) and isinstance(module, str):
            named_file = registered(module, named_file)
        if isinstance(named_file, str) and Path(split_name(named_file)[0]).suffix in _NAMED:
            return _configured(path, named_file, found, parsed, label=label)
        return {name.replace("-", "_"): value for name, value in found.items()}
    if named is None:
        return _check_mapping(over, label=label, kind="keys and values")
    *folders, name = named.split("/")
    tails = ("/".join([*folders[at:], f"{name}.yaml"]) for at in range(len(folders) + 1))
    own = next((each for tail in tails if (each := _beside(path, tail)) is not None), None)
    base = {"defaults": [name, "_self_"]} if own is None else read_mapping(own)
    over = laid_over(base, over)
    return _check_mapping(over, label=label, kind="keys and values")


_OLDER_CONFIG = "job.config_file"
"""torchtitan's until it had Python configurations."""
_NAMED = (*YAML_SUFFIXES, TOML_SUFFIX, PYTHON)
"""Files that a script's ``--config`` may name."""


def _configured(
    path: Path,
    named: str,
    flags: Mapping[str, object],
    parse: "Callable[[str], object]",
    *,
    label: str,
) -> dict[str, object]:
    """The configuration that a script runs (``--config a.yaml --b.c 1``), its other flags laid over it."""
    file, function = split_name(named)
    own = _beside(path, file)
    if own is None:
        _refuse(
            label,
            f"runs {file}, which is neither beside it nor below a folder above: give that file",
        )
    others = {name: value for name, value in flags.items() if name not in _NAMING}
    whole = read_mapping(own if function is None else f"{own}:{function}")
    return _check_mapping(
        laid_over(whole, sections_of(others, parse)),
        label=label,
        kind="keys and values",
    )


_NAMING = ("config", "module", _OLDER_CONFIG)
_NEARBY = 4
"""Folders above a script's own in which its configurations are looked for."""


def _beside(path: Path, name: str) -> Path | None:
    """A configuration in the script's folder or one above it, or in ``config`` below one of these."""
    above = [*path.absolute().parents][:_NEARBY]
    places = (each / name for folder in above for each in (folder, folder / "config"))
    return next((each for each in places if each.is_file()), None)


def mapping_in(text: str, *, label: str, max_characters: int) -> dict[str, object]:
    """The same of YAML, or JSON, that was read already and that ``label`` names.

    >>> mapping_in("gpus: 8", label="stdin", max_characters=100)
    {'gpus': 8}
    """
    if len(text) > max_characters:
        _refuse(label, f"is longer than {max_characters:,} characters")
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


def read_bytes(path: str | Path, *, max_bytes: int, kind: str) -> bytes:
    """Read a file whole.

    ``kind`` is what it should be, for messages. Raises ``ConfigError`` when it cannot be read or is too
    large.
    """
    return _read(Path(path), label=str(path), max_bytes=max_bytes, expected=f"{kind} is smaller")


def read_head(path: str | Path, *, num_bytes: int) -> bytes:
    """The first bytes of a file that may be as large as it likes.

    Raises ``ConfigError`` when it cannot be read or is shorter.
    """
    data = _read(Path(path), label=str(path), max_bytes=num_bytes, expected="", only_head=True)
    if len(data) < num_bytes:
        _refuse(
            str(path), f"is cut off: it has {len(data)} of the {num_bytes} bytes it begins with"
        )
    return data


def read_text(path: str | Path, *, max_bytes: int, kind: str) -> str:
    """Read a text file whole, as ``read_bytes`` does; what is not UTF-8 is refused too."""
    expected = f"{kind} is smaller"
    return _read_text(Path(path), label=str(path), max_bytes=max_bytes, expected=expected)


_CONFIG_EXPECTED = "a config or spec is a few kilobytes of text"


def _read_text(path: Path, *, label: str, max_bytes: int, expected: str = _CONFIG_EXPECTED) -> str:
    data = _read(path, label=label, max_bytes=max_bytes, expected=expected)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse(label, f"is not text: byte {error.start + 1} is not UTF-8")


def _read(
    path: Path, *, label: str, max_bytes: int, expected: str, only_head: bool = False
) -> bytes:
    if _confines and not _is_inside(path):
        _refuse(label, f"lies outside {_confines[0]}, which is all that may be read here")
    try:
        num_bytes, data = _open_and_read(path, max_bytes, only_head=only_head)
    except FileNotFoundError:
        _refuse(label, "there is no such file")
    except IsADirectoryError:
        _refuse(label, "is a folder, not a file")
    except PermissionError:
        _refuse(label, "may not be read: check its permissions")
    except _NotAFileError:
        _refuse(label, "is a pipe or a device, not a file: write what it holds to one")
    except (OSError, ValueError) as error:
        _refuse(label, f"cannot be read: {getattr(error, 'strerror', None) or error}")
    if not only_head and max(num_bytes, len(data)) > max_bytes:
        limit = f"{max_bytes // MIB} MiB"
        _refuse(label, f"is larger than {limit}: {expected}")
    return data


def _is_inside(path: Path) -> bool:
    """Whether it is below a folder that may be read; what can be no path is not."""
    try:
        place = path.resolve()
    except (OSError, ValueError, RuntimeError):  # a null character, a circle of links
        return False
    return any(place.is_relative_to(each) for each in _confines)


class _NotAFileError(Exception):
    """What was opened may never end, or never begin."""


def _open_and_read(path: Path, max_bytes: int, *, only_head: bool = False) -> tuple[int, bytes]:
    """A file's size and what it holds; one that is larger than this stays unread, or is read so far.

    It is opened without waiting for a writer, as a named pipe would ask, and judged when open.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _NotAFileError
        if only_head:
            return status.st_size, _read_at_most(file, max_bytes)
        too_large = status.st_size > max_bytes
        return status.st_size, b"" if too_large else _read_at_most(file, max_bytes + 1)


def _read_at_most(file: BinaryIO, num_bytes: int) -> bytes:
    """Read no more than this, whatever the file says of its size: one of ``/proc`` says none."""
    return file.read(num_bytes)


def _parse_json(text: str, *, label: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_to_object)
    except _RepeatedKeyError as error:
        _refuse(label, f"the key {error.args[0]!r:.60} is given twice: keep the one that is meant")
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        _refuse(label, f"is not JSON: {error.msg} at {place}: mend it there, or fetch it anew")
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


def _parse_toml(text: str, *, label: str) -> object:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        _refuse(label, f"is not TOML: {error}")
    except (ValueError, RecursionError):
        # Python refuses integers of more than 4300 digits, and nesting of some thousand levels.
        _refuse(label, "is not TOML: a value does not have the form that its type asks for")


def _parse_yaml(text: str, *, label: str) -> object:
    import yaml

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_yaml_events(text, base, label=label)
        return yaml.load(text, Loader=_strict_loader(base))
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        if error.problem == _LIBYAML_TOO_DEEP:
            _refuse(label, _TOO_DEEP)
        mark = error.problem_mark or error.context_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        _refuse(label, f"is not YAML: {error.problem or error.context}{place}")
    except yaml.YAMLError as error:
        _refuse(label, f"is not YAML: {str(error).splitlines()[0]}")
    except (ValueError, LookupError, AttributeError, TypeError):
        # PyYAML's constructors let these out for values such as `!!bool x` or 2024-99-99.
        _refuse(label, "is not YAML: a value does not have the form that its type asks for")


MAX_VALUES = MAX_YAML_BYTES // 2
"""Values that a YAML file stands for with its aliases written out. Without any it holds no more: a value takes a byte,
and what parts it from the next another."""


def _check_yaml_events(text: str, loader: Any, *, label: str) -> None:
    """Refuse what must not reach the constructor: deep nesting, and aliases that stand for billions of values.

    Nesting crashes libyaml's recursive constructor.
    """
    import yaml

    count, begun = 0, list[tuple[str | None, int, int]]()
    known: dict[str, tuple[int, int]] = {}  # the values of an anchor, and its levels
    deepest = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in known:
                _refuse(
                    label, f"holds the alias *{event.anchor} in itself, or before what it names"
                )
            values, levels = known[event.anchor]
            count, deepest = count + values, max(deepest, len(begun) + levels)
        elif isinstance(event, yaml.CollectionStartEvent):
            begun.append((event.anchor, count, deepest))
            count, deepest = count + 1, len(begun)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before, above = begun.pop()
            if anchor is not None:
                known[anchor] = count - before, deepest - len(begun)
            deepest = max(deepest, above)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor is not None:
                known[event.anchor] = 1, 0
        if deepest > MAX_DEPTH:
            _refuse(label, _TOO_DEEP)
        if count > MAX_VALUES:
            _refuse(label, f"stands for more than {MAX_VALUES} values with its aliases written out")


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
                    problem = f"the key {shown(name)} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(name)
            return super().construct_mapping(node, deep=deep)

    exponent = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+")
    StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))
    return StrictLoader


def _check_mapping(value: object, *, label: str, kind: str) -> dict[str, object]:
    if not isinstance(value, dict):
        _refuse(label, f"must hold {kind}, not {_KINDS.get(type(value), 'a value')}")
    for key in value:
        if not isinstance(key, str):
            _refuse(label, f"the key {shown(key)} is not text: put it in quotes")
    check_tree(value, label=label)
    return value


def check_tree(mapping: Mapping[str, object], *, label: str) -> None:
    """Refuse what no reader of single keys could look at: level by level, rather than recursively.

    Raises ``ConfigError`` for nesting beyond ``MAX_DEPTH``, as of a mapping that holds itself, for
    keys such as YAML's ``on``, which is true, and for integers that are no number of anything.
    """
    level = _children("", mapping)
    for _ in range(MAX_DEPTH):
        # Each container once: two that hold each other would double from level to level.
        inside: dict[int, tuple[str, object]] = {}
        for place, value, in_list in level:
            _check_value(value, place=place, label=label, in_list=in_list)
            if isinstance(value, Mapping | list | tuple):
                inside[id(value)] = (place, value)
        level = [child for place, value in inside.values() for child in _children(place, value)]
        if not level:
            return
    _refuse(label, _TOO_DEEP)


def _check_value(value: object, *, place: str, label: str, in_list: bool) -> None:
    if isinstance(value, int) and abs(value) > _LARGEST:
        _refuse(label, f"{place}: holds {shown(value)}")
    # A list may end in infinity, as Mamba 2's ``time_step_limit`` does.
    if isinstance(value, float) and not (math.isfinite(value) or (in_list and value > 0)):
        _refuse(
            label, f"{shown(place)} is {value}, which is not a number: give one or leave it out"
        )
    if isinstance(value, Mapping):
        for key in value:
            # Whole numbers are the usual keys of id2label.
            if isinstance(key, bool) or not isinstance(key, str | int):
                _refuse(label, f"{place}: the key {shown(key)} is not text: put it in quotes")


_LARGEST = 10**300
"""Largest whole number that is read: still a float where one is made of it."""


def _children(place: str, value: object) -> list[tuple[str, object, bool]]:
    """What a container holds: where, what, and whether in a list."""
    if isinstance(value, Mapping):
        dot = f"{place}." if place else ""
        return [(shortened(f"{dot}{key}", MAX_PLACE), item, False) for key, item in value.items()]
    return [(place, item, True) for item in value] if isinstance(value, list | tuple) else []


MAX_PLACE = 120
"""Characters of a place in a file, such as ``text_config.rope_scaling.factor``."""
