"""Measurements in a JSON form of memplan's own: what ``memplan verify`` records, and reads again.

A file holds one run: the model's config, the setup's fields that are not what they are by default, the
card, the versions of what ran, and the peaks of each part [bytes]. A file that lacks a key, or holds
one that is unknown, is refused.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from memplan.errors import ConfigError, MemplanError
from memplan.estimator.measured import PARTS, Death, Measurement
from memplan.hardware.gpu import GpuSpec
from memplan.memory.replaying.part_peaks import PartPeaks
from memplan.sources.files import read_json_mapping
from memplan.sources.setup_file import setup_from_mapping
from memplan.training.adapters import Lora
from memplan.training.choices import checkpointing_text
from memplan.training.setup import TrainingSetup

FORM = "memplan_measurement"
VERSION = 1
"""Of the form; raised where a key changes its meaning."""
_COUNTERS = ("requested_bytes", "allocated_bytes", "reserved_bytes")
_OPTIONAL_NUMBERS = ("context_bytes", "driver_bytes")
_NUMBERS = ("num_params", "num_steps", "held_bytes", "others_bytes", "num_retries", "rank")
_TEXTS = ("model_name", "task", "gpu")
_FLAGS = ("is_fake", "is_alone")


def measurement_values(measured: Measurement) -> dict[str, object]:
    """A measurement as its file holds it."""
    capability = measured.compute_capability
    return {
        FORM: VERSION,
        **{name: getattr(measured, name) for name in _TEXTS},
        "gpu_memory_bytes": measured.gpu_memory_bytes,
        "compute_capability": None if capability is None else list(capability),
        **{name: getattr(measured, name) for name in _FLAGS},
        "versions": dict(measured.versions),
        "config": dict(measured.model),
        "setup": setup_values(measured.setup),
        **{name: getattr(measured, name) for name in (*_NUMBERS, *_OPTIONAL_NUMBERS)},
        "parts": {
            part: {name: getattr(peaks, name) for name in _COUNTERS}
            for part, peaks in measured.parts.items()
        },
        "death": None
        if measured.death is None
        else {"part": measured.death.part, "message": measured.death.message},
        "step_seconds": list(measured.step_seconds),
    }


def setup_values(setup: TrainingSetup) -> dict[str, object]:
    """The fields that are not what they are by default, as a setup's file has them.

    >>> setup_values(TrainingSetup(engine="fsdp", num_gpus=8, checkpointing="0-3"))
    {'num_gpus': 8, 'engine': 'fsdp', 'checkpointing': 'layers.0-3'}
    """
    return _other_than_usual(setup)


def _other_than_usual(value: TrainingSetup | Lora) -> dict[str, object]:
    found: dict[str, object] = {}
    for field in fields(value):
        own = getattr(value, field.name)
        if field.default is MISSING or own != field.default:
            found[field.name] = _plain(field.name, own)
    return found


def _plain(name: str, value: Any) -> object:
    if name == "checkpointing":
        return value if isinstance(value, float) else checkpointing_text(value)
    if name in ("engine_options", "optimizer_options", "rank_pattern"):
        return {key: each.value if isinstance(each, Enum) else each for key, each in value}
    if isinstance(value, Lora):
        return {"lora": _other_than_usual(value)}
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return list(value) if isinstance(value, tuple) else str(value)


def read_measurement(path: str | Path) -> Measurement:
    """Read one; raises ``ConfigError``, which names the key, for a file that is none."""
    source = str(path)
    values = read_json_mapping(path)
    if values.get(FORM) != VERSION:
        msg = f"{source}: {FORM}: expected {VERSION}: this is no measurement that `memplan verify` recorded"
        raise ConfigError(msg)
    read = _Reader(values, source=source)
    death = values.get("death")
    measured = Measurement(
        model=read.mapping("config"),
        setup=setup_from_mapping(read.mapping("setup"), source=source, section="setup: "),
        gpu_memory_bytes=read.number("gpu_memory_bytes"),
        compute_capability=read.capability(),
        versions={key: str(each) for key, each in read.mapping("versions").items()},
        parts=read.parts(),
        death=None if death is None else read.death(),
        step_seconds=read.times(),
        **{name: read.text(name) for name in _TEXTS},
        **{name: read.flag(name) for name in _FLAGS},
        **{name: read.number(name) for name in _NUMBERS},
        **{name: read.optional_number(name) for name in _OPTIONAL_NUMBERS},
    )
    read.refuse_others()
    return measured


class _Reader:
    """The values of a file, each looked at once."""

    def __init__(self, values: Mapping[str, object], *, source: str) -> None:
        self.values = values
        self.source = source
        self.seen = {FORM, "death"}

    def mapping(self, key: str) -> dict[str, Any]:
        found = self._of(key, dict, "an object")
        return dict(found)

    def text(self, key: str) -> Any:
        return self._of(key, str, "text")

    def flag(self, key: str) -> Any:
        return self._of(key, bool, "true or false")

    def number(self, key: str) -> Any:
        return self._count(key, self._of(key, int, "a whole number"))

    def optional_number(self, key: str) -> Any:
        if self.values.get(key) is None:
            self.seen.add(key)
            return None
        return self.number(key)

    def capability(self) -> tuple[int, int] | None:
        self.seen.add("compute_capability")
        found = self.values.get("compute_capability")
        if found is None:
            return None
        if not isinstance(found, list) or list(map(type, found)) != [int, int]:
            self._refuse("compute_capability", "two whole numbers, such as [9, 0]")
        return found[0], found[1]

    def parts(self) -> dict[str, PartPeaks]:
        found = {}
        for part, peaks in self.mapping("parts").items():
            if part not in PARTS or not isinstance(peaks, dict) or set(peaks) != set(_COUNTERS):
                counters = ", ".join(_COUNTERS)
                self._refuse(f"parts: {part}", f"{counters} of load, forward, backward or step")
            found[part] = PartPeaks(
                **{name: self._count(f"parts: {part}: {name}", peaks[name]) for name in _COUNTERS}
            )
        return found

    def times(self) -> tuple[float, ...]:
        """Of its steps; files of the first form have none."""
        key = "step_seconds"
        self.seen.add(key)
        found = self.values.get(key, [])
        if not isinstance(found, list) or not all(type(each) in (int, float) for each in found):
            self._refuse(key, "seconds of each step, such as [0.61, 0.25, 0.25]")
        if any(each <= 0 for each in found):
            self._refuse(key, "seconds above 0")
        return tuple(map(float, found))

    def death(self) -> Death:
        found = self.mapping("death")
        if {key: type(each) for key, each in found.items()} != {"part": str, "message": str}:
            self._refuse("death", "part and message")
        return Death(part=found["part"], message=found["message"])

    def refuse_others(self) -> None:
        for key in self.values:
            if key not in self.seen:
                from memplan.errors import did_you_mean

                msg = f"{self.source}: {key}: there is no such key.{did_you_mean(key, tuple(self.seen))}"
                raise ConfigError(msg)

    def _of(self, key: str, kind: type, expected: str) -> Any:
        self.seen.add(key)
        found = self.values.get(key)
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            self._refuse(key, expected)
        return found

    def _count(self, key: str, found: object) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            self._refuse(key, "a whole number from 0 up")
        assert isinstance(found, int)
        return found

    def _refuse(self, key: str, expected: str) -> NoReturn:
        msg = f"{self.source}: {key}: expected {expected}"
        raise ConfigError(msg)


def card_of(measured: Measurement) -> GpuSpec:
    """The card that a run took place on: the catalog's, with the memory that there was for it."""
    room = measured.gpu_memory_bytes - measured.others_bytes
    return card_named(measured.gpu, room, measured.compute_capability)


def card_named(name: str, memory_bytes: int, capability: tuple[int, int] | None) -> GpuSpec:
    """A card by the name that torch prints; one that is not listed by its memory and capability.

    >>> card = card_named("NVIDIA H100 80GB HBM3", 85017493504, (9, 0))
    >>> card.gpu_id, card.capacity_bytes
    ('h100-sxm-80gb', 85017493504)
    """
    from dataclasses import replace

    from memplan.hardware.gpu import gpu_from_memory
    from memplan.sources.cards.catalog import load_gpu

    try:
        found = load_gpu(name)
    except MemplanError:
        found = gpu_from_memory(memory_bytes)
    if capability is not None and found.compute_capability != capability:
        found = replace(found, compute_capability=capability, has_bf16=capability >= (8, 0))
    return replace(found, torch_total_bytes=memory_bytes)
