"""One setup out of the options that name an engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplan.model.spec import ModelSpec
    from memplan.training.setup import TrainingSetup


def with_engine(
    base: "TrainingSetup",
    *,
    precision: str | None,
    engine: str | None,
    zero: str | None,
    offload: str | None = None,
    offload_param: str | None = None,
    fsdp_strategy: str | None = None,
) -> "TrainingSetup":
    """``base`` with an engine named by its stage or precision, and what is offloaded.

    Raises ``UsageError`` for more than one stage.
    """
    from dataclasses import replace

    from memplan.training.choices import FsdpStrategy
    from memplan.training.coercion import coerce_enum
    from memplan.training.precision import Engine

    changes: dict[str, Any] = {}
    if zero is not None:
        changes |= {"zero_stage": _one_stage(zero), "engine": Engine.DEEPSPEED}
    if engine is not None:
        changes["engine"] = coerce_enum("engine", engine, Engine)
    if fsdp_strategy is not None:
        changes["fsdp_strategy"] = coerce_enum("fsdp_strategy", fsdp_strategy, FsdpStrategy)
        if base.engine is None:
            changes.setdefault("engine", Engine.FSDP)
    if precision is not None:
        changes |= _with_precision(base, precision, changes)
    return replace(base, **_with_places(base, changes, offload, offload_param))


def _one_stage(zero: str) -> int:
    """The stage that is named. Raises ``UsageError`` for several."""
    from memplan.errors import UsageError
    from memplan.search.ranges import parse_range

    stages = parse_range(zero, option="--zero")
    if len(stages) != 1:
        msg = f"--zero: {zero!r} names {len(stages)} stages, and one setup takes one"
        raise UsageError(msg)
    return stages[0]


def _with_precision(
    base: "TrainingSetup", precision: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """The precision, and an engine that has it where none is named."""
    from memplan.training.coercion import coerce_enum
    from memplan.training.precision import Precision, engines_with

    chosen = coerce_enum("precision", precision, Precision)
    engines = engines_with(chosen)
    if "engine" in changes or base.chosen_engine in engines:
        return {"precision": chosen}
    return {"precision": chosen, "engine": min(engines, key=lambda each: each.value)}


def _with_places(
    base: "TrainingSetup",
    changes: dict[str, Any],
    offload: str | None,
    offload_param: str | None,
) -> dict[str, Any]:
    """The changes with where the optimizer and the parameters are; both, where an engine has no one alone."""
    from memplan.training.choices import Offload
    from memplan.training.coercion import coerce_enum
    from memplan.training.precision import Engine

    found = dict(changes)
    if offload is not None:
        place = coerce_enum("offload", offload, Offload)
        found["offload_optimizer"] = place
        if place is not Offload.NONE and base.engine is None:
            found.setdefault("engine", Engine.DEEPSPEED)
        engine = found.get("engine", base.chosen_engine)
        if found.get("zero_stage") == 3 or engine is not Engine.DEEPSPEED:
            found["offload_param"] = place
    if offload_param is not None:
        found["offload_param"] = coerce_enum("offload_param", offload_param, Offload)
    return found


def check_target_length(model: "ModelSpec", target_seq_len: int | None) -> None:
    """Raise ``UsageError`` for targets of a model that has none."""
    from memplan.errors import UsageError

    if target_seq_len is not None and len(model.stacks) == 1:
        msg = f"--target-seq-len: {model.name} is no encoder-decoder, so it has no target sequences"
        raise UsageError(msg)
