"""Whether a job may start, and where: its needs beside a platform's pools, with how far the answer is to be trusted."""

from collections.abc import Mapping, Sequence

from memplan.estimator import Estimate, Verdict
from memplan.estimator.job_request import JobRequest
from memplan.fast_dataclass import dataclass
from memplan.hardware.pool import Pool
from memplan.training.setup import TrainingSetup
from memplan.units import GIB, format_gib

ADMISSION_SCHEMA_VERSION = 1
"""Raised when a key of ``Admission.to_dict`` changes its name or its meaning."""
ONE_GPU = "one GPU"
SURE = 0.95
"""How sure ``Confidence.most`` is."""


def kind_of(setup: TrainingSetup) -> str:
    """Which of the accuracy table's kinds of job a setup is: its engine's, or one GPU's.

    >>> kind_of(TrainingSetup()), kind_of(TrainingSetup(num_gpus=8, engine="fsdp"))
    ('one GPU', 'fsdp')
    """
    return ONE_GPU if setup.num_gpus == 1 else setup.chosen_engine.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Confidence:
    """What became of real runs of one kind that memplan said to fit."""

    kind: str
    """Of job, as ``kind_of`` names it."""
    num_fits: int
    """Runs that were said to fit."""
    num_false: int
    """Of these, runs that died all the same."""

    @property
    def share(self) -> float | None:
        """The share of false ones; None where there was no run."""
        return self.num_false / self.num_fits if self.num_fits else None

    @property
    def most(self) -> float:
        """What that share is below with 95 % certainty, were the runs drawn at random.

        The upper end of Clopper and Pearson's interval (*Biometrika* 26, 1934), one-sided: the share at which so few
        false ones would be seen in one of twenty draws.

        >>> round(Confidence(kind="fsdp", num_fits=100, num_false=0).most, 4)
        0.0295
        """
        low, high = 0.0, 1.0
        if not self.num_fits:
            return high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._as_few(middle) > 1 - SURE else (low, middle)
        return high

    def _as_few(self, share: float) -> float:
        """How likely so few false ones are where each is false with this share."""
        from math import comb

        return sum(
            comb(self.num_fits, each) * share**each * (1 - share) ** (self.num_fits - each)
            for each in range(self.num_false + 1)
        )

    def to_dict(self) -> dict[str, object]:
        """Its key of ``Admission.to_dict``."""
        return {
            "kind": self.kind,
            "fits": self.num_fits,
            "false_fits": self.num_false,
            "false_fit_share": self.share,
            "false_fit_share_below": round(self.most, 4),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolAnswer:
    """What one pool means for a job."""

    pool: Pool
    answer: Estimate | None
    """On its card; None where it is not judged."""
    reason: str
    """In a line."""

    @property
    def verdict(self) -> Verdict | None:
        """Of card and CPU RAM; None where it is not judged."""
        return None if self.answer is None else self.answer.job_verdict

    def place(self, number: int) -> tuple[bool, bool, float, int]:
        """Its place among the pools, the smallest first: fits, cheap, early in the file."""
        price = float("inf") if self.pool.price is None else self.pool.price
        return self.verdict in (None, Verdict.OOM), self.verdict is not Verdict.FITS, price, number


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """The answer to a request."""

    admitted: bool
    chosen: PoolAnswer | None
    """Where it goes, or the pool that its needs are told of; None where none could be judged."""
    request: JobRequest | None
    """What it asks its scheduler for there."""
    confidence: Confidence
    pools: tuple[PoolAnswer, ...]
    """In the file's order."""

    @property
    def verdict(self) -> str:
        """``fits``, ``tight``, ``states fit`` or ``OOM`` on the pool, or ``no pool`` where none has the GPUs or runs it."""
        found = None if self.chosen is None else self.chosen.verdict
        return NO_POOL if found is None else found.value

    @property
    def reason(self) -> str:
        """Why, in a line."""
        if self.chosen is not None and (self.admitted or len(self.pools) == 1):
            return f"{self.chosen.pool.name}: {self.chosen.reason}"
        return "; ".join(f"{each.pool.name}: {each.reason}" for each in self.pools)

    def to_dict(self) -> dict[str, object]:
        """The document that ``memplan admit --format json`` writes; bytes are integers, None is not known."""
        return {
            "schema_version": ADMISSION_SCHEMA_VERSION,
            "admitted": self.admitted,
            "verdict": self.verdict,
            "reason": self.reason,
            "pool": self.chosen.pool.name if self.admitted and self.chosen is not None else None,
            "needs": self._needs(),
            "confidence": self.confidence.to_dict(),
            "pools": [_pool_dict(each) for each in self.pools],
        }

    def _needs(self) -> Mapping[str, object] | None:
        if self.chosen is None or self.chosen.answer is None or self.request is None:
            return None
        total, asked = self.chosen.answer.total_bytes, self.request
        return {
            "num_gpus": asked.num_gpus,
            "num_nodes": asked.num_nodes,
            "gpu_low_bytes": total.low,
            "gpu_high_bytes": total.high,
            "cpu_memory_bytes": asked.memory_bytes,
            "shared_memory_bytes": asked.shared_bytes,
            "num_cores": asked.num_cores,
            "disk_bytes": asked.disk_bytes,
            "time_s": asked.time_s,
        }


NO_POOL = "no pool"


def _pool_dict(each: PoolAnswer) -> dict[str, object]:
    return {
        "name": each.pool.name,
        "gpu": each.pool.gpu.gpu_id,
        "verdict": None if each.verdict is None else each.verdict.value,
        "price": each.pool.price,
        "reason": each.reason,
    }


def chosen_of(answers: Sequence[PoolAnswer]) -> PoolAnswer | None:
    """Where a job goes: what fits before what is tight, then the cheapest, then the first of the file."""
    judged = [
        (each.place(number), each) for number, each in enumerate(answers) if each.answer is not None
    ]
    return min(judged, key=lambda pair: pair[0])[1] if judged else None


def is_admitted(chosen: PoolAnswer | None, *, fails_on_tight: bool) -> bool:
    """Whether it may start: not where it dies, nor, where that is asked, where it might."""
    if chosen is None or chosen.verdict in (None, Verdict.OOM):
        return False
    return chosen.verdict is Verdict.FITS or not fails_on_tight


def reason_of(answer: Estimate) -> str:
    """A verdict in a line, with what is needed of what there is."""
    total, gpu = answer.total_bytes, answer.gpu
    assert gpu is not None, "a pool has cards"
    needs = (
        f"needs {total.low / GIB:,.1f}-{format_gib(total.high, digits=1)} of each GPU, and "
        f"{gpu.short_name} has {format_gib(gpu.capacity_bytes, digits=1)}"
    )
    if answer.verdict is not Verdict.OOM and answer.host_verdict is Verdict.OOM:
        needs = (
            f"needs {format_gib(answer.host_bytes, digits=1)} of CPU RAM of each node, and one has "
            f"{format_gib(answer.node_memory_bytes or 0, digits=1)}"
        )
    verdict = answer.job_verdict
    words = "does not fit" if verdict is Verdict.OOM or verdict is None else verdict.value
    return f"{words}: {needs}"
