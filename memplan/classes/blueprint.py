"""Which types are written as classes, and how a tape is made of one."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from memplan.classes.base import text_of
from memplan.classes.registry import CLASSES, TASKS, base_class
from memplan.graph.modules.layer_list import LayerList
from memplan.model.config import ConfigReader

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from memplan.graph.core.options import TapeOptions
    from memplan.graph.modules.run import Run
    from memplan.model.heads import Task
    from memplan.model.spec import ModelSpec


class ClassBlueprint:
    """A config whose model is written as a class, and which of its layers are there.

    Two are equal where their configs are, so that models can be looked up by them.
    """

    __slots__ = ("_key", "_sizes", "_values", "family", "source")

    def __init__(
        self,
        family: str,
        config: Mapping[str, object],
        row: Mapping[str, object],
        *,
        source: str,
        layers: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        self.family = family
        self.source = source
        self._values = config, row, layers
        self._key = family, _text(config), layers
        self._sizes: dict[Task, tuple[tuple[int, ...], ...]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassBlueprint) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def with_layers(self, *stacks: Sequence[int]) -> ClassBlueprint:
        """The same with these layers of each stack, counted from 0; one may be there more than once.

        Each is told by the first that is like it, so that stages of a pipeline with layers alike are equal.
        """
        config, row, layers = self._values
        whole = ClassBlueprint(self.family, config, row, source=self.source)
        alike = _first_alike(whole) if layers is None else layers
        picked = tuple(
            tuple(alike[place][number] for number in numbers)
            if place < len(alike)
            else tuple(numbers)  # of a class whose layers stand in no list
            for place, numbers in enumerate(stacks)
        )
        return ClassBlueprint(self.family, config, row, source=self.source, layers=picked)

    @property
    def layers(self) -> tuple[tuple[int, ...], ...] | None:
        """Which of the config's layers each stack has; None: all."""
        return self._values[2]

    def reader(self) -> ConfigReader:
        """The config, to be read key by key."""
        config, row, _ = self._values
        defaults, renamed, parts = row.get("defaults"), row.get("renamed"), row.get("parts")
        return ConfigReader(
            config, source=self.source, model_type=self.family,
            defaults=defaults if isinstance(defaults, dict) else {},
            renamed=renamed if isinstance(renamed, dict) else {},
            all_defaults=parts if isinstance(parts, dict) else {},
        )  # fmt: skip

    def sizes(self, model: ModelSpec) -> tuple[tuple[int, ...], ...]:
        """The shapes of the class's parameters, of each kind of layer once, and how many of each kind every list of layers
        holds; found once for a task, whoever asks."""
        from memplan.classes.record import build  # only when it is asked for

        found = self._sizes.get(model.task)
        if found is None:
            built = build(self.reader(), model)
            lists = (each for _, each in built.modules() if isinstance(each, LayerList))
            found = self._sizes[model.task] = (
                *(each.shape for each in built.parameters()),
                *(tuple(Counter(each.kinds).values()) for each in lists),
            )
        return found

    def record(self, model: ModelSpec, options: TapeOptions) -> Run:
        """Write the training step of the model's class on a new tape."""
        from memplan.classes.record import record_class  # only when it is recorded

        return record_class(model, options)


@lru_cache(maxsize=32)
def _first_alike(whole: ClassBlueprint) -> tuple[tuple[int, ...], ...]:
    """Of each layer of each stack the number of the first that is of its kind."""
    base = base_class(whole.family)(whole.reader())
    found: list[tuple[int, ...]] = []
    for _, each in text_of(base).modules():
        if isinstance(each, LayerList):
            firsts: dict[Hashable, int] = {}
            kinds = enumerate(each.kinds)
            found.append(tuple(firsts.setdefault(kind, number) for number, kind in kinds))
    return tuple(found)


def blueprint_of(
    model: ModelSpec, config: Mapping[str, object], row: Mapping[str, object]
) -> ClassBlueprint | None:
    """The class that a model is written as; None where it is written down from its spec, or counted alone.

    ``row`` is what transformers' class fills in (``defaults``) and calls differently (``renamed``).
    """
    if model.family not in CLASSES or model.task not in TASKS:
        return None
    if not (model.stacks or model.denoises or model.picture or model.sound):
        return None
    return ClassBlueprint(model.family, config, row, source=model.source)


def blueprint_from(reader: ConfigReader, family: str) -> ClassBlueprint:
    """The class that the config of a reader is of."""
    named = reader.all_defaults  # of which a row is parsed when it is looked up
    read = {name for part in reader.log.parts.values() for name in part.model_types}
    kinds = base_class(family).part_types
    own = {*kinds, family} if kinds else set()
    parts = {name: named[name] for name in sorted(read | own) if name in named}
    row = {"defaults": reader.defaults, "renamed": reader.renamed, "parts": parts}
    return ClassBlueprint(family, reader.config, row, source=reader.source)


def _text(value: object) -> str:
    """A config's values as text that is the same whatever their order."""
    if isinstance(value, dict):
        pairs = sorted((str(key), _text(each)) for key, each in value.items())
        return f"{{{', '.join(f'{key}: {each}' for key, each in pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)
