"""DeepSpeed's allocations by stage (0.19.8); each stage is a program of its own."""

from memplan.memory.deepspeed.job import prepare_job
from memplan.memory.ledger import Ledger
from memplan.memory.programs.program import Program
from memplan.memory.programs.zero12 import ShardedStatesProgram
from memplan.memory.programs.zero3 import ShardedParametersProgram
from memplan.memory.rank import RankInput
from memplan.training.setup import ZeroStage


def deepspeed_program(
    given: RankInput, ledger: Ledger, *, workspace_bytes: int = 0, rank: int = 0
) -> Program | None:
    """The program of a setup's stage; None where it has none yet."""
    job = prepare_job(given, rank=rank)
    if given.setup.zero_stage in {ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS}:
        return ShardedStatesProgram(job, ledger, workspace_bytes=workspace_bytes)
    if given.setup.zero_stage is ZeroStage.PARAMETERS:
        return ShardedParametersProgram(job, ledger, workspace_bytes=workspace_bytes)
    return None
