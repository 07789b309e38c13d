"""From what a stack's reader has found to a ``TrainingSetup``."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from memplan.errors import ConfigError, SetupError
from memplan.sources.stacks.common.found import Found
from memplan.training.jobs import Job
from memplan.training.setup import LOADING_OPTION, SETUP_FIELDS, TrainingSetup

_FOUR_BITS = ("nf4", "fp4")
_OF_FOUR_BITS = ("double_quant", "quant_storage", "quant_keeps_inputs")
"""How a base of four bits is quantized, and no other."""
_DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
"""Fields whose product divides the number of GPUs; experts' that of data-parallel ranks."""


def make_setup(
    found: Found, given: Mapping[str, object], *, source: str, folder: Path
) -> TrainingSetup:
    """Make the setup, the fields given beside the file over it.

    What ``TrainingSetup`` cannot say yet is named as left out. Raises ``ConfigError``.
    """
    fields = {**found.fields, **{name: given[name] for name in SETUP_FIELDS if name in given}}
    if fields.get("quantize") not in (None, "none"):
        packed = fields["quantize"] in _FOUR_BITS
        own = found.quantization.items()
        found.options.update({key: each for key, each in own if packed or key not in _OF_FOUR_BITS})
    if "num_gpus" in given and "num_nodes" not in given:
        fields.pop("num_nodes", None)
    options = {**found.options, **dict(_pairs(given.get("engine_options")))}
    left_out = list(found.left_out)
    for name in [name for name in fields if name not in SETUP_FIELDS]:
        value = fields.pop(name)
        if value not in (None, "none", False):
            left_out.append(f"{name} {_words(value)}")
    fields["left_out"] = tuple(left_out)
    try:
        if found.arguments:
            made = _of_arguments(found, fields, options, given, source=source, folder=folder)
        else:
            if options:
                fields["engine_options"] = options
            made = TrainingSetup(**_with_gpus(fields, found))  # type: ignore[arg-type]
        return _as_loaded(made, found)
    except ConfigError:
        raise
    except SetupError as error:
        msg = f"{source}: {error}"
        raise ConfigError(msg) from None


def _as_loaded(setup: TrainingSetup, found: Found) -> TrainingSetup:
    """With the way in which the stack loads a model, unless it is said."""
    options = dict(setup.engine_options)
    if LOADING_OPTION in options or not found.device_map.holds_for(setup):
        return setup
    return replace(setup, engine_options={**options, LOADING_OPTION: True})


def _of_arguments(
    found: Found,
    fields: dict[str, object],
    options: dict[str, object],
    given: Mapping[str, object],
    *,
    source: str,
    folder: Path,
) -> TrainingSetup:
    """What the Trainer makes of the arguments that the stack hands it, and the stack's own over it."""
    from memplan.sources.trainer.launch import Launch
    from memplan.sources.training_arguments import arguments_file

    if "num_gpus" not in given and found.launch == Launch():
        fields = _with_gpus(fields, found)
    counted = fields.get("num_gpus")
    beside = {"num_gpus": counted, **given} if counted is not None else given
    read = arguments_file(
        found.arguments, source=source, folder=folder, given=beside,
        deepspeed=found.launch.deepspeed, accelerate=found.launch.accelerate,
        loading=found.loading,
    )  # fmt: skip
    notes, missing = read.notes, _texts(read.setup.left_out)
    if not read.setup.job.is_plain:
        fields["job"] = _with_preset(read.setup.job, fields.pop("job", None))
    elif fields.get("job") is not None and found.loading.trainer is not None:
        # The job says what the trainer's config is otherwise taken for.
        own = (f"{found.loading.trainer}:", f"{found.loading.trainer} (", "beta (", "use_vllm (")
        notes = tuple(each for each in notes if not each.startswith(own))
        missing = tuple(each for each in missing if not each.startswith(own))
        fields.setdefault("micro_batch_size", found.arguments["per_device_train_batch_size"])
    found.notes += notes
    if options:
        fields["engine_options"] = {**dict(_pairs(read.setup.engine_options)), **options}
    fields["left_out"] = (*_texts(fields["left_out"]), *missing)
    return replace(read.setup, **fields)  # type: ignore[arg-type]


def _with_preset(job: Job, preset: object) -> Job:
    """A job that arguments make, and how its stack computes log-probabilities, which no argument says."""
    if not isinstance(preset, Mapping) or preset.get("kind") != job.kind.value:
        return job
    return replace(job, log_probabilities=preset.get("log_probabilities", job.log_probabilities))


def _with_gpus(fields: dict[str, object], found: Found) -> dict[str, object]:
    """As many GPUs as the degrees need, where no one said how many there are."""
    needed = 1
    for name in _DEGREES:
        degree = fields.get(name, 1)
        needed *= degree if isinstance(degree, int) else 1
    if "num_gpus" not in fields and needed > 1:
        fields["num_gpus"] = needed
        found.notes.append(
            f"{needed} GPUs, the fewest that its parallel degrees need, unless you say others"
        )
    return fields


def _pairs(options: object) -> list[tuple[str, object]]:
    if isinstance(options, Mapping):
        return list(options.items())
    return list(options) if isinstance(options, tuple | list) else []


def _texts(value: object) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else ()


def _words(value: object) -> str:
    """A field's value in one short text."""
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_words(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(getattr(value, "value", value))
