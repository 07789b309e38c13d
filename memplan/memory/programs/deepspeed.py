"""DeepSpeed's allocations by stage (0.19.8); each stage is a program of its own."""

from memplan.errors import SetupError
from memplan.memory.deepspeed.job import Job, prepare_job
from memplan.memory.programs.deepspeed_stages.bf16_optimizer import Bf16OptimizerProgram
from memplan.memory.programs.deepspeed_stages.zero0 import ReplicatedProgram
from memplan.memory.programs.deepspeed_stages.zero3 import ShardedParametersProgram
from memplan.memory.programs.deepspeed_stages.zero12 import ShardedStatesProgram
from memplan.memory.programs.program import Program
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Ledger
from memplan.training.choices import ZeroStage


def deepspeed_program(
    given: RankInput,
    ledger: Ledger,
    *,
    workspace_bytes: int = 0,
    rank: int = 0,
    capacity_bytes: int | None = None,
) -> Program:
    """The program of a setup's stage.

    ``capacity_bytes`` of the GPU, where it is known, decides where stages 1 and 2 flatten the weights.
    """
    job = prepare_job(given, rank=rank, capacity_bytes=capacity_bytes)
    return _kind(job)(job, ledger, workspace_bytes=workspace_bytes)


def _kind(
    job: Job,
) -> type[
    ReplicatedProgram | ShardedStatesProgram | ShardedParametersProgram | Bf16OptimizerProgram
]:
    stage = job.given.setup.zero_stage
    if stage is ZeroStage.NONE and job.accumulates_apart:
        msg = (
            "engine_options: grad_accum_dtype must be the weights' in ZeRO stage 0: DeepSpeed "
            "refuses another one without ZeRO; use stage 1 or leave it out"
        )
        raise SetupError(msg)
    if job.uses_bf16_optimizer and stage in (ZeroStage.NONE, ZeroStage.OPTIMIZER):
        return Bf16OptimizerProgram
    if stage is ZeroStage.NONE:
        return ReplicatedProgram
    if stage is ZeroStage.PARAMETERS:
        return ShardedParametersProgram
    return ShardedStatesProgram
