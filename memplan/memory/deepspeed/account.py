"""The account of one DeepSpeed rank."""

from dataclasses import replace

from memplan.errors import SetupError
from memplan.memory.account import RankAccount
from memplan.memory.deepspeed.bf16_optimizer import bf16_optimizer_account, uses_bf16_optimizer
from memplan.memory.deepspeed.job import Job, prepare_job
from memplan.memory.deepspeed.stage0 import replicated_account
from memplan.memory.deepspeed.stage3 import sharded_account
from memplan.memory.deepspeed.stage12 import sharded_states_account
from memplan.memory.rank import RankInput
from memplan.training.setup import ZeroStage


def deepspeed_account(
    given: RankInput, *, rank: int = 0, capacity_bytes: int | None = None
) -> RankAccount:
    """What one data-parallel rank of DeepSpeed 0.19 holds, phase by phase [bytes].

    ``capacity_bytes`` of the GPU, where it is known, decides whether stages 1 and 2 flatten the
    weights there or, without room for two copies, on the CPU.

    Raises ``SetupError`` for engine options that DeepSpeed does not have, or a rank that the setup
    does not have.
    """
    job = prepare_job(given, rank=rank, capacity_bytes=capacity_bytes)
    if not 0 <= rank < job.num_ranks:
        msg = f"rank: must be from 0 to {job.num_ranks - 1}, got {rank}"
        raise SetupError(msg)
    return replace(_by_stage(job), left_out=job.options.left_out, unsaved=job.options.unsaved)


def fullest_rank(given: RankInput) -> int:
    """The rank that holds most: in stages 1 and 2 the one whose part touches the largest
    parameters, in the others the first, which also writes checkpoints."""
    setup = given.setup
    if setup.zero_stage not in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS):
        return 0
    job = prepare_job(given, rank=0)
    return job.partition(round_robin=job.options.round_robin_gradients).fullest_rank


def _by_stage(job: Job) -> RankAccount:
    stage = job.given.setup.zero_stage
    if stage is ZeroStage.NONE:
        return replicated_account(job)
    if stage is ZeroStage.PARAMETERS:
        return sharded_account(job)
    if stage is ZeroStage.OPTIMIZER and uses_bf16_optimizer(job):
        return bf16_optimizer_account(job)
    return sharded_states_account(job)
