"""What training stacks do by default, each default with where the stack says so.

A preset is a file of ``memplan/data/presets``: adding one is adding a file. Its defaults are in the
stack's own words (``key``), which the reader of the stack's files takes where a file leaves them out,
or fields of ``TrainingSetup`` where the stack has no word for what it always does.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from memplan.errors import ConfigError, did_you_mean
from memplan.fast_dataclass import dataclass

_FOLDER = Path(__file__).parent.parent.parent / "data" / "presets"


@dataclass(frozen=True, kw_only=True, slots=True)
class Default:
    """One thing that a stack does where it is not told otherwise."""

    key: str | None
    """In the stack's words; None: it has none."""
    field: str
    """Field of ``TrainingSetup`` that it decides."""
    value: object
    """In the stack's words where there is a key, else the field's."""
    where: str
    """File of the stack that says so."""
    source: str = ""
    """Another package that the file is of."""

    @property
    def said(self) -> str:
        """What it is set to, in one short text."""
        return f"{self.key or self.field} {_text(self.value)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A stack's defaults."""

    name: str
    stack: str
    """Whose reader takes them: a module of ``memplan.sources.stacks``."""
    source: str
    """Package and version, or repository and commit."""
    defaults: tuple[Default, ...]

    def value(self, key: str) -> object:
        """The default of a key; None where there is none."""
        return next((each.value for each in self.defaults if each.key == key), None)

    def fields(self) -> dict[str, object]:
        """What the stack always does, as fields of ``TrainingSetup``."""
        return {each.field: each.value for each in self.defaults if each.key is None}

    def said(
        self, given: Mapping[str, object], taken: Collection[str], found: Mapping[str, object]
    ) -> Iterator[str]:
        """One line for each default that counts: one that was ``taken``, not given beside and not ``found`` otherwise."""
        for each in self.defaults:
            if each.key is None:
                counts = found.get(each.field, each.value) == each.value
            else:
                counts = each.key in taken
            if not counts or given.get(each.field) is not None:
                continue
            yield f"preset {self.name}: {each.said} ({each.source or self.source}, {each.where})"


@cache
def preset_names() -> tuple[str, ...]:
    """Every preset there is.

    >>> "trl-sft" in preset_names()
    True
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


@cache
def load_preset(name: str) -> Preset:
    """A preset by its name.

    Raises ``ConfigError`` where there is none, with the nearest.

    >>> load_preset("axolotl").value("micro_batch_size")
    1
    """
    from memplan.sources.files import read_mapping

    if name not in preset_names():
        hint = (
            did_you_mean(name, list(preset_names())) or f" There are: {', '.join(preset_names())}"
        )
        msg = f"preset: {name!r:.60}: there is no such preset.{hint}"
        raise ConfigError(msg)
    values = read_mapping(_FOLDER / f"{name}.yaml")
    defaults = values["defaults"]
    assert isinstance(defaults, list)
    return Preset(
        name=name,
        stack=str(values["stack"]),
        source=str(values["source"]),
        defaults=tuple(_default(each) for each in defaults),
    )


def _default(entry: dict[str, Any]) -> Default:
    return Default(
        key=entry.get("key"),
        field=entry["field"],
        value=entry["value"],
        where=entry["where"],
        source=entry.get("source", ""),
    )


def _text(value: object) -> str:
    """A value as files write it.

    >>> _text(None), _text(True), _text(1)
    ('none', 'true', '1')
    """
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return " ".join(f"{name} {_text(each)}" for name, each in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)
