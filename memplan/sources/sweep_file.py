"""A sweep written in YAML: what to train, on what, and which settings to vary.

``configs/sweeps`` has examples. Keys:

===========  ======================================================================================
version      1
model        what ``memplan estimate`` takes, or a mapping: name, task, family, num_labels, revision
hardware     a mapping: gpu (a name or a list), gpu_memory (such as 46GiB); all are judged by;
             cpu_memory of a node (such as 512GiB), judged too
setup        fields of ``TrainingSetup`` that stay as they are
axes         fields of ``TrainingSetup`` and the values of each: one, a list, or a range
             (``0-3`` every integer, ``1..32`` doubling); ``max`` as micro_batch_size or seq_len:
             the largest that fits the one GPU
constraints  global_batch_size: sequences of one optimizer step, which fixes the accumulation
exclude      a list of mappings: setups in which all fields named have (one of) these values
===========  ======================================================================================
"""

from collections.abc import Mapping
from pathlib import Path

from memplan.errors import ConfigError, SetupError, UsageError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.search.grid import Grid
from memplan.search.quantity import MAX, OF_SETUP
from memplan.search.ranges import parse_range
from memplan.sources.setup_file import check_field, setup_from_mapping
from memplan.units import parse_bytes

VERSION = 1
"""Of the form described above."""
_KEYS = ("version", "model", "hardware", "setup", "axes", "constraints", "exclude", "notes")
_MARKS = frozenset({"axes", "hardware", "constraints", "exclude"})
"""Keys that only a sweep has: a model's YAML has none of them."""
_MODEL_KEYS = ("name", "task", "family", "num_labels", "revision")
_HARDWARE_KEYS = ("gpu", "gpu_memory", "cpu_memory")
_CONSTRAINTS = ("global_batch_size",)
_RANGES = frozenset({
    "num_gpus", "num_nodes", "zero_stage", "micro_batch_size", "gradient_accumulation_steps",
    "seq_len", "target_seq_len", "tensor_parallel", "pipeline_parallel", "virtual_stages",
    "context_parallel", "expert_parallel", "mlp_tiles",
})  # fmt: skip
"""Axes whose text may be a range of whole numbers."""
_FROM_ZERO = frozenset({"zero_stage", "mlp_tiles"})
"""Those of which 0 is a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChoice:
    """Which model a sweep is about: the arguments of ``load_model``."""

    name: str
    task: str | None = None
    family: str | None = None
    num_labels: int | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepFile:
    """What a sweep file says."""

    model: ModelChoice | None
    """None where the file leaves it open."""
    gpus: tuple[str, ...]
    """Names of GPUs to judge by; empty: the default ones."""
    gpu_memory: str | None
    """Usable memory of a card that is not listed."""
    node_memory_bytes: int | None
    """CPU RAM of one node [bytes]."""
    grid: Grid


def is_sweep_file(path: str | Path) -> bool:
    """Whether a path leads to a YAML file that describes a sweep, not a model."""
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        return False
    from memplan.sources.files import read_mapping

    keys = read_mapping(path).keys()
    return bool(keys & _MARKS) or "version" in keys


def read_sweep(path: str | Path) -> SweepFile:
    """Read a sweep from a YAML file.

    Raises ``ConfigError`` when the file cannot be read, or a key is unknown, missing or wrong; the
    message names the nearest key.
    """
    from memplan.sources.files import read_mapping

    return sweep_from_mapping(read_mapping(path), source=str(path))


def sweep_from_mapping(values: Mapping[str, object], *, source: str) -> SweepFile:
    """Make a sweep from what a file holds; ``source`` names it in messages."""
    _check_keys(values, _KEYS, source=source)
    version = values.get("version")
    if version != VERSION:
        problem = "is missing" if version is None else f"{version!r} is not known"
        msg = f"{source}: version: {problem}; this memplan reads version {VERSION}"
        raise ConfigError(msg)
    hardware = _section(values, "hardware", source=source)
    _check_keys(hardware, _HARDWARE_KEYS, source=source, section="hardware.")
    return SweepFile(
        model=_model(values.get("model"), source=source),
        gpus=_texts(hardware.get("gpu"), "hardware.gpu", source=source),
        gpu_memory=_text(hardware.get("gpu_memory"), "hardware.gpu_memory", source=source),
        node_memory_bytes=_size(hardware, "cpu_memory", source=source),
        grid=_grid(values, source=source),
    )


def _size(hardware: Mapping[str, object], key: str, *, source: str) -> int | None:
    text = _text(hardware.get(key), f"hardware.{key}", source=source)
    try:
        return parse_bytes(text) if text is not None else None
    except UsageError as error:
        msg = f"{source}: hardware.{key}: {error}"
        raise ConfigError(msg) from None


def read_axis(name: str, value: object, *, option: str = "") -> object:
    """The values of one axis: text becomes a list, or a range of whole numbers.

    ``option`` is named in messages. Raises ``UsageError``.

    >>> read_axis("zero_stage", "0-3"), read_axis("checkpointing", "none,full")
    ([0, 1, 2, 3], ['none', 'full'])
    """
    if not isinstance(value, str):
        return value
    if name in OF_SETUP and value.strip() == MAX:
        return [MAX]
    if name in _RANGES:
        return parse_range(value, option=option or name, minimum=int(name not in _FROM_ZERO))
    if name == "freeze":  # a comma joins its parts
        return [value]
    parts = [part.strip() for part in value.split(",")]
    if "" in parts:
        msg = f"{option or name}: {value!r} names nothing between two commas"
        raise UsageError(msg)
    if name in _FLAGS:
        return [_flag(part, option or name) for part in parts]
    if name in _NUMBERS:
        return [_number(part, option or name, meant=_NUMBERS[name]) for part in parts]
    return parts


_NUMBERS = {
    "dropout": "a probability such as 0.1",
    "offload_activations_ratio": "a share such as 0.5",
}
"""Axes of numbers that need not be whole, and what each is."""


_FLAGS = frozenset({"sequence_parallel"})
"""Axes of what is or is not."""


def _flag(text: str, option: str) -> bool:
    if text.lower() not in ("true", "false"):
        msg = f"{option}: {text!r} is neither true nor false: in a sweep it takes true,false"
        raise UsageError(msg)
    return text.lower() == "true"


def _number(text: str, option: str, *, meant: str) -> float:
    try:
        return float(text)
    except ValueError:
        msg = f"{option}: {text!r} is not {meant}"
        raise UsageError(msg) from None


def _grid(values: Mapping[str, object], *, source: str) -> Grid:
    base = setup_from_mapping(
        _section(values, "setup", source=source), source=source, section="setup."
    )
    constraints = _section(values, "constraints", source=source)
    _check_keys(constraints, _CONSTRAINTS, source=source, section="constraints.")
    axes = {}
    for name, value in _section(values, "axes", source=source).items():
        check_field(name, source=source, section="axes.")
        axes[name] = _axis(name, value, source=source)
    batch = constraints.get("global_batch_size")
    try:
        return Grid(
            axes=axes,
            base=base,
            global_batch_size=batch,  # type: ignore[arg-type]
            exclude=_exclusions(values.get("exclude"), source=source),
        )
    except SetupError as error:
        msg = f"{source}: {error}"
        raise ConfigError(msg) from None


def _axis(name: str, value: object, *, source: str) -> object:
    """One axis of a file; a list may hold ranges too."""
    where = f"{source}: axes.{name}"
    try:
        if not isinstance(value, list):
            return read_axis(name, value, option=where)
        found: list[object] = []
        for each in value:
            if isinstance(each, dict | list):
                msg = f"{where}: write single values, not a mapping or a list in the list"
                raise ConfigError(msg)
            read = read_axis(name, each, option=where)
            found += read if isinstance(read, list) else [read]
    except UsageError as error:
        raise ConfigError(str(error)) from None
    return found


def _exclusions(value: object, *, source: str) -> tuple[Mapping[str, object], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        msg = f"{source}: exclude: write a list of mappings, such as - {{zero_stage: 3}}"
        raise ConfigError(msg)
    found = []
    for entry in value:
        for name in entry:
            check_field(str(name), source=source, section="exclude: ")
        found.append({name: _exclusion(name, each, source=source) for name, each in entry.items()})
    return tuple(found)


def _exclusion(name: str, value: object, *, source: str) -> object:
    try:
        return read_axis(name, value, option=f"{source}: exclude: {name}")
    except UsageError as error:
        raise ConfigError(str(error)) from None


def _model(value: object, *, source: str) -> ModelChoice | None:
    if value is None:
        return None
    if isinstance(value, str):
        return ModelChoice(name=value)
    if not isinstance(value, Mapping):
        msg = f"{source}: model: write a name, or a mapping with a name"
        raise ConfigError(msg)
    _check_keys(value, _MODEL_KEYS, source=source, section="model.")
    name = _text(value.get("name"), "model.name", source=source)
    if name is None:
        msg = f"{source}: model.name: is missing"
        raise ConfigError(msg)
    labels = value.get("num_labels")
    if labels is not None and (isinstance(labels, bool) or not isinstance(labels, int)):
        msg = f"{source}: model.num_labels: write a whole number, not {labels!r}"
        raise ConfigError(msg)
    return ModelChoice(
        name=name,
        task=_text(value.get("task"), "model.task", source=source),
        family=_text(value.get("family"), "model.family", source=source),
        num_labels=labels,
        revision=_text(value.get("revision"), "model.revision", source=source),
    )


def _section(values: Mapping[str, object], key: str, *, source: str) -> Mapping[str, object]:
    found = values.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        msg = f"{source}: {key}: write a mapping"
        raise ConfigError(msg)
    for name in found:
        if not isinstance(name, str):
            msg = f"{source}: {key}: the key {name!r} is not text: put it in quotes"
            raise ConfigError(msg)
    return found


def _text(value: object, key: str, *, source: str) -> str | None:
    if value is not None and not isinstance(value, str):
        msg = f"{source}: {key}: write text, not {value!r}"
        raise ConfigError(msg)
    return value


def _texts(value: object, key: str, *, source: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        msg = f"{source}: {key}: write a name or a list of names"
        raise ConfigError(msg)
    return tuple(value)


def _check_keys(
    values: Mapping[str, object], known: tuple[str, ...], *, source: str, section: str = ""
) -> None:
    for key in values:
        if key not in known:
            hint = did_you_mean(str(key), known) or f" There are: {', '.join(known)}"
            msg = f"{source}: unknown key {section}{key}.{hint}"
            raise ConfigError(msg)
