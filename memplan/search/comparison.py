"""Which setups stand side by side when no engine is named."""

from dataclasses import replace

from memplan.errors import SetupError
from memplan.training.precision import PRECISIONS, Engine
from memplan.training.setup import Offload, TrainingSetup, ZeroStage

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


def comparison_setups(
    base: TrainingSetup,
    *,
    engines: tuple[Engine, ...] | None = None,
    stages: tuple[ZeroStage, ...] | None = None,
    offload: Offload | None = None,
) -> list[TrainingSetup]:
    """The setups to compare, simplest first; ``engines``, ``stages`` and ``offload`` narrow them.

    Raises ``SetupError`` where nothing is left.
    """
    if base.num_gpus == 1 and engines is None and stages is None and offload is None:
        return [base]
    chosen = engines or _default_engines(base, stages)
    rows: list[TrainingSetup] = []
    for engine in chosen:
        rows += _engine_rows(base, engine, stages, offload)
    if not rows:
        msg = "nothing to compare: no engine has this combination of --engine, --zero and --offload"
        raise SetupError(msg)
    return rows


def _default_engines(
    base: TrainingSetup, stages: tuple[ZeroStage, ...] | None
) -> tuple[Engine, ...]:
    if stages is not None:
        return (Engine.DEEPSPEED,)
    wanted = COMPARED_ENGINES if base.num_gpus > 1 else (Engine.DEEPSPEED,)
    if base.precision is None:
        return wanted
    able = PRECISIONS[base.precision].engines
    return tuple(engine for engine in wanted if engine in able)


COMPARED_ENGINES: tuple[Engine, ...] = (Engine.DEEPSPEED, Engine.FSDP, Engine.DDP)
"""Engines that an estimate compares by itself."""


def _engine_rows(
    base: TrainingSetup,
    engine: Engine,
    stages: tuple[ZeroStage, ...] | None,
    offload: Offload | None,
) -> list[TrainingSetup]:
    if engine is not Engine.DEEPSPEED:
        return [replace(base, engine=engine)]
    return [
        replace(
            base,
            engine=engine,
            zero_stage=stage,
            offload_optimizer=optimizer,
            offload_param=parameters,
        )
        for stage, optimizer, parameters in DEEPSPEED_ROWS
        if (stages is None or stage in stages)
        and (offload is None or offload in (optimizer, parameters))
    ]
