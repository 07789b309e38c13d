"""A training setup written in YAML: the fields of ``TrainingSetup``, under their own names.

``configs/setups`` has examples. Every key is optional; ``name`` and ``notes`` are for the reader, and
``preset`` names a training stack whose defaults fill in the rest (``memplan.sources.stacks``). A file of such a
stack's own, which its keys give away, is read as the stack reads it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.errors import ConfigError, SetupError, did_you_mean
from memplan.fast_dataclass import MISSING, dataclass, fields, replace
from memplan.text import shown
from memplan.training.setup import SETUP_FIELDS, TrainingSetup

if TYPE_CHECKING:
    from memplan.sources.trainer.launch import Launch

_REMARKS = ("name", "notes")
"""Keys that say something to the reader alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetupFile:
    """What a file of a setup says."""

    setup: TrainingSetup
    model: str | Mapping[str, object] | None = None
    """The model that it names, or its config: what ``load_model`` takes."""
    notes: tuple[str, ...] = ()
    """What the answer should say of it."""
    engine_fixed: bool = False
    """It says which engine runs."""
    is_launched: bool = False
    """The files that the job is launched with are in it."""


def read_setup(path: str | Path) -> TrainingSetup:
    """Read a setup from a YAML (or JSON) file, memplan's own or a training stack's.

    Raises ``ConfigError`` when the file cannot be read, or a key is unknown or wrong.
    """
    return read_setup_file(path).setup


def read_setup_file(
    path: str | Path,
    *,
    given: Mapping[str, object] | None = None,
    preset: str | None = None,
    launch: "Launch | None" = None,
    model: str | None = None,
) -> SetupFile:
    """The same with the model that the file names, and what the answer should say of it.

    ``model`` is a built-in one that was named beside it.

    ``given`` are fields that were given beside it, which go first; ``preset`` names a training stack
    whose defaults fill in what the file leaves out; ``launch`` are files that the job is launched with, which a
    stack of transformers' Trainer reads with its own.
    """
    from memplan.sources.files import read_mapping
    from memplan.sources.stacks import read_stack, stack_of

    values = read_mapping(path)
    if values.keys() <= _OWN_KEYS:
        return own_setup(values, source=str(path), given=given, preset=preset)
    stack = stack_of(values)
    own = _plugged(values, source=str(path)) if stack is None else None
    if own is not None:
        return own
    if stack is None:
        _refuse_companion(values, source=str(path))
        _refuse_unrecognised(values, source=str(path))
        return own_setup(values, source=str(path), given=given, preset=preset)
    read = read_stack(
        values, stack, source=str(path), folder=Path(path).parent, given=given, preset=preset,
        launch=launch, model=model,
    )  # fmt: skip
    return SetupFile(
        setup=read.setup, model=read.model, notes=read.notes, engine_fixed=True,
        is_launched=read.is_launched and launch is not None,
    )  # fmt: skip


def _plugged(values: Mapping[str, object], *, source: str) -> SetupFile | None:
    """What the first plug-in reads that takes the file for its own; None: none does."""
    from memplan.sources.plugins import all_of, asked_safely

    for reader in all_of("readers"):
        if asked_safely(source, reader.looks_like, values):
            found = asked_safely(source, reader.read, values)
            if not isinstance(found, Mapping):
                msg = f"{source}: the plug-in that reads it returns {shown(found)}, not fields of a setup"
                raise ConfigError(msg)
            fields = {key: value for key, value in found.items() if key != "model"}
            made = own_setup(fields, source=source)
            return replace(made, model=found.get("model"), engine_fixed=True)
    return None


def own_setup(
    values: Mapping[str, object],
    *,
    source: str,
    section: str = "",
    given: Mapping[str, object] | None = None,
    preset: str | None = None,
) -> SetupFile:
    """A setup in memplan's own words, over the defaults of the stack that ``preset`` names."""
    named = values.get("preset")
    if named is not None and preset is None:
        preset = str(named)
    own = {key: value for key, value in values.items() if key != "preset"}
    if preset is None:
        setup = setup_from_mapping(own, source=source, section=section)
        return SetupFile(setup=setup, engine_fixed=setup.engine is not None)
    from memplan.sources.stacks import read_preset

    fields = _given_fields(own, source=source, section=section)
    try:
        read = read_preset(preset, {**fields, **(given or {})})
    except SetupError as error:
        msg = f"{source}: {section}{error}"
        raise ConfigError(msg) from None
    except ConfigError as error:
        msg = str(error) if str(error).startswith(source) else f"{source}: {section}{error}"
        raise ConfigError(msg) from None
    return SetupFile(setup=read.setup, notes=read.notes, engine_fixed=True)


def _refuse_companion(values: Mapping[str, object], *, source: str) -> None:
    """Refuse a file that is launched with another, and says half of a setup."""
    for option, marks in _COMPANIONS.items():
        if values.keys() & marks:
            msg = (
                f"{source}: says how a job is launched, not the whole setup: give it as `{option}`"
            )
            raise ConfigError(msg)


def _refuse_unrecognised(values: Mapping[str, object], *, source: str) -> None:
    """Refuse a file that is no setup, and of no stack that is known.

    A file with a single key of a setup's own is one with slips.
    """
    if not values or values.keys() & (_OWN_KEYS - _COMMON) or _is_slip(values):
        return
    from memplan.sources.stacks import stack_names

    known = ", ".join(stack_names())
    msg = (
        f"{source}: is not recognised: neither a setup of memplan's (`configs/setups` has examples) nor a file of "
        f"{known}"
    )
    raise ConfigError(msg)


_COMMON = frozenset({"name", "notes", "optimizer", "precision", "adapter", "compile", "kernels"})
"""Keys of a setup that other files have too."""


def _is_slip(values: Mapping[str, object]) -> bool:
    """Whether a key is a setup's with a slip in it: of one or two keys, any is taken for one."""
    return len(values) <= 2 and any(did_you_mean(str(key), SETUP_FIELDS) for key in values)


_COMPANIONS = {
    "accelerate_config": {"distributed_type", "compute_environment", "main_training_function"},
    "deepspeed_config": {"zero_optimization", "train_micro_batch_size_per_gpu"},
}
"""Options for files of which a setup may need one more, and keys that give such files away."""


def setup_from_mapping(
    values: Mapping[str, object], *, source: str, section: str = ""
) -> TrainingSetup:
    """Make a setup from its fields; ``source`` and ``section`` say where they were read.

    >>> setup_from_mapping({"num_gpus": 8, "zero_stage": 3}, source="example").zero_stage.name
    'PARAMETERS'
    """
    if "preset" in values:
        return own_setup(values, source=source, section=section).setup
    given = _given_fields(values, source=source, section=section)
    try:
        return TrainingSetup(**given)  # type: ignore[arg-type]
    except SetupError as error:
        msg = f"{source}: {section}{error}"
        raise ConfigError(msg) from None


def _given_fields(values: Mapping[str, object], *, source: str, section: str) -> dict[str, object]:
    given = {}
    for key, value in values.items():
        if key in _REMARKS:
            continue
        check_field(key, source=source, section=section)
        given[key] = _checked(key, value, source=source, section=section)
        if key in ("job", "lengths"):
            given[key] = _looked_up(key, value, source=source, section=section)
    return given


def _looked_up(key: str, value: object, *, source: str, section: str) -> object:
    """A job with its models, or lengths out of a file."""
    try:
        if key == "job":
            from memplan.sources.job_models import with_models
            from memplan.training.jobs import Job

            return with_models(Job.read(value))
        if isinstance(value, str):
            from memplan.sources.lengths_file import read_lengths

            return read_lengths(value)
    except SetupError as error:
        msg = f"{source}: {section}{error}"
        raise ConfigError(msg) from None
    return value


def check_field(key: str, *, source: str, section: str = "") -> None:
    """Refuse a key that is no field of ``TrainingSetup``, with the nearest name."""
    if key in SETUP_FIELDS:
        return
    hint = did_you_mean(key, SETUP_FIELDS) or f" There are: {', '.join(SETUP_FIELDS)}"
    msg = f"{source}: {section}{key}: no such setting.{hint}"
    raise ConfigError(msg)


def _checked(key: str, value: object, *, source: str, section: str) -> object:
    """Refuse a value of the wrong kind, which ``TrainingSetup`` takes the word of its types for."""
    default = _DEFAULTS[key]
    problem = ""
    if value is None and default is not None:
        problem = "is empty: give a value or leave the key out"
    elif isinstance(default, bool) and not isinstance(value, bool):
        problem = f"write true or false, not {value!r}"
    elif key == "dropout" and (isinstance(value, bool) or not isinstance(value, int | float)):
        problem = "" if value is None else f"write a probability such as 0.1, not {value!r}"
    elif key in _TEXTS and not isinstance(value, str | None):
        problem = f"write text, not {value!r}"
    elif key == "engine_options" and not isinstance(value, Mapping):
        problem = "write a mapping of the engine's own settings"
    elif key == "optimizer_options" and not isinstance(value, Mapping):
        problem = "write a mapping of the optimizer's own settings, such as {rank: 64}"
    elif key == "engine_options" and isinstance(value, Mapping):
        problem = _option_problem(value)
    elif isinstance(value, Mapping | list) and key not in _MAPPINGS:
        problem = f"write one value, not {'a list' if isinstance(value, list) else 'a mapping'}"
    if problem:
        msg = f"{source}: {section}{key}: {problem}"
        raise ConfigError(msg)
    return value


def _option_problem(options: Mapping[object, object]) -> str:
    """What is wrong with the first of an engine's settings that cannot be one."""
    for name, value in options.items():
        if not isinstance(name, str):
            return f"the key {name!r} is not text: put it in quotes"
        if isinstance(value, Mapping | list):
            kind = "a list" if isinstance(value, list) else "a mapping"
            return f"{name}: write one value, not {kind}"
    return ""


_OWN_KEYS = frozenset({*SETUP_FIELDS, *_REMARKS, "preset"})
"""Keys of a setup in memplan's own words."""
_MAPPINGS = frozenset(
    {
        "engine_options",
        "optimizer_options",
        "adapter",
        "quantize",
        "job",
        "evaluation",
        "lengths",
        "layers_per_stage",
    }
)
_TEXTS = frozenset({"freeze", "kernels", "pipeline_schedule"})
_DEFAULTS = {
    each.name: each.default if each.default is not MISSING else None
    for each in fields(TrainingSetup)
}
