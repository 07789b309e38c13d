"""The account of one DeepSpeed rank."""

from dataclasses import replace

from memplan.memory.account import RankAccount
from memplan.memory.deepspeed.bf16_optimizer import bf16_optimizer_account, uses_bf16_optimizer
from memplan.memory.deepspeed.job import Job, prepare_job
from memplan.memory.deepspeed.stage0 import replicated_account
from memplan.memory.deepspeed.stage3 import sharded_account
from memplan.memory.deepspeed.stage12 import sharded_states_account, worst_rank
from memplan.memory.rank import RankInput, check_rank
from memplan.training.setup import ZeroStage


def deepspeed_account(
    given: RankInput, *, rank: int | None = None, capacity_bytes: int | None = None
) -> RankAccount:
    """What one data-parallel rank of DeepSpeed 0.19 holds, phase by phase [bytes].

    ``rank`` None: one whose training step rises highest. ``capacity_bytes`` of the
    GPU, where it is known, decides whether stages 1 and 2 flatten the weights there or, without
    room for two copies, on the CPU.

    Raises ``SetupError`` for engine options that DeepSpeed does not have, or a rank that the setup
    does not have.
    """
    job = prepare_job(given, rank=rank or 0, capacity_bytes=capacity_bytes)
    check_rank(job.rank, job.num_ranks)
    if rank is None and _ranks_differ(job):
        job = replace(job, rank=worst_rank(job))
    return replace(_by_stage(job), left_out=job.options.left_out, unsaved=job.options.unsaved)


def rank_kinds(given: RankInput) -> list[tuple[range, ...]]:
    """All ranks, those together that hold the same; the first, which saves for all, by itself."""
    job = prepare_job(given, rank=0)
    runs = [range(job.num_ranks)]
    if _ranks_differ(job):
        buffer = job.flat_buffer(round_robin=job.options.round_robin_gradients)
        runs = [kind.ranks for kind in buffer.every_rank.kinds]
    return [(run,) for run in (range(1), range(1, runs[0].stop), *runs[1:]) if run]


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
