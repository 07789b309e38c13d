"""From a model and a setup to an ``Estimate``: its engine laid over the walked model."""

from memplan.estimator.assumptions import assumptions_of
from memplan.estimator.estimate import STAGE_NOTES, Estimate
from memplan.estimator.job import Job
from memplan.estimator.modelled.skipped_layers import skipped_words
from memplan.estimator.notes import notes_of, unread_words, viewed_words
from memplan.estimator.recording import attention_kernel
from memplan.fast_dataclass import replace
from memplan.graph.counts import num_parameters, total_parameters, trainable_parameters
from memplan.hardware.gpu import GpuSpec
from memplan.memory import accounts
from memplan.memory.account import RankAccount
from memplan.model.spec import ModelSpec
from memplan.training.compilation import Compilation
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.expert_parallel import Imbalance
from memplan.units import GIB, format_gib

NOTABLE_BYTES = GIB // 10
"""A difference from eager that the answer speaks of: what its figures show."""


def estimate(
    model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None = None, *, rank: int | None = None
) -> Estimate:
    """Estimate the memory of training ``model`` as ``setup`` says; a pure function.

    ``gpu`` decides which attention kernel can run and the verdict; without one, kernels are those
    of a current GPU and there is no verdict. ``rank`` asks for the account of one rank, in place of
    the worst one's.

    Raises ``SetupError`` for a setup that this model or engine cannot be trained with, and for a
    rank that it does not have.
    """
    return told(bare_estimate(model, setup, gpu, rank=rank), setup, is_worst=rank is None)


def bare_estimate(
    model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None = None, *, rank: int | None = None
) -> Estimate:
    """An estimate's figures, without what is said of them: enough for a setup that is one of many looked at.

    Raises ``SetupError`` as ``estimate`` does.
    """
    job = Job.of(model, setup, gpu)
    job.remember(model)
    account = job.account(rank=rank)
    return Estimate(
        model=model,
        crowded=_crowded(model, job.setup, gpu, rank=rank),
        setup=job.setup,
        gpu=gpu,
        run_source=job.run_source(account),
        num_params=_num_params(model, job),
        trainable_params=_trainable_params(model, job),
        account=account,
        activations_bytes=job.given.passes.after_forward.total_bytes,
        attention_kernel=attention_kernel(job.given.tape),
        assumptions=(),
    )


def told(answer: Estimate, asked: TrainingSetup, *, is_worst: bool = True) -> Estimate:
    """The same with the defaults that were used where they were not ``asked`` for, and with its notes."""
    model, setup, gpu = answer.model, answer.setup, answer.gpu
    job = Job.of_answer(model, setup, gpu)
    tape, passes = job.given.tape, job.given.passes
    return replace(
        answer,
        assumptions=assumptions_of(model, asked, setup, gpu),
        notes=(
            *notes_of(model, setup, gpu),
            *unread_words(tape, setup),
            *viewed_words(tape, setup),
            *_compared_with_eager(model, job, answer.account, gpu),
            *_stages(model, setup, answer.account, is_worst=is_worst),
            *_crowded_words(answer.crowded),
            *skipped_words(model, tape, passes),
        ),
    )


def _crowded(
    model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None, *, rank: int | None
) -> Estimate | None:
    """The same at the high end of a range of tokens that spread experts are given."""
    fullest = at_high_end(setup)
    return None if fullest is None else bare_estimate(model, fullest, gpu, rank=rank)


def at_high_end(setup: TrainingSetup) -> TrainingSetup | None:
    """The setup whose spread experts are given the most tokens of a range; None where there is no range."""
    spread = setup.experts_spread
    if spread is None or not spread.imbalance.is_range or setup.chosen_engine is Engine.MEGATRON:
        return None
    most = spread.imbalance.high
    return replace(setup, expert_imbalance=Imbalance(most, most))


def _crowded_words(crowded: Estimate | None) -> tuple[str, ...]:
    if crowded is None or crowded.setup.experts_spread is None:
        return ()
    most = crowded.setup.experts_spread.imbalance
    peak = format_gib(crowded.peak_bytes, digits=1)
    words = (
        f"Shown is the low end of what experts may be given; with {most} times an even share of the tokens "
        f"{peak} are allocated at the fullest, which is the high end of what is needed"
    )
    return (words,)


def _num_params(model: ModelSpec, job: Job) -> int:
    """The model's own: Megatron's rank has rows of the vocabulary beside them, which pad it."""
    if job.setup.chosen_engine is Engine.MEGATRON:
        return num_parameters(model)
    return total_parameters(job.given.tape)


def _trainable_params(model: ModelSpec, job: Job) -> int:
    if job.setup.chosen_engine is Engine.MEGATRON:
        return num_parameters(model)
    return trainable_parameters(job.given.tape)


def _stages(
    model: ModelSpec, setup: TrainingSetup, account: RankAccount, *, is_worst: bool
) -> tuple[str, ...]:
    """Of a pipeline, whose account it is."""
    if setup.pipeline is None:
        return ()
    from memplan.estimator.pipelines import stage_words  # only for pipelines

    words = stage_words(model, setup, account.rank)
    fullest, one = STAGE_NOTES
    return (f"{fullest if is_worst else one}{words}",)


def _compared_with_eager(
    model: ModelSpec, job: Job, account: RankAccount, gpu: GpuSpec | None
) -> tuple[str, ...]:
    """Where torch.compile raises the peak, and by how much."""
    if job.setup.compile is Compilation.NONE:
        return ()
    eager = Job.of(model, replace(job.setup, compile=Compilation.NONE), gpu)
    more = account.peak.peak_bytes - eager.account(rank=account.rank).peak.peak_bytes
    if more < NOTABLE_BYTES:
        return ()
    return (
        (
            f"torch.compile raises the peak by {format_gib(more, digits=1)}: its backward pass returns all "
            "gradients at once, and sums the embedding's in fp32"
        ),
    )


def least_bytes(model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None = None) -> int:
    """What no engine can do with less than: the activations alone [bytes].

    Much sooner told than an estimate. Raises ``SetupError`` as ``estimate`` does.
    """
    return accounts.activations_peak_bytes(Job.of(model, setup, gpu).given)


MANY_OPERATIONS = 1000
"""Llama has 68 for all of its layers, T5 190; where states go from one piece of a sequence to the next there are thousands."""


def is_long_to_tell(answer: Estimate) -> bool:
    """Whether so many operations are looked at that the same is told much sooner of few tokens.

    >>> from memplan.sources.models import load_model
    >>> from memplan.training.setup import TrainingSetup
    >>> is_long_to_tell(estimate(load_model("gpt2"), TrainingSetup()))
    False
    """
    given = Job.of_answer(answer.model, answer.setup, answer.gpu).given
    count = sum(len(segment.operations) for segment in given.tape.segments)
    return count > MANY_OPERATIONS


def walked_bytes(
    model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None = None
) -> tuple[int, int]:
    """What layers leave for the backward pass, and the most that the model's own tensors take [bytes].

    What the embeddings and the head leave is none of the layers'.

    Much sooner told than an estimate. Raises ``SetupError`` as ``estimate`` does.
    """
    given = Job.of(model, setup, gpu).given
    left = sum(
        each.first_bytes + (each.repeats - 1) * each.later_bytes
        for each in given.passes.forward
        if each.segment.layer is not None
    )
    kept = given.passes.after_forward.activations_bytes
    return min(left, kept), accounts.activations_peak_bytes(given)
