"""What a run of the Trainer is handed beside its arguments: engines' own files, and how the model is loaded."""

from collections.abc import Mapping

from memplan.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFile:
    """An engine's own file, given beside the arguments."""

    values: Mapping[str, object]
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Files that a job is launched with, beside the one that says what it trains."""

    deepspeed: EngineFile | None = None
    accelerate: EngineFile | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """What the Trainer is handed beside its arguments, which decides what their flags mean."""

    trainer: str | None = None
    """TRL's class of arguments; None: as their names say."""
    half_weights: bool = False
    """The model is loaded in bf16, not in fp32."""
