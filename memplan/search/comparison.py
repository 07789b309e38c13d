"""Which setups stand side by side when no engine is named."""

from typing import Any

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass, replace
from memplan.training.choices import Offload, ZeroStage
from memplan.training.precision import Engine, engines_with
from memplan.training.setup import TrainingSetup
from memplan.training.setup_derived import usual_engine

DEEPSPEED_ROWS: tuple[tuple[ZeroStage, Offload, Offload], ...] = (
    (ZeroStage.NONE, Offload.NONE, Offload.NONE),
    (ZeroStage.OPTIMIZER, Offload.NONE, Offload.NONE),
    (ZeroStage.OPTIMIZER, Offload.CPU, Offload.NONE),
    (ZeroStage.GRADIENTS, Offload.NONE, Offload.NONE),
    (ZeroStage.GRADIENTS, Offload.CPU, Offload.NONE),
    (ZeroStage.PARAMETERS, Offload.NONE, Offload.NONE),
    (ZeroStage.PARAMETERS, Offload.CPU, Offload.NONE),
    (ZeroStage.PARAMETERS, Offload.CPU, Offload.CPU),
)
"""ZeRO stage, where the optimizer is, where the parameters are; simplest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What narrows a comparison; None leaves it open."""

    engine: Engine | None = None
    stages: tuple[ZeroStage, ...] | None = None
    offload: Offload | None = None
    """Where the optimizer is; without ``offload_param`` also where parameters may be."""
    offload_param: Offload | None = None
    """Where the parameters are."""

    @property
    def is_open(self) -> bool:
        """Whether nothing is named."""
        return (self.engine, self.stages, self.offload, self.offload_param) == (None,) * 4

    def takes(self, optimizer: Offload, parameters: Offload) -> bool:
        """Whether a row that offloads so is one of those asked for."""
        if self.offload_param is not None and parameters is not self.offload_param:
            return False
        if self.offload is None:
            return True
        if self.offload is Offload.NONE or self.offload_param is not None:
            return optimizer is self.offload
        return self.offload in (optimizer, parameters)


COMPARED_ENGINES: tuple[Engine, ...] = (Engine.DEEPSPEED, Engine.FSDP, Engine.DDP)
"""Engines that an estimate compares by itself."""
ALL_OPEN = Wanted()


def comparison_setups(base: TrainingSetup, wanted: Wanted = ALL_OPEN) -> list[TrainingSetup]:
    """The setups to compare, simplest first; of those that nobody named, the ones that can be.

    Raises ``SetupError`` where nothing is left.
    """
    if base.num_gpus == 1 and wanted.is_open:
        return [base]
    if wanted.stages is not None and wanted.engine not in (None, Engine.DEEPSPEED):
        msg = (
            f"zero_stage: only deepspeed has ZeRO stages, and the engine is {wanted.engine.value}: "
            "leave it out, or name `engine='deepspeed'`"
        )
        raise SetupError(msg)
    rows: list[TrainingSetup] = []
    refused: list[SetupError] = []
    for engine in _engines(base, wanted):
        for changes in _engine_rows(engine, wanted):
            try:
                rows.append(replace(base, engine=engine, **changes))
            except SetupError as error:
                refused.append(error)
    if refused and not rows:
        raise refused[0]
    if not rows:
        msg = "nothing to compare: no engine has this combination of engine, stage and offloading"
        raise SetupError(msg)
    return rows


def _engines(base: TrainingSetup, wanted: Wanted) -> tuple[Engine, ...]:
    if wanted.engine is not None:
        return (wanted.engine,)
    if wanted.stages is not None:
        return (Engine.DEEPSPEED,)
    compared = COMPARED_ENGINES if base.num_gpus > 1 else (Engine.DEEPSPEED,)
    if base.fsdp_strategy is not None:
        compared = (Engine.FSDP,)
    spread = base.tensor_parallel * base.pipeline_parallel
    sharing = base.context_parallel * base.expert_parallel
    if spread > 1 or sharing > 1:
        compared = (usual_engine(base.num_gpus, spread, sharing),)
    if base.precision is None:
        return compared
    able = engines_with(base.precision)
    return tuple(engine for engine in compared if engine in able)


def _engine_rows(engine: Engine, wanted: Wanted) -> list[dict[str, Any]]:
    """What is changed of the base for each row of an engine."""
    if engine is Engine.DEEPSPEED:
        return _deepspeed_rows(wanted)
    if wanted.offload is None and wanted.offload_param is None:
        return [{}]
    places = [Offload.NONE]
    if engine in (Engine.FSDP, Engine.FSDP1):
        places.append(Offload.CPU)
    return [
        {"offload_optimizer": place, "offload_param": place}
        for place in places
        if wanted.takes(place, place)
    ]


def _deepspeed_rows(wanted: Wanted) -> list[dict[str, Any]]:
    """A row for each stage and what it offloads: to the place named, else to the CPU."""
    named = {wanted.offload, wanted.offload_param} - {None, Offload.NONE}
    place = next((each for each in named if each is not None), Offload.CPU)
    moved = {Offload.NONE: Offload.NONE, Offload.CPU: place}
    return [
        {
            "zero_stage": stage,
            "offload_optimizer": moved[optimizer],
            "offload_param": moved[parameters],
        }
        for stage, optimizer, parameters in DEEPSPEED_ROWS
        if (wanted.stages is None or stage in wanted.stages)
        and wanted.takes(moved[optimizer], moved[parameters])
    ]
