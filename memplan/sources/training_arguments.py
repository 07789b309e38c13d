"""Hugging Face ``TrainingArguments`` (transformers 5.23), read from JSON or YAML.

TRL's ``SFTConfig``, ``DPOConfig``, ``GRPOConfig`` and ``RewardConfig`` are training arguments too: a
file that holds a name of theirs has their defaults. Every other name is refused. They say nothing of
the model and the number of GPUs: those are given beside them. ``deepspeed`` may be a mapping or the
path of a ``ds_config.json``, and ``fsdp_config`` a mapping or a path, as the Trainer takes them; paths
are relative to the file's folder.
"""

from collections.abc import Mapping
from pathlib import Path

from memplan.errors import ConfigError, SetupError
from memplan.fast_dataclass import dataclass
from memplan.sources.trainer.engines import Arguments
from memplan.sources.trainer.keys import check_names, stop_at
from memplan.sources.trainer.launch import EngineFile, Loading
from memplan.training.setup import TrainingSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class ArgumentsFile:
    """What a file of arguments says, in memplan's words."""

    setup: TrainingSetup
    notes: tuple[str, ...] = ()
    """Arguments that move memory and that the answer should name."""


def read_training_arguments(path: str | Path, base: TrainingSetup | None = None) -> TrainingSetup:
    """Read a setup from a file of training arguments.

    ``base`` holds what they do not say. Raises ``ConfigError`` when the file cannot be read, has a
    name that no class of arguments has, or a value that is wrong or not modelled.
    """
    return read_arguments_file(path, base).setup


def read_arguments_file(
    path: str | Path,
    base: TrainingSetup | None = None,
    *,
    given: Mapping[str, object] | None = None,
    deepspeed: EngineFile | None = None,
    accelerate: EngineFile | None = None,
) -> ArgumentsFile:
    """The same with what the answer should name.

    ``given`` are fields of ``TrainingSetup`` that were given beside the file: the engine and the
    precision decide what its flags mean. ``deepspeed`` and ``accelerate`` are files that the job is
    launched with; the Trainer's flags and sizes fill in what they leave open.
    """
    from memplan.sources.files import read_mapping

    return arguments_file(
        read_mapping(path), base, source=str(path), folder=Path(path).parent, given=given,
        deepspeed=deepspeed, accelerate=accelerate,
    )  # fmt: skip


def setup_from_arguments(
    values: Mapping[str, object],
    base: TrainingSetup | None = None,
    *,
    source: str,
    folder: Path = Path(),
) -> TrainingSetup:
    """Make a setup from training arguments; ``arguments_file`` also says what it leaves out.

    >>> setup_from_arguments({"bf16": True, "per_device_train_batch_size": 4}, source="example")
    ... # doctest: +ELLIPSIS
    TrainingSetup(num_gpus=1, ... micro_batch_size=4, ... precision=<Precision.BF16_AMP...>, ...)
    """
    return arguments_file(values, base, source=source, folder=folder).setup


def arguments_file(
    values: Mapping[str, object],
    base: TrainingSetup | None = None,
    *,
    source: str,
    folder: Path = Path(),
    given: Mapping[str, object] | None = None,
    deepspeed: EngineFile | None = None,
    accelerate: EngineFile | None = None,
    loading: Loading | None = None,
) -> ArgumentsFile:
    """Read arguments from a mapping, as ``read_arguments_file`` does from a file."""
    check_names(values, source=source)
    stop_at(values, source=source)
    reader = Arguments(
        values, base or TrainingSetup(), given or {}, loading or Loading(), source=source,
        folder=folder,
    )  # fmt: skip
    try:
        setup = reader.setup(deepspeed, accelerate)
    except ConfigError:
        raise
    except SetupError as error:
        msg = f"{source}: {error}"
        raise ConfigError(msg) from None
    return ArgumentsFile(setup=setup, notes=tuple(dict.fromkeys(reader.notes)))
