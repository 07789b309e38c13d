"""Bytes at the peak by how long they are held, and what lowers each: ``--lifetimes``."""

from collections.abc import Mapping, Sequence

from memplan.estimator import Estimate
from memplan.memory.account import Lifetime
from memplan.report.estimates.columns import plain_gib
from memplan.report.terminal.blocks import Column

LIFETIME_MEANINGS: Mapping[str, str] = {
    "long_bytes": "held the whole run, at the peak of the step",
    "medium_bytes": "held from forward to backward, at the same moment",
    "short_bytes": "held inside an operation or between two, at the same moment",
}
"""What rows have besides where lifetimes are asked for."""
HELD: Mapping[Lifetime, str] = {
    Lifetime.LONG: "the whole run",
    Lifetime.MEDIUM: "forward to backward",
    Lifetime.SHORT: "an operation",
}
LOWERED_BY: Mapping[Lifetime, str] = {
    Lifetime.LONG: "tensor or pipeline parallel, sharding, adapters, smaller states",
    Lifetime.MEDIUM: "sequence or context parallel, smaller batches; for time: recomputing, offloading",
    Lifetime.SHORT: "smaller buckets, losses in pieces, fused kernels",
}
"""What makes less of it, in words."""


def lifetime_bytes(answer: Estimate) -> dict[Lifetime, int]:
    """The fullest moment of a training step, by lifetime [bytes].

    >>> import memplan
    >>> answer = memplan.estimate(memplan.load_model("gpt2"), memplan.TrainingSetup(seq_len=64))
    >>> sum(lifetime_bytes(answer).values()) == answer.peak_bytes
    True
    """
    found = dict.fromkeys(Lifetime, 0)
    for entry in answer.account.peak.entries:
        found[entry.kind.lifetime] += entry.num_bytes
    return found


def lifetime_row(answer: Estimate) -> dict[str, object]:
    """A row's keys: ``LIFETIME_MEANINGS``."""
    return {f"{each.value}_bytes": size for each, size in lifetime_bytes(answer).items()}


def lifetime_table(answer: Estimate) -> list[Column]:
    """Of one setup: lifetimes down, with what lowers each."""
    found = lifetime_bytes(answer)
    return [
        Column(header=("lifetime",), cells=tuple(each.value for each in found)),
        Column(header=("held for",), cells=tuple(HELD[each] for each in found)),
        Column(
            header=("GiB", "at the peak"),
            cells=tuple(plain_gib(size) for size in found.values()),
            is_figure=True,
        ),
        Column(header=("lowered by",), cells=tuple(LOWERED_BY[each] for each in found)),
    ]


def lifetime_columns(answers: Sequence[Estimate]) -> list[Column]:
    """Of several setups: a column for each lifetime."""
    found = [lifetime_bytes(each) for each in answers]
    return [
        Column(
            header=(lifetime.value,),
            cells=tuple(plain_gib(each[lifetime]) for each in found),
            is_figure=True,
        )
        for lifetime in Lifetime
    ]


def lifetime_words() -> Sequence[str]:
    """What the columns of several setups mean."""
    return [
        f"{each.value}: GiB held for {HELD[each]}, lowered by {LOWERED_BY[each]}"
        for each in Lifetime
    ]
