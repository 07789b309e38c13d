"""Batches of sequences of unequal lengths: the worst one's peak, and how probable batches are.

A batch that is padded is as long as the longest of its sequences, so a batch of ``n`` is no longer than
``L`` with the probability ``F(L)^n``. Each length that a batch can have is estimated once.
"""

from memplan.estimator import Estimate, Verdict, estimate
from memplan.fast_dataclass import dataclass, replace
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.training.lengths import Batching, Lengths
from memplan.training.setup import TrainingSetup
from memplan.units import format_gib

RUN_STEPS = 1000
"""Steps of the run of which a probability is told, where none are given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPeak:
    """Batches of one length."""

    seq_len: int
    """Of the padded batch [tokens]."""
    probability: float
    """That a batch is so long."""
    peak_bytes: int
    verdict: Verdict | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPeaks:
    """All lengths that batches can have, the shortest first."""

    batches: tuple[BatchPeak, ...]
    batches_of_step: int
    """On all ranks together."""

    @property
    def worst(self) -> BatchPeak:
        """The fullest."""
        return max(self.batches, key=lambda each: each.peak_bytes)

    def percentile(self, share: float) -> int:
        """The peak that this share of batches does not exceed [bytes]."""
        total = 0.0
        for each in sorted(self.batches, key=lambda batch: batch.peak_bytes):
            total += each.probability
            if total >= share - 1e-12:
                return each.peak_bytes
        return self.worst.peak_bytes

    def probability_of(self, *verdicts: Verdict) -> float:
        """That a batch has one of these verdicts."""
        return min(1.0, sum(each.probability for each in self.batches if each.verdict in verdicts))

    def over_steps(self, probability: float, num_steps: int) -> float:
        """That some batch of so many steps, on some rank, is of that probability.

        Equation: ``1 - (1 - p)^(steps x batches of a step)``.

        >>> peaks = BatchPeaks(batches=(), batches_of_step=8)
        >>> round(peaks.over_steps(0.001, 100), 3)
        0.551
        """
        return float(1 - (1 - probability) ** (num_steps * self.batches_of_step))


def batch_peaks(model: ModelSpec, setup: TrainingSetup, gpu: GpuSpec | None = None) -> BatchPeaks:
    """Estimate a batch of every length that the setup's ``lengths`` can give.

    Raises ``SetupError`` as ``estimate`` does.
    """
    lengths = setup.lengths
    assert isinstance(lengths, Lengths), "a setup without lengths has one batch"
    found = []
    for seq_len, probability in batch_lengths(model, setup):
        answer = estimate(
            model, replace(setup, lengths=None, seq_len=seq_len, target_seq_len=None), gpu
        )
        found.append(
            BatchPeak(
                seq_len=seq_len,
                probability=probability,
                peak_bytes=answer.peak_bytes,
                verdict=answer.verdict,
            )
        )
    return BatchPeaks(
        batches=tuple(found),
        batches_of_step=setup.data_parallel * setup.gradient_accumulation_steps,
    )


def batch_lengths(model: ModelSpec, setup: TrainingSetup) -> list[tuple[int, float]]:
    """Lengths of padded batches, each with its probability.

    Sequences longer than the setup's ``seq_len`` are cut to it.
    """
    lengths = setup.lengths
    assert isinstance(lengths, Lengths), "a setup without lengths has one batch"
    if lengths.batching is Batching.PACKED:
        return [(setup.resolve(model.context_length).seq_len or 1, 1.0)]
    count = setup.micro_batch_size * setup.job.sequences_per_example
    found: dict[int, float] = {}
    below = 0.0
    for length, _ in lengths.shares:
        up_to = lengths.share_up_to(length) ** count
        cut = length if setup.seq_len is None else min(length, setup.seq_len)
        seq_len = lengths.padded(cut)
        found[seq_len] = found.get(seq_len, 0.0) + up_to - below
        below = up_to
    return [(each, probability) for each, probability in found.items() if probability > 0]


def with_batches(answer: Estimate, *, num_steps: int = RUN_STEPS) -> Estimate:
    """An answer for the worst batch, with what is probable noted beside it."""
    lengths = answer.setup.lengths
    if lengths is None or lengths.batching is Batching.PACKED:
        return answer
    peaks = batch_peaks(answer.model, answer.setup, answer.gpu)
    return replace(answer, notes=(*answer.notes, *batch_lines(peaks, num_steps=num_steps)))


def batch_lines(peaks: BatchPeaks, *, num_steps: int = RUN_STEPS) -> tuple[str, ...]:
    """The distribution in words."""
    worst = peaks.worst
    texts = [
        f"p{share} {format_gib(peaks.percentile(share / 100), digits=1)}" for share in (50, 95, 99)
    ]
    run = _percent(peaks.over_steps(worst.probability, num_steps))
    told = (
        f"Worst batch: {worst.seq_len:,} tokens, {format_gib(worst.peak_bytes, digits=1)}, 1 of "
        f"{_odds(worst.probability)} batches, {run} of runs of {num_steps} steps; "
        f"batches by peak: {', '.join(texts)}"
    )
    lines = [told]
    out, tight = peaks.probability_of(Verdict.OOM), peaks.probability_of(Verdict.TIGHT)
    for probability, words in ((out, "does not fit"), (tight, "is tight")):
        if probability:
            run = _percent(peaks.over_steps(probability, num_steps))
            lines.append(
                f"A batch {words} with probability {_percent(probability)}: {run} of runs of "
                f"{num_steps} steps meet one"
            )
    return tuple(lines)


def _odds(probability: float) -> str:
    return f"{1 / probability:,.0f}" if probability else "infinitely many"


def _percent(probability: float) -> str:
    if 0 < probability < 0.0001:
        return f"{probability:.1e}"
    return (
        f"{probability:.2%}"
        if probability < 0.9999
        else f"{probability:.4%}".replace("100.0000", "100")
    )
