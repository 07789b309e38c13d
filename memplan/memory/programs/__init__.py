"""What each engine asks the allocator for in a run, in its order: programs over one ledger."""

from typing import NamedTuple

from memplan.graph.core.tape import Tape
from memplan.graph.remembered import OF_TAPES
from memplan.memory.beside import ALONE, SideModel
from memplan.memory.engine_options import has_module_hooks
from memplan.memory.programs.contracts import RankProgram
from memplan.memory.programs.program import Program
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger
from memplan.memory.spots import StopsBySegment
from memplan.training.choices import ZeroStage
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup


def program_of(
    given: RankInput,
    ledger: Ledger,
    *,
    workspace_bytes: int,
    rank: int = 0,
    capacity_bytes: int | None = None,
) -> RankProgram:
    """The program of one rank of a setup's engine.

    ``capacity_bytes`` of the GPU, where it is known, decides how DeepSpeed loads.
    """
    if given.stages:
        from memplan.memory.programs.pipeline import PipelineProgram  # only for pipelines

        def stage_program(stage: RankInput) -> Program:
            return engine_program(
                stage,
                ledger,
                workspace_bytes=workspace_bytes,
                rank=rank,
                capacity_bytes=capacity_bytes,
            )

        return PipelineProgram(given, ledger, stage_program, rank=rank)
    program = engine_program(
        given, ledger, workspace_bytes=workspace_bytes, rank=rank, capacity_bytes=capacity_bytes
    )
    if given.beside is not ALONE:
        from memplan.memory.programs.others import OtherModels  # only for jobs of several models

        program.company = OtherModels(given.beside, ledger, program)
    return program


def engine_program(
    given: RankInput,
    ledger: Ledger,
    *,
    workspace_bytes: int,
    rank: int = 0,
    capacity_bytes: int | None = None,
) -> Program:
    """The program of a model of its own, or of a stage: what the engine does with it."""
    engine = given.setup.chosen_engine
    if engine is Engine.FSDP:
        return _fsdp2_program(given, ledger, workspace_bytes=workspace_bytes, rank=rank)
    if engine is Engine.FSDP1:
        from memplan.memory.programs.fsdp1 import Fsdp1Program

        return Fsdp1Program(given, ledger, workspace_bytes=workspace_bytes, rank=rank)
    if engine is Engine.DEEPSPEED:
        from memplan.memory.programs.deepspeed import deepspeed_program

        return deepspeed_program(
            given,
            ledger,
            workspace_bytes=workspace_bytes,
            rank=rank // given.setup.tensor_parallel % given.setup.gradient_ranks,
            capacity_bytes=capacity_bytes,
        )
    if engine is Engine.MEGATRON:
        from memplan.memory.programs.megatron import megatron_program

        return megatron_program(given, ledger, workspace_bytes=workspace_bytes, rank=rank)
    assert engine is Engine.DDP, f"{engine}: no account either"
    return _ddp_program(given, ledger, workspace_bytes=workspace_bytes)


def _fsdp2_program(given: RankInput, ledger: Ledger, *, workspace_bytes: int, rank: int) -> Program:
    if given.tape.options.stage is not None:
        from memplan.memory.programs.fully_sharded.stage import (
            Fsdp2StageProgram,  # only for pipelines
        )

        return Fsdp2StageProgram(given, ledger, workspace_bytes=workspace_bytes, rank=rank)
    from memplan.memory.programs.fully_sharded.program import Fsdp2Program

    return Fsdp2Program(given, ledger, workspace_bytes=workspace_bytes, rank=rank)


def _ddp_program(given: RankInput, ledger: Ledger, *, workspace_bytes: int) -> Program:
    """DDP's; of one GPU, or of tensor-parallel ranks alone, there is nothing to reduce."""
    if given.setup.tensor_parallel > 1:
        from memplan.memory.programs.split import SplitProgram

        return SplitProgram(given, ledger, workspace_bytes=workspace_bytes)
    if given.setup.gradient_ranks == 1:
        if given.setup.engine_options:
            from memplan.memory.ddp import DdpOptions  # looked at all the same

            DdpOptions.of(given.setup)
        return Program(given, ledger, workspace_bytes=workspace_bytes)
    from memplan.memory.programs.ddp import DdpProgram

    return DdpProgram(given, ledger, workspace_bytes=workspace_bytes)


def stops_of(given: RankInput | SideModel) -> "StopsWithin | None":
    """Where a setup's engine takes part within segments; None: nowhere."""
    return _stops_at_modules(given.tape) if has_module_hooks(given.setup) else None


@OF_TAPES.remembered(maxsize=64)
def _stops_at_modules(tape: Tape) -> "StopsWithin":
    from memplan.memory.deepspeed.modules import find_stops

    found = find_stops(tape)
    stops = {segment.index: each.stops for segment, each in zip(tape.segments, found, strict=True)}
    return StopsWithin(stops, tuple(each.members for each in found))


class StopsWithin(NamedTuple):
    """Where an engine takes part within segments, and of what."""

    stops: StopsBySegment
    members: tuple[object, ...]
    """What the modules are that it takes part for, to be compared."""


def holds_inputs(setup: TrainingSetup) -> bool:
    """Whether an engine's own blocks go by the batch: where FSDP1's hooks hold what layers were given."""
    is_asked = dict(setup.engine_options).get("reentrant_checkpointing")
    return setup.chosen_engine is Engine.FSDP1 and bool(is_asked)


def loads_by_capacity(setup: TrainingSetup) -> bool:
    """Whether a setup's engine loads otherwise where a GPU has no room: ZeRO-1 and 2 flatten elsewhere."""
    stages = (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS)
    return setup.chosen_engine is Engine.DEEPSPEED and setup.zero_stage in stages


def rank_kinds(given: RankInput) -> list[tuple[range, ...]]:
    """Ranks whose accounts are the same; two of these may have the same one too."""
    if given.stages:
        from memplan.memory.programs.pipeline_ranks import pipeline_kinds  # only for pipelines

        return pipeline_kinds(given)
    engine = given.setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        from memplan.memory.deepspeed import ranks

        # Ranks that split the layers between them stand side by side.
        split = given.setup.tensor_parallel
        kinds = ranks.rank_kinds(given)
        return [tuple(range(run.start * split, run.stop * split) for run in kind) for kind in kinds]
    if engine is Engine.FSDP:
        from memplan.memory.fsdp2.ranks import rank_kinds as fsdp2_kinds

        return fsdp2_kinds(given)
    if engine is Engine.FSDP1:
        from memplan.memory.fsdp1.wrapping import rank_kinds as fsdp1_kinds

        return fsdp1_kinds(given)
    if engine is Engine.MEGATRON:
        from memplan.memory.megatron.buffers import rank_kinds as megatron_kinds

        return megatron_kinds(given)
    return [(range(given.setup.num_gpus),)]


def heaviest_ranks(given: RankInput) -> list[int]:
    """Ranks one of which holds most."""
    if given.stages:
        from memplan.memory.programs.pipeline_ranks import heaviest_places  # only for pipelines

        return heaviest_places(given)
    engine = given.setup.chosen_engine
    if engine is Engine.DEEPSPEED:
        from memplan.memory.deepspeed import ranks

        return [rank * given.setup.tensor_parallel for rank in ranks.heaviest_ranks(given)]
    if engine is Engine.FSDP1:
        from memplan.memory.fsdp1.wrapping import heaviest_ranks as fsdp1_ranks

        return fsdp1_ranks(given)
    if engine is Engine.MEGATRON:
        from memplan.memory.megatron.buffers import heaviest_ranks as megatron_ranks

        return megatron_ranks(given)
    # ``torch.chunk`` makes the first chunks the largest.
    return [0]
