"""What a field of a training setup may be given as, read into what it holds."""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from operator import attrgetter

from memplan.errors import SetupError
from memplan.text import shown
from memplan.training.activation_offload import ActivationOffload
from memplan.training.choices import (
    AllocatorKind,
    Checkpointing,
    FsdpStrategy,
    Offload,
    Recomputation,
    ZeroStage,
)
from memplan.training.choices_of_kernels.fp8 import Fp8Recipe
from memplan.training.choices_of_kernels.kernels import (
    AttentionKernel,
    FeedForwardKernel,
    KernelPreset,
    Kernels,
    LossKernel,
    NormKernel,
    Packing,
    RotaryKernel,
    ScanKernel,
)
from memplan.training.coercion import coerce_enum
from memplan.training.compilation import Compilation
from memplan.training.jobs import PLAIN, Job
from memplan.training.layer_choice import CheckpointedLayers
from memplan.training.optimizers import Optimizer
from memplan.training.precision import Engine, Precision
from memplan.training.splitting.context_parallel import ContextParallelKind
from memplan.training.splitting.parallelism import PipelineSchedule
from memplan.upward import provided

ENUM_FIELDS: dict[str, type[Enum]] = {
    "engine": Engine, "zero_stage": ZeroStage, "fsdp_strategy": FsdpStrategy,
    "precision": Precision, "fp8": Fp8Recipe, "optimizer": Optimizer, "attention": AttentionKernel,
    "norm": NormKernel, "mlp": FeedForwardKernel, "rotary": RotaryKernel, "scan": ScanKernel, "loss": LossKernel,
    "packing": Packing,
    "offload_optimizer": Offload, "offload_param": Offload, "offload_activations": ActivationOffload,
    "pipeline_schedule": PipelineSchedule, "context_parallel_kind": ContextParallelKind,
    "allocator": AllocatorKind, "compile": Compilation,
}  # fmt: skip

_ENUM_VALUES = attrgetter(*ENUM_FIELDS)
_ALWAYS_NAMED = (ActivationOffload, Optimizer, AllocatorKind, Compilation, Fp8Recipe, Packing)
"""What no engine or model fills in where it is null."""


_MAY_BE_NULL = tuple(
    (name, kind, kind is not Offload and kind not in _ALWAYS_NAMED)
    for name, kind in ENUM_FIELDS.items()
)


def read_choices(setup: object) -> Iterator[tuple[str, Enum | None]]:
    """Fields of a setup that name a member otherwise than by itself, and the member."""
    for (name, kind, may_be_null), value in zip(_MAY_BE_NULL, _ENUM_VALUES(setup), strict=True):
        if value.__class__ is kind or (value is None and may_be_null):
            continue
        yield name, read_choice(name, value, kind)


def read_choice(name: str, value: object, kind: type[Enum]) -> Enum | None:
    """A field's member; what is not to be offloaded may be null, as what has a default."""
    if value is None and kind is Offload:
        return Offload.NONE
    return None if value is None and kind not in _ALWAYS_NAMED else coerce_enum(name, value, kind)


def read_checkpointing(value: object) -> Checkpointing:
    """Which layers are checkpointed, and how.

    >>> str(read_checkpointing("0-7,12")), read_checkpointing(0.5), read_checkpointing("full").name
    ('layers.0-7+12', 0.5, 'FULL')
    """
    if isinstance(value, Recomputation | CheckpointedLayers):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value > 1 and value == int(value):
            return CheckpointedLayers.first(int(value))
        if not 0 <= value <= 1:
            msg = (
                "checkpointing: a share of layers must be from 0 to 1, and a number of them whole, "
                f"got {value}"
            )
            raise SetupError(msg)
        return float(value)
    if isinstance(value, str) and value[:1].isdecimal():
        try:
            return read_checkpointing(float(value))
        except ValueError as error:
            if isinstance(error, SetupError):
                raise
    if isinstance(value, str) and (value[:1].isdecimal() or value.startswith("layers.")):
        return CheckpointedLayers.parse(value)
    return coerce_enum("checkpointing", value, Recomputation)


def read_kernels(value: object) -> KernelPreset | Kernels:
    """A preset by its name, or a choice of one's own."""
    if isinstance(value, Kernels):
        return value
    try:
        return coerce_enum("kernels", value, KernelPreset)
    except SetupError:
        own: Kernels | None = provided("plugged", "kernels", str(value))
        if own is None:
            raise
        return own


def read_job(value: object) -> Job:
    """A job; of one that is null, the model's own task."""
    return PLAIN if value is None else Job.read(value)


def read_words(value: object) -> tuple[str, ...]:
    """``left_out``, of which one may be given as it is."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, tuple) or not all(isinstance(each, str) and each for each in texts):
        msg = f"left_out: expected what is not counted, in words, got {shown(value)}"
        raise SetupError(msg)
    return texts


MAX_OPTION = 2**63 - 1
"""Largest number that an engine's option takes: what a C integer holds."""
MAX_OPTION_DEPTH = 10
"""How deeply the value of an engine's option may be nested."""


def read_options(options: object, field: str = "engine_options") -> tuple[tuple[str, object], ...]:
    """A part's options as pairs in order, their values such that equal setups are found equal."""
    owner = field.partition("_")[0]
    pairs = options.items() if isinstance(options, Mapping) else options
    found: dict[str, object] = {}
    for pair in pairs if isinstance(pairs, Iterable) else (pairs,):
        if not isinstance(pair, tuple) or len(pair) != 2:
            msg = f"{field}: expected a mapping of the {owner}'s own names, got {shown(options)}"
            raise SetupError(msg)
        name, value = pair
        if not isinstance(name, str):
            msg = f"{field}: the key {shown(name)} is not text: put it in quotes"
            raise SetupError(msg)
        found[name] = _frozen(value, name=name, depth=0)
    return tuple(sorted(found.items()))


def _frozen(value: object, *, name: str, depth: int) -> object:
    """A value that can be hashed: lists as tuples, mappings as sorted pairs."""
    if depth > MAX_OPTION_DEPTH:
        msg = f"engine_options: {name}: is nested more than {MAX_OPTION_DEPTH} levels deep"
        raise SetupError(msg)
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return tuple((str(key), _frozen(each, name=name, depth=depth + 1)) for key, each in items)
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(_frozen(each, name=name, depth=depth + 1) for each in value)
    if isinstance(value, int | float) and not -MAX_OPTION <= value <= MAX_OPTION:
        msg = f"engine_options: {name}: must be a number below 2^63, got {shown(value)}"
        raise SetupError(msg)
    return value
