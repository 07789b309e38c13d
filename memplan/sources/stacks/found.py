"""What the file of a training stack says, in memplan's words."""

from collections.abc import Mapping
from dataclasses import field

from memplan.fast_dataclass import dataclass
from memplan.sources.training_arguments import Launch, Loading
from memplan.training.setup import TrainingSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSetup:
    """A setup read from a stack's own file, or from its defaults alone."""

    setup: TrainingSetup
    model: str | Mapping[str, object] | None = None
    """The model that it names, or its config: what ``load_model`` takes."""
    notes: tuple[str, ...] = ()
    """What the answer should say of it."""
    is_launched: bool = False
    """The files that the job is launched with are in it."""


@dataclass(slots=True)
class Found:
    """What a reader has found so far."""

    fields: dict[str, object] = field(default_factory=dict)
    """Fields of ``TrainingSetup``."""
    options: dict[str, object] = field(default_factory=dict)
    """``engine_options`` among them."""
    quantization: dict[str, object] = field(default_factory=dict)
    """``engine_options`` that a quantized base has."""
    left_out: list[str] = field(default_factory=list)
    quiet: list[str] = field(default_factory=list)
    """Keys that change no memory."""
    notes: list[str] = field(default_factory=list)
    model: str | Mapping[str, object] | None = None
    arguments: dict[str, object] = field(default_factory=dict)
    """transformers' training arguments that the stack makes of its file."""
    launch: Launch = field(default_factory=Launch)
    """The engine's own file, given beside the stack's."""
    loading: Loading = field(default_factory=Loading)
    """What the Trainer is handed beside them."""


def of_given(given: Mapping[str, object], name: str) -> str | None:
    """The text of a field that was given beside a file.

    >>> of_given({"engine": "fsdp"}, "engine")
    'fsdp'
    """
    value = given.get(name)
    return None if value is None else str(getattr(value, "value", value))
