"""What each engine asks the allocator for in a run, in its order: programs over one ledger."""

from memplan.memory.ledger import Ledger
from memplan.memory.programs.program import Program
from memplan.memory.rank import RankInput
from memplan.training.precision import Engine


def program_of(
    given: RankInput,
    ledger: Ledger,
    *,
    workspace_bytes: int,
    rank: int = 0,
    capacity_bytes: int | None = None,
) -> Program | None:
    """The program of one rank of a setup's engine; None where there is none yet.

    ``capacity_bytes`` of the GPU, where it is known, decides how DeepSpeed loads.
    """
    engine = given.setup.chosen_engine
    if engine is Engine.FSDP:
        from memplan.memory.programs.fsdp2 import Fsdp2Program

        return Fsdp2Program(given, ledger, workspace_bytes=workspace_bytes, rank=rank)
    if engine is Engine.FSDP1:
        from memplan.memory.programs.fsdp1 import Fsdp1Program

        return Fsdp1Program(given, ledger, workspace_bytes=workspace_bytes, rank=rank)
    if engine is Engine.DEEPSPEED:
        from memplan.memory.programs.deepspeed import deepspeed_program

        return deepspeed_program(
            given,
            ledger,
            workspace_bytes=workspace_bytes,
            rank=rank,
            capacity_bytes=capacity_bytes,
        )
    if engine is not Engine.DDP:
        return None
    if given.setup.data_parallel == 1:
        return Program(given, ledger, workspace_bytes=workspace_bytes)
    from memplan.memory.programs.ddp import DdpProgram

    return DdpProgram(given, ledger, workspace_bytes=workspace_bytes)
