"""Turn option text into values, without Typer's detour over pydantic.

Typer 0.29 builds a pydantic adapter for every parameter of every command that runs, and importing
pydantic alone costs about 45 ms: half of what ``memplan`` takes in all. memplan's options are text,
numbers, enums, paths and lists of these, so they are read here. Typer asks a parameter for its converter
with ``get_runtime_param``; ``read_plainly`` answers in its place. Older versions (0.26 to 0.28)
never ask and need no help; any other type is left to Typer.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from memplan.errors import did_you_mean

_HOOK = "get_runtime_param"
_TRUE = ("1", "true", "t", "yes", "y", "on")
_FALSE = ("0", "false", "f", "no", "n", "off")

Reader = Callable[[Any], Any]


class PlainCoercion:
    """Converts one parameter's text: the part of Typer's ``RuntimeParam`` that Typer calls."""

    def __init__(self, read: Reader) -> None:
        self.read = read

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        """Return the value as the command's annotation promises it; a bad one is a usage error."""
        many = param.multiple or param.nargs == -1
        if value is None:
            return () if many else None
        try:
            return tuple(self.read(item) for item in value) if many else self.read(value)
        except ValueError as error:
            import typer  # whoever calls this has imported it

            raise typer.BadParameter(str(error), ctx=ctx, param=param) from None


def read_plainly(params: Sequence[Any]) -> None:
    """Have every parameter of a plain type converted here instead of through pydantic."""
    for param in params:
        descriptor = getattr(param, "type_descriptor", None)
        read = _reader(descriptor) if descriptor is not None else None
        if read is not None:
            setattr(param, _HOOK, _always(PlainCoercion(read)))


def _always(coercion: PlainCoercion) -> Callable[[], PlainCoercion]:
    return lambda: coercion


def _reader(descriptor: Any) -> Reader | None:
    """Return what reads one value of a parameter of Typer's, or None to leave it to Typer."""
    info = descriptor.parameter_info
    if info.clamp or _is_checked(info):
        return None
    return reader_of(descriptor.annotation, parser=info.parser, minimum=info.min, maximum=info.max)


def reader_of(
    annotation: Any,
    *,
    parser: Reader | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Reader | None:
    """Return what reads one value of a type, or None where it is none of those that are read here."""
    if parser is not None:
        return parser
    kind = item_type(annotation)
    if kind in (int, float):
        return _number_reader(kind, minimum=minimum, maximum=maximum)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_reader(kind)
    if kind is bool:
        return read_bool
    return kind if kind in (str, Path) else None


def _is_checked(info: Any) -> bool:
    """Whether Typer is to look at the file that a path names."""
    return any(getattr(info, name, False) for name in ("exists", "resolve_path", "writable"))


def item_type(annotation: Any) -> Any:
    """Return ``X`` for ``X``, ``X | None``, ``list[X]`` and ``list[X] | None``."""
    while get_origin(annotation) in (Union, UnionType, list):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        if len(kinds) != 1:
            return None
        annotation = kinds[0]
    return annotation


def read_bool(value: bool | str) -> bool:
    """Read a yes or a no, as an environment variable might hold it.

    >>> read_bool("yes"), read_bool("0")
    (True, False)
    """
    if isinstance(value, bool):
        return value
    word = value.strip().lower()
    if word not in _TRUE + _FALSE:
        msg = f"{value!r} is neither yes nor no"
        raise ValueError(msg)
    return word in _TRUE


def _number_reader(kind: type, *, minimum: float | None, maximum: float | None) -> Reader:
    def read(value: Any) -> Any:
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            msg = f"{value!r} is not {'a whole number' if kind is int else 'a number'}"
            raise ValueError(msg) from None
        if minimum is not None and not number >= minimum:
            msg = f"{value} is too small: {minimum} is the least"
            raise ValueError(msg)
        if maximum is not None and not number <= maximum:
            msg = f"{value} is too large: {maximum} is the most"
            raise ValueError(msg)
        return number

    return read


def _enum_reader(kind: type[Enum]) -> Reader:
    def read(value: Any) -> Enum:
        members = {str(member.value): member for member in kind}
        if isinstance(value, kind):
            return value
        if value.lower() not in members:
            hint = did_you_mean(value, tuple(members))
            msg = f"{value!r} is not one of {', '.join(members)}.{hint}"
            raise ValueError(msg)
        return members[value.lower()]

    return read
