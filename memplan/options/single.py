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

    from memplan.errors import UsageError
    from memplan.search.ranges import parse_range
    from memplan.training.choices import FsdpStrategy, Offload
    from memplan.training.coercion import coerce_enum
    from memplan.training.precision import Engine, Precision, engines_with

    changes: dict[str, Any] = {}
    if zero is not None:
        stages = parse_range(zero, option="--zero")
        if len(stages) != 1:
            msg = f"--zero: {zero!r} names {len(stages)} stages, and one setup takes one"
            raise UsageError(msg)
        changes["zero_stage"] = stages[0]
        changes["engine"] = Engine.DEEPSPEED
    if engine is not None:
        changes["engine"] = coerce_enum("engine", engine, Engine)
    if fsdp_strategy is not None:
        changes["fsdp_strategy"] = coerce_enum("fsdp_strategy", fsdp_strategy, FsdpStrategy)
        if base.engine is None:
            changes.setdefault("engine", Engine.FSDP)
    if precision is not None:
        chosen = changes["precision"] = coerce_enum("precision", precision, Precision)
        engines = engines_with(chosen)
        if "engine" not in changes and base.chosen_engine not in engines:
            changes["engine"] = min(engines, key=lambda each: each.value)
    if offload is not None:
        place = coerce_enum("offload", offload, Offload)
        changes["offload_optimizer"] = place
        if place is not Offload.NONE and base.engine is None:
            changes.setdefault("engine", Engine.DEEPSPEED)
        if (
            changes.get("zero_stage") == 3
            or changes.get("engine", base.chosen_engine) is not Engine.DEEPSPEED
        ):
            changes["offload_param"] = place
    if offload_param is not None:
        changes["offload_param"] = coerce_enum("offload_param", offload_param, Offload)
    return replace(base, **changes)


def check_target_length(model: "ModelSpec", target_seq_len: int | None) -> None:
    """Raise ``UsageError`` for targets of a model that has none."""
    from memplan.errors import UsageError

    if target_seq_len is not None and len(model.stacks) == 1:
        msg = f"--target-seq-len: {model.name} is no encoder-decoder, so it has no target sequences"
        raise UsageError(msg)
