"""Configuration files of the stacks people train with, and what the stacks do by default.

One module for each stack with files of its own: ``looks_like(keys)`` says whether a file's keys are
the stack's, ``preset_for(values, source)`` which defaults it has, and ``read(keys, found, given)`` puts what
the keys say into ``found``. The keys themselves are data (``memplan.sources.stacks.common.keys``), and so are the
defaults (``memplan.sources.stacks.presets``).
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from memplan.errors import ConfigError
from memplan.sources.key_tables import key_table
from memplan.sources.stacks.common.found import Found, StackSetup
from memplan.sources.stacks.common.keys import Keys
from memplan.sources.stacks.common.making import make_setup
from memplan.sources.stacks.presets import Preset, load_preset
from memplan.sources.trainer.launch import Launch

__all__ = ["STACKS", "StackSetup", "read_preset", "read_stack", "stack_of"]

STACKS = (
    "axolotl",
    "llama_factory",
    "llama_factory_v1",
    "torchtune",
    "torchtitan",
    "nemo",
    "prime_rl",
    "verl",
    "litgpt",
    "nanotron",
    "megatron",
    "unsloth",
    "lightning",
    "hf_trainer",
)
"""Stacks whose files are read, in the order in which they are looked for."""


class Reader(Protocol):
    """A stack's module."""

    NAME: str
    """What the stack is called."""

    def looks_like(self, values: Mapping[str, object]) -> bool:
        """Whether a file's values are of this stack."""
        ...

    def preset_for(self, values: Mapping[str, object], source: str, /) -> str:
        """The name of the preset whose defaults fill the file in; ``source`` is where the file lies."""
        ...

    def read(self, keys: Keys, found: Found, given: Mapping[str, object]) -> None:
        """Put what the keys say into ``found``."""
        ...


def stack_of(values: Mapping[str, object]) -> str | None:
    """The stack whose file this is; None where it is none of them.

    >>> stack_of({"base_model": "meta-llama/Llama-3.1-8B", "micro_batch_size": 2})
    'axolotl'
    """
    return next((name for name in STACKS if _reader(name).looks_like(values)), None)


def stack_names() -> tuple[str, ...]:
    """What the stacks are called whose files are read."""
    return tuple(_reader(name).NAME for name in STACKS)


def read_stack(
    values: Mapping[str, object],
    stack: str,
    *,
    source: str,
    folder: Path = Path(),
    given: Mapping[str, object] | None = None,
    preset: str | None = None,
    launch: Launch | None = None,
    model: str | None = None,
) -> StackSetup:
    """Read a stack's file; ``model`` is a built-in one that was named beside it, and is trained instead of its own.

    ``launch`` are the engine's own files; a stack that runs transformers' Trainer fills them in as the Trainer does.
    ``given`` are fields of ``TrainingSetup`` that were given beside it, which go first; ``preset`` names
    the defaults where the stack has several. Raises ``ConfigError`` for a key that the stack does not
    have or that is not modelled.
    """
    reader = _reader(stack)
    chosen = load_preset(preset or reader.preset_for(values, source))
    if chosen.stack != stack:
        msg = f"{source}: is a file of {reader.NAME}, and preset {chosen.name} is another stack's"
        raise ConfigError(msg)
    return _read(
        values, chosen, source=source, folder=folder, given=given or {}, launch=launch or Launch(),
        model=model,
    )  # fmt: skip


def read_preset(name: str, given: Mapping[str, object] | None = None) -> StackSetup:
    """A stack's defaults with the fields ``given`` over them: its file with nothing in it.

    >>> read_preset("axolotl").setup.micro_batch_size
    1
    """
    source = f"preset {name}"
    return _read(
        {}, load_preset(name), source=source, folder=Path(), given=given or {}, launch=Launch()
    )


def _read(
    values: Mapping[str, object],
    preset: Preset,
    *,
    source: str,
    folder: Path,
    given: Mapping[str, object],
    launch: Launch,
    model: str | None = None,
) -> StackSetup:
    keys = Keys(values, key_table(preset.stack), preset, source=source, folder=folder)
    beside = {name: value for name, value in given.items() if value is not None}
    found = Found(fields=preset.fields(), launch=launch, given_model=model)
    found.quantization |= _options(found.fields.pop("quantization", None))
    _reader(preset.stack).read(keys, found, beside)
    leftovers = keys.finish(found.quiet)
    found.left_out += leftovers.left_out
    found.notes += leftovers.notes
    found.notes += preset.said(beside, keys.taken, found.fields)
    _find_model(found)
    from memplan.sources.job_models import looked_up

    setup = looked_up(make_setup(found, beside, source=source, folder=folder))
    return StackSetup(
        setup=setup, model=found.model, notes=tuple(dict.fromkeys(found.notes)),
        is_launched=bool(found.arguments),
    )  # fmt: skip


def _find_model(found: Found) -> None:
    """Put a built-in model in the place of a path that is none here."""
    from memplan.sources.about_models.copied_models import model_elsewhere

    copy = model_elsewhere(found.model) if isinstance(found.model, str) else None
    if copy is not None:
        found.notes.append(f"no such path here: {copy.remark}")
        found.model = (
            {"name": copy.model.name, **copy.config()} if copy.quantization else copy.model.name
        )


def _options(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, Mapping) else {}


def _reader(stack: str) -> Reader:
    return cast("Reader", import_module(f"memplan.sources.stacks.{stack}"))
