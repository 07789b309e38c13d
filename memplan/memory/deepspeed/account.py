"""The account of one DeepSpeed rank."""

from collections.abc import Sequence
from dataclasses import replace

from memplan.errors import SetupError
from memplan.memory.account import RankAccount
from memplan.memory.deepspeed.bf16_optimizer import bf16_optimizer_account, uses_bf16_optimizer
from memplan.memory.deepspeed.job import Job, prepare_job
from memplan.memory.deepspeed.stage0 import replicated_account
from memplan.memory.deepspeed.stage3 import sharded_account
from memplan.memory.deepspeed.stage12 import sharded_states_account
from memplan.memory.deepspeed.stage12 import worst_rank as worst_of_sharded_states
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
    return replace(_by_stage(job), left_out=job.options.left_out)


def worst_rank(given: RankInput) -> int:
    """The lowest rank whose training step rises highest."""
    job = prepare_job(given, rank=0)
    return worst_of_sharded_states(job) if _ranks_differ(job) else 0


def rank_kinds(given: RankInput) -> Sequence[range]:
    """All ranks in runs of those that hold the same; the first, which saves for all, by itself."""
    job = prepare_job(given, rank=0)
    if not _ranks_differ(job):
        return [range(1), *filter(None, [range(1, job.num_ranks)])]
    buffer = job.flat_buffer(round_robin=job.options.round_robin_gradients)
    runs = [kind.ranks for kind in buffer.every_rank.kinds]
    return [range(1), *filter(None, [range(1, runs[0].stop), *runs[1:]])]


def _ranks_differ(job: Job) -> bool:
    """Whether a rank keeps whole gradients of what touches its part of one flat buffer.

    Stages 0 and 3 and ``BF16_Optimizer`` give every GPU the same.
    """
    stage = job.given.setup.zero_stage
    if stage not in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS) or job.num_ranks == 1:
        return False
    return stage is ZeroStage.GRADIENTS or not uses_bf16_optimizer(job)


def _by_stage(job: Job) -> RankAccount:
    stage = job.given.setup.zero_stage
    if stage is ZeroStage.NONE:
        return replicated_account(job)
    if stage is ZeroStage.PARAMETERS:
        return sharded_account(job)
    if stage is ZeroStage.OPTIMIZER and uses_bf16_optimizer(job):
        return bf16_optimizer_account(job)
    return sharded_states_account(job)
