"""What has been written for a framework, read again: what its file cannot say shows in the difference.

A file is read by the reader that a user's own would be, so there is no list of what a format lacks: whatever is
otherwise when it comes back is set by hand, beside the file or in the script.
"""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from memplan.dtypes import DType
from memplan.errors import ConfigError, SetupError
from memplan.fast_dataclass import replace
from memplan.memory.engine_options import loads_by_device_map
from memplan.training.adapters import DEFAULT_ALPHA, Lora
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.quantization import QuantizationKind
from memplan.training.setup import LOADING_OPTION, SETUP_FIELDS, TrainingSetup
from memplan.training.setup_derived import GPUS_PER_NODE

SOURCE = "emit"
_STACKS = {
    "trl-sft": ("hf_trainer", "trl-sft"), "llama-factory": ("llama_factory", None),
}  # fmt: skip
"""Whose reader takes what is written for a framework, and over which defaults."""
_PLACES = ("num_gpus", "num_nodes")
"""Where a job runs: what launches it says so, and few files do."""
_KERNELS = {
    "attention": "attention", "norm": "norm", "mlp": "feed_forward", "rotary": "rotary", "scan": "scan",
    "loss": "loss",
}  # fmt: skip
"""Fields that override a choice of kernels, and what they are called there."""
_APART = frozenset({"engine_options", "left_out", *_KERNELS})
_NO_MORE_DIFFERENCES = 4
"""Rounds: what is set by hand may bring out more of it."""


def read_values(
    values: Mapping[str, object], framework: str, given: Mapping[str, object]
) -> TrainingSetup:
    """The setup that a framework's values say, with the ``given`` fields beside them.

    Raises ``ConfigError`` or ``SetupError``.
    """
    if framework == "training-args":
        return _read_arguments(values, given)
    if framework in ("deepspeed", "accelerate"):
        return _read_engine_file(values, framework, given)
    from memplan.sources.stacks import read_stack

    if framework == "megatron":
        values = {name.replace("-", "_"): value for name, value in values.items()}
    stack, preset = _STACKS.get(framework, (framework, None))
    return read_stack(_nested(values), stack, source=SOURCE, given=given, preset=preset).setup


def _read_engine_file(
    values: Mapping[str, object], framework: str, given: Mapping[str, object]
) -> TrainingSetup:
    """A file of the engine alone, laid over what was given."""
    if framework == "deepspeed":
        from memplan.sources.deepspeed_config import deepspeed_fields

        fields = deepspeed_fields(values, given, source=SOURCE).fields
    else:
        from memplan.sources.accelerate_config import accelerate_fields

        fields = accelerate_fields(values, given, source=SOURCE).fields
    return TrainingSetup(**{**given, **fields})  # type: ignore[arg-type]


def _read_arguments(values: Mapping[str, object], given: Mapping[str, object]) -> TrainingSetup:
    from memplan.sources.training_arguments import arguments_file

    read = arguments_file(values, source=SOURCE, folder=Path(), given=given).setup
    own = dict(given)
    if "engine_options" in own:
        own["engine_options"] = {**dict(read.engine_options), **_mapping(own["engine_options"])}
    return replace(read, **own)  # type: ignore[arg-type]


def _nested(values: Mapping[str, object]) -> dict[str, object]:
    """Names with dots as sections.

    >>> _nested({"a.b": 1, "a.c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    found: dict[str, object] = {}
    for name, value in values.items():
        inner, parts = found, name.split(".")
        for part in parts[:-1]:
            made = inner.setdefault(part, {})
            assert isinstance(made, dict)
            inner = made
        inner[parts[-1]] = value
    return found


def set_by_hand(
    setup: TrainingSetup, values: Mapping[str, object], framework: str
) -> dict[str, object]:
    """Fields that come back otherwise, with what they are to be; ``engine_options`` one by one.

    Raises ``SetupError`` where no field that is set beside the values makes them say the setup.
    """
    asked = setup.resolve()
    given: dict[str, object] = {name: getattr(asked, name) for name in _PLACES}
    more: dict[str, object] = {}
    for _ in range(_NO_MORE_DIFFERENCES):
        try:
            more = differences(asked, read_values(values, framework, given))
        except ConfigError as error:
            msg = f"emit: {framework} cannot be told this setup: {error}"
            raise SetupError(msg) from None
        if not more:
            break
        if "engine_options" in more:
            more["engine_options"] = {
                **_mapping(given.get("engine_options")), **_mapping(more["engine_options"]),
            }  # fmt: skip
        given |= more
    else:
        msg = f"emit: {framework} cannot be told {', '.join(more)}"
        raise SetupError(msg)
    says_places = framework == "accelerate"
    usual = -(-asked.num_gpus // GPUS_PER_NODE)
    return {
        name: value
        for name, value in given.items()
        if not (name in _PLACES and says_places) and (name, value) != ("num_nodes", usual)
    }


def differences(asked: TrainingSetup, found: TrainingSetup) -> dict[str, object]:
    """Fields in which two setups differ with every default filled in, as the first has them."""
    first, second = asked.resolve(), found.resolve()
    more = {
        name: _plain(getattr(first, name))
        for name in SETUP_FIELDS
        if name not in _APART
        and _comparable(getattr(first, name)) != _comparable(getattr(second, name))
    } | _other_kernels(first, second)
    if more.get("target_seq_len") == first.seq_len:
        more.pop("target_seq_len", None)  # it follows
    if first.chosen_engine is second.chosen_engine:
        options = _other_options(first, second)
        if options:
            more["engine_options"] = options
    elif first.engine_options:
        more["engine_options"] = dict(_mapping(first.engine_options))
    return more


def _comparable(value: object) -> object:
    """An adapter with the scale that its package takes where none is said."""
    if isinstance(value, Lora) and value.alpha is None:
        return replace(value, alpha=DEFAULT_ALPHA)
    return value


def _other_kernels(first: TrainingSetup, second: TrainingSetup) -> dict[str, object]:
    """Kernels that run otherwise, whether a preset or a field says so."""
    mine, theirs = first.chosen_kernels, second.chosen_kernels
    return {
        name: _plain(getattr(mine, own))
        for name, own in _KERNELS.items()
        if getattr(mine, own) is not getattr(theirs, own)
    }


def _other_options(first: TrainingSetup, second: TrainingSetup) -> dict[str, object]:
    """The engine's settings that differ, defaults filled in, in words that can be given."""
    mine, theirs = _options(first), _options(second)
    return {name: mine[name] for name in mine if mine[name] != theirs.get(name)}


def _options(setup: TrainingSetup) -> dict[str, object]:
    engine, own = setup.chosen_engine, dict(_mapping(setup.engine_options))
    own[LOADING_OPTION] = loads_by_device_map(setup)
    how = setup.chosen_quantization
    if how is not None and how.kind in (QuantizationKind.NF4, QuantizationKind.FP4):
        own["double_quant"] = how.double_quant
        own["compute_dtype"] = _plain(how.compute_dtype)
    names: object = None
    if engine is Engine.FSDP:
        from memplan.memory.fsdp2.options import Fsdp2Options

        names = Fsdp2Options.of(setup)
    elif engine is Engine.FSDP1:
        from memplan.memory.fsdp1.options import Fsdp1Options

        names = Fsdp1Options.of(setup)
        if setup.adapter is not None:
            own["autocast"] = None  # mixed precision runs an adapter under it whatever is said
    elif engine is Engine.DDP and setup.gradient_ranks > 1:
        from memplan.memory.ddp import DdpOptions

        names = DdpOptions.of(setup)
    if names is None:
        return own
    found = {name: getattr(names, name) for name in type(names).__dataclass_fields__}  # type: ignore[attr-defined]
    if "reduce_dtype" in found:
        found["reduce_dtype"] = found["reduce_dtype"] or PRECISIONS[setup.chosen_precision].compute
    if "reshard_after_forward" in found and found["reshard_after_forward"] is None:
        found["reshard_after_forward"] = "auto"
    made = {
        name: _plain(value)
        for name, value in found.items()
        if value is not None and own.get(name, value) is not None
    }
    return {**{name: value for name, value in own.items() if name not in found}, **made}


def _plain(value: object) -> object:
    if isinstance(value, DType):
        return value.label
    return value.value if isinstance(value, Enum) else value


def _mapping(value: object) -> Mapping[str, object]:
    """Engine options as a mapping, however they are held."""
    return dict(value) if isinstance(value, Mapping | tuple | list) else {}
