"""Which setups ``memplan estimate`` shows: the one that is named, or all that compare."""

from typing import TYPE_CHECKING, Any

from memplan.fast_dataclass import replace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.options.setup_files import BaseSetup
    from memplan.training.choices import Offload
    from memplan.training.setup import TrainingSetup


def compared_setups(
    given: "BaseSetup",
    *,
    precision: str | None,
    engine: str | None,
    zero: str | None,
    offload: str | None,
    offload_param: str | None,
    fsdp_strategy: str | None,
) -> "list[TrainingSetup]":
    """The setups to show: one where engine and stage are named, else all that are compared."""
    from memplan.search.comparison import Wanted, comparison_setups
    from memplan.search.ranges import parse_range
    from memplan.training.choices import ZeroStage
    from memplan.training.coercion import coerce_enum
    from memplan.training.precision import Engine

    base = _with_named(given.setup, precision, engine, fsdp_strategy)
    stages = None
    if zero is not None:
        stages = tuple(
            coerce_enum("zero", stage, ZeroStage) for stage in parse_range(zero, option="--zero")
        )
    wanted = Wanted(
        engine=coerce_enum("engine", engine, Engine) if engine is not None else None,
        stages=stages,
        offload=_place("offload", offload),
        offload_param=_place("offload_param", offload_param),
    )
    if given.engine_fixed and engine is None:
        # A file's engine and stage stay, unless another one is named beside it.
        if wanted.is_open:
            return [base]
        kept = (base.zero_stage,) if stages is None and base.zero_stage is not None else stages
        wanted = replace(wanted, engine=base.chosen_engine, stages=kept)
    return comparison_setups(base, wanted)


def is_of(engine: str | None, owner: str, engines: "Sequence[str | None]") -> bool:
    """Whether an option of ``owner``'s is for this engine: of several, it is for the owner alone."""
    named = [each for each in engines if each is not None and each.startswith(owner)]
    return engine in named or not named


def _place(name: str, text: str | None) -> "Offload | None":
    from memplan.training.choices import Offload
    from memplan.training.coercion import coerce_enum

    return coerce_enum(name, text, Offload) if text is not None else None


def _with_named(
    base: "TrainingSetup", precision: str | None, engine: str | None, fsdp_strategy: str | None
) -> "TrainingSetup":
    """The base in the precision and with the FSDP strategy named, under an engine that has both."""
    from memplan.training.choices import FsdpStrategy
    from memplan.training.coercion import coerce_enum
    from memplan.training.precision import Engine, Precision, engines_with

    changes: dict[str, Any] = {}
    if fsdp_strategy is not None:
        changes["fsdp_strategy"] = coerce_enum("fsdp_strategy", fsdp_strategy, FsdpStrategy)
        changes["engine"] = engine or Engine.FSDP
    if precision is not None:
        chosen = changes["precision"] = coerce_enum("precision", precision, Precision)
        engines = engines_with(chosen)
        if "engine" not in changes and (engine is not None or base.chosen_engine not in engines):
            changes["engine"] = engine or min(engines, key=lambda each: each.value)
    return replace(base, **changes) if changes else base
