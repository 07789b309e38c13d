"""What every engine's account is made from."""

from collections.abc import Iterable

from memplan.errors import SetupError
from memplan.fast_dataclass import dataclass
from memplan.graph.core.tape import Tape
from memplan.graph.operations.reduction import Multiprocessors
from memplan.memory.beside import ALONE, Beside
from memplan.memory.passes import StepPasses
from memplan.training.precision import PRECISIONS, PrecisionFormats
from memplan.training.setup import TrainingSetup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stage:
    """A pipeline's stage, recorded and walked; stages that are alike share both."""

    tape: Tape
    passes: StepPasses


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInput:
    """A recorded model, its walk, and the setup with every default filled in."""

    tape: Tape
    passes: StepPasses
    setup: TrainingSetup
    """Resolved: no field is None that has a default."""
    beside: Beside = ALONE
    """What the job has beside the model."""
    device: Multiprocessors | None = None
    """The card by which the optimizer's own sums are split; None: the one that the tape was walked for."""
    stages: tuple[Stage, ...] = ()
    """Of a pipeline, all of them in the model's order; the tape is the whole model's then, and so is the
    walk, of its forward pass alone."""

    @property
    def reducing_device(self) -> Multiprocessors | None:
        """By which the optimizer's sums are split; None: scratch inside kernels is left out."""
        options = self.tape.options
        if options.decomposed:
            return None
        own = Multiprocessors(options.multiprocessors, options.threads_per_multiprocessor)
        return self.device or own

    @property
    def formats(self) -> PrecisionFormats:
        """The formats of the setup's precision."""
        return PRECISIONS[self.setup.chosen_precision]


def check_rank(rank: object, num_ranks: int) -> None:
    """Refuse a rank that a setup does not have.

    Raises ``SetupError``.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < num_ranks:
        msg = f"rank: must be from 0 to {num_ranks - 1}, got {rank!r}"
        raise SetupError(msg)


def in_every_replica(ranks: range, *, degree: int, num_ranks: int) -> tuple[range, ...]:
    """Places within a sharded copy of the model, as ranks of all copies.

    >>> in_every_replica(range(1, 3), degree=4, num_ranks=8)
    (range(1, 3), range(5, 7))
    """
    return tuple(
        range(first + ranks.start, first + ranks.stop) for first in range(0, num_ranks, degree)
    )


def joined(runs: Iterable[range]) -> tuple[range, ...]:
    """Runs of ranks in order, those that touch as one.

    >>> joined([range(4, 6), range(0, 1), range(1, 3)])
    (range(0, 3), range(4, 6))
    """
    found: list[range] = []
    for run in sorted(runs, key=lambda each: each.start):
        if found and found[-1].stop == run.start:
            found[-1] = range(found[-1].start, run.stop)
        elif run:
            found.append(run)
    return tuple(found)
