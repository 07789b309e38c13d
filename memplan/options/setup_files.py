"""A training setup out of files and the options given beside them.

``--setup``, ``--training-args`` or ``--preset`` is where it starts; the engine's own file comes over that, and what
was typed on the command line over both. What contradicts an engine's file is refused by its reader.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from memplan.errors import UsageError
from memplan.fast_dataclass import dataclass, replace

if TYPE_CHECKING:
    from memplan.sources.trainer.launch import Launch
    from memplan.training.setup import TrainingSetup


@dataclass(frozen=True, slots=True)
class BaseSetup:
    """Where an estimate starts from."""

    setup: "TrainingSetup"
    engine_fixed: bool
    """A file says which engine runs, so there is one setup and not a comparison."""
    notes: tuple[str, ...]
    """What the files hold that the answer should name."""
    model: str | Mapping[str, object] | None = None
    """The model that a file names."""
    is_launched: bool = False
    """The files that the job is launched with are in it."""


_DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel")
"""What an engine's file may share a model by."""


def read_base(
    given: Mapping[str, object],
    *,
    setup_file: "str | TrainingSetup | None",
    training_args: str | None,
    deepspeed_config: str | None,
    accelerate_config: str | None,
    preset: str | None = None,
    named: Mapping[str, object] | None = None,
    model: object = None,
) -> BaseSetup:
    """The setup of the files named, with the ``given`` fields over it; ``model`` was named beside them.

    ``named`` are fields that were given too and are laid over it by the caller: training arguments
    are read for their engine and precision. Raises ``UsageError`` for two files that both say the
    same thing.
    """
    if deepspeed_config is not None and accelerate_config is not None:
        msg = "--deepspeed-config and --accelerate-config both name an engine: give one"
        raise UsageError(msg)
    if training_args is not None and setup_file is None:
        return _read_arguments(training_args, given, named, deepspeed_config, accelerate_config)
    known = {**given, **{name: value for name, value in (named or {}).items() if value is not None}}
    launch = _launch(deepspeed_config, accelerate_config)
    began = start_of(setup_file, training_args, preset, given=known, launch=launch, model=model)
    start, notes = began.setup, began.notes
    changes: dict[str, Any] = dict(given)
    if not began.is_launched:
        fields, said = _launched(deepspeed_config, accelerate_config, given)
        changes, notes = {**changes, **fields}, (*notes, *said)
        needed = prod(changes.get(name) or 1 for name in _DEGREES)
        if "num_gpus" not in known and "num_gpus" not in changes and start.num_gpus < needed:
            changes["num_gpus"] = needed
            notes += (
                f"{needed} GPUs, the fewest that its parallel degrees need, unless you say others",
            )
    if began.notes and "engine_options" in given and "engine_options" in changes:
        changes["engine_options"] = dict(start.engine_options) | dict(changes["engine_options"])
    setup = replace(start, **changes) if changes else start
    return BaseSetup(setup, engine_fixed=setup.engine is not None, notes=notes, model=began.model)


def _launched(
    deepspeed_config: str | None, accelerate_config: str | None, given: Mapping[str, object]
) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """The fields that the file of an engine gives, and what is to be said of it."""
    if deepspeed_config is not None:
        from memplan.sources.deepspeed_config import read_deepspeed_config

        deepspeed = read_deepspeed_config(deepspeed_config, given)
        return deepspeed.fields, deepspeed.notes
    if accelerate_config is not None:
        from memplan.sources.accelerate_config import read_accelerate_config

        accelerate = read_accelerate_config(accelerate_config, given)
        return accelerate.fields, accelerate.notes
    return {}, ()


def _launch(deepspeed_config: str | None, accelerate_config: str | None) -> "Launch | None":
    """The engine's own file, where there is one."""
    if deepspeed_config is None and accelerate_config is None:
        return None
    from memplan.sources.files import read_mapping
    from memplan.sources.trainer.launch import EngineFile, Launch

    def read(file: str | None) -> EngineFile | None:
        return None if file is None else EngineFile(values=read_mapping(file), source=file)

    return Launch(deepspeed=read(deepspeed_config), accelerate=read(accelerate_config))


def _read_arguments(
    path: str,
    given: Mapping[str, object],
    named: Mapping[str, object] | None,
    deepspeed_config: str | None,
    accelerate_config: str | None,
) -> BaseSetup:
    """Training arguments, with the file that the job is launched with where there is one."""
    from memplan.sources.trainer.launch import Launch
    from memplan.sources.training_arguments import read_arguments_file

    launch = _launch(deepspeed_config, accelerate_config) or Launch()
    read = read_arguments_file(
        path, given={**given, **(named or {})}, deepspeed=launch.deepspeed,
        accelerate=launch.accelerate,
    )  # fmt: skip
    changes: dict[str, Any] = dict(given)
    if "engine_options" in changes:
        changes["engine_options"] = {
            **dict(read.setup.engine_options),
            **dict(changes["engine_options"]),
        }
    setup = replace(read.setup, **changes) if changes else read.setup
    return BaseSetup(setup, engine_fixed=True, notes=read.notes)


def base_setup(
    setup_file: "str | TrainingSetup | None",
    training_args: str | None,
    preset: str | None = None,
    *,
    remark: "Callable[[str], None]",
    model: object = None,
) -> "TrainingSetup":
    """The setup that options start from: a file's, a preset's, or one of defaults.

    ``remark`` is given what it holds that the answer should name.
    """
    began = start_of(setup_file, training_args, preset, given={}, model=model)
    if began.notes:
        source = setup_file or training_args
        for note in began.notes:
            remark(f"{source}: {note}" if source is not None else note)
    return began.setup


def model_of(base: BaseSetup, setup_file: object) -> str | Mapping[str, object]:
    """The model that the setup's file names, where none was given; ``UsageError`` without one."""
    if base.model is None:
        msg = f"name a MODEL: {setup_file} names none (memplan models lists the built-in ones)"
        raise UsageError(msg)
    return base.model


def start_of(
    setup_file: "str | TrainingSetup | None",
    training_args: str | None,
    preset: str | None,
    *,
    given: Mapping[str, object],
    launch: "Launch | None" = None,
    model: object = None,
) -> BaseSetup:
    """What options start from, with the model it names and what is to be said of it.

    ``model`` was named beside it: what a stack's file leaves to the model goes by that one, where it is a built-in.

    Raises ``UsageError`` for two files that both say where to start.
    """
    if setup_file is not None and training_args is not None:
        msg = "--setup and --training-args both give the setup to start from: name one"
        raise UsageError(msg)
    if training_args is not None:
        _check_gaps(preset, "--training-args has its own defaults: use --setup")
        from memplan.sources.training_arguments import read_arguments_file

        read = read_arguments_file(training_args)
        return BaseSetup(read.setup, engine_fixed=True, notes=read.notes)
    if setup_file is not None and not isinstance(setup_file, str):
        _check_gaps(preset, "one that is made already has no gaps: name a file")
        return BaseSetup(setup_file, engine_fixed=setup_file.engine is not None, notes=())
    if setup_file is not None:
        from memplan.sources.setup_file import read_setup_file

        file = read_setup_file(
            setup_file, given=given, preset=preset, launch=launch, model=_builtin_name(model)
        )
        return BaseSetup(
            file.setup, file.engine_fixed, file.notes, file.model, is_launched=file.is_launched
        )
    if preset is not None:
        from memplan.sources.stacks import read_preset

        found = read_preset(preset, given)
        return BaseSetup(found.setup, engine_fixed=True, notes=found.notes)
    from memplan.training.setup import TrainingSetup

    return BaseSetup(TrainingSetup(), engine_fixed=False, notes=())


def _builtin_name(model: object) -> str | None:
    """What a built-in model is called; None where it is none, or nobody named one."""
    from memplan.sources.about_models.registry import find_builtin

    name = model if isinstance(model, str) else getattr(model, "name", None)
    found = find_builtin(name) if isinstance(name, str) else None
    is_one = isinstance(model, str) or getattr(model, "source", None) == "built-in"
    return found.name if found is not None and is_one else None


def _check_gaps(preset: str | None, why_none: str) -> None:
    if preset is not None:
        msg = f"--preset fills in a setup, and {why_none}"
        raise UsageError(msg)
