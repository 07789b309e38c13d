"""The nearest change that makes a setup fit."""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from memplan.estimator import Estimate, Verdict, without_run
from memplan.fast_dataclass import dataclass, replace
from memplan.model.spec import ModelSpec
from memplan.search.batch import largest_micro_batch, most_room
from memplan.search.in_parallel.together import all_of
from memplan.search.planning.concessions import Concession
from memplan.training.choices import AllocatorKind
from memplan.training.coercion import coerce_enum
from memplan.upward import provided

if TYPE_CHECKING:
    from memplan.hardware.gpu import GpuSpec

WEIGHT_BYTES = 2
"""Of an element of a weight in 16 bit."""
LOADING_SHARE = 0.8
"""Of a GPU that the whole model may take while it is loaded, before zero.Init is called for."""

Place = tuple[int, str]
"""A row's number and a GPU's id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """What stands beside estimates: how far one could go, and what would help."""

    largest: dict[Place, int]
    """The largest micro-batch that fits, for each row and GPU; 0: none."""
    advice: tuple["Advice", ...]
    """For each GPU on which no setup fits for certain, what would make the nearest one fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What to change in a setup that does not fit."""

    answer: Estimate
    """Of the setup that does not fit."""
    better: Estimate | None
    """Of the nearest setup that fits; None where none was found."""

    @property
    def missing_bytes(self) -> int:
        """How much it lacks [bytes]."""
        return missing_bytes(self.answer)

    @property
    def saved_bytes(self) -> int:
        """What the change saves, at the low end of the range [bytes]."""
        if self.better is None:
            return 0
        return self.answer.least_total_bytes - self.better.least_total_bytes

    @property
    def text(self) -> str:
        """What to change, what that saves, and the options for it, in a line."""
        found: str = provided("advice_text", self)
        return found

    def to_dict(self) -> dict[str, object]:
        """One of the ``hints`` of ``--format json``."""
        found: dict[str, object] = provided("hint_row", self)
        return found


def hints_of(answer: Estimate, allow: str | Sequence[str]) -> tuple[Advice, ...]:
    """What would make one estimate fit; nothing where it does. Raises ``SetupError`` for an unknown word."""
    words = allow.split(",") if isinstance(allow, str) else allow
    allowed = [coerce_enum("allow", each, Concession) for each in words if each]
    return hints_for(answer.model, [[answer]], places=(), allow=allowed).advice


def largest_batch_of(answer: Estimate) -> int | None:
    """The largest micro-batch with which its setup fits its GPU, 0 where none does; None: not known."""
    if answer.gpu is None or answer.unmodelled:
        return None
    return largest_micro_batch(answer.model, answer.setup, answer.gpu, known=answer)


def shortage(answer: Estimate) -> tuple[int, int]:
    """What a GPU lacks, then what a node lacks [bytes]: which of several comes nearest."""
    node = answer.node_memory_bytes
    return missing_bytes(answer), max(0, answer.host_bytes - node) if node is not None else 0


def nearest(answers: Sequence[Estimate]) -> int:
    """The place of the one that lacks least, of equals the first.

    What one allocates alone may be more than another lacks: then its run is not replayed.
    """
    order = sorted((_least_shortage(each), number) for number, each in enumerate(answers))
    best: tuple[tuple[int, int], int] | None = None
    for least in order:
        if best is not None and least > best:
            break
        found = shortage(answers[least[1]]), least[1]
        best = found if best is None else min(best, found)
    assert best is not None, "there is one"
    return best[1]


def _least_shortage(answer: Estimate) -> tuple[int, int]:
    """What ``shortage`` is at least."""
    if answer.gpu is None:
        return shortage(answer)
    least = answer.worst_bytes + answer.overhead_bytes.low - answer.gpu.capacity_bytes
    return max(0, least), 0


def missing_bytes(answer: Estimate) -> int:
    """How much the low end of the range exceeds the GPU by, or, where it is tight, the high end [bytes]."""
    if answer.gpu is None:
        return 0
    beyond = answer.least_total_bytes - answer.gpu.capacity_bytes
    return beyond if beyond > 0 else max(0, answer.total_bytes.high - answer.gpu.capacity_bytes)


def advise(
    model: ModelSpec,
    answer: Estimate,
    *,
    micro_batch: int | None = None,
    allow: Sequence[Concession] = (),
) -> Advice:
    """The nearest change that makes a setup fit: the one that costs least speed.

    ``allow`` is what may be given up beside it, the least first.

    ``micro_batch`` is the largest that fits where it is known. A smaller micro-batch keeps the
    global batch by accumulating more. What is offloaded has to have room in a usual node of the card where nobody says
    how much CPU RAM there is; where nothing else fits, what needs more is named, and last what is tight.
    """
    gpu = answer.gpu
    if gpu is None:
        return Advice(answer=answer, better=None)
    from memplan.search.change_search import ChangeSearch  # only where nothing fits
    from memplan.search.nearest_changes import nearest_changes, with_zero_init

    search = ChangeSearch(model, answer, gpu)
    changes = nearest_changes(model, answer, gpu, micro_batch, allow)
    if most_room(answer, gpu.capacity_bytes) >= 0:
        # What it asks for fits: it is the allocator's segments that do not.
        changes = chain([replace(answer.setup, allocator=AllocatorKind.EXPANDABLE)], changes)
    if answer.num_params * WEIGHT_BYTES > LOADING_SHARE * gpu.capacity_bytes:
        changes = map(with_zero_init, changes)
    for setup in changes:
        if search.fits(setup):
            return Advice(answer=answer, better=search.found)
    return Advice(answer=answer, better=search.next_best)


def hints_for(
    model: ModelSpec,
    rows: Sequence[Sequence[Estimate]],
    places: Collection[Place] | None = None,
    *,
    allow: Sequence[Concession] = (),
) -> Hints:
    """The largest micro-batch of rows on their GPUs, and advice where nothing fits a GPU.

    ``places`` are the rows and GPUs to look at; None: all. ``allow`` is what advice may give up.
    """
    asked: dict[Place, tuple[Estimate, GpuSpec]] = {}
    for number, row in enumerate(rows):
        for each in row:
            if each.gpu is None or each.unmodelled:
                continue
            place = (number, each.gpu.gpu_id)
            if places is None or place in places:
                asked[place] = each, each.gpu
    hopeless = [
        column[nearest(column)]
        for column in zip(*rows, strict=True)
        if all(each.job_verdict in (Verdict.OOM, Verdict.TIGHT) for each in column)
    ]
    known = list(asked.values())

    def work(number: int) -> int | Advice:
        if number < len(hopeless):
            return handed_over(advise(model, hopeless[number], allow=allow))
        answer, gpu = known[number - len(hopeless)]
        return largest_micro_batch(model, answer.setup, gpu, known=answer)

    gpus = [gpu for _, gpu in known]
    found = all_of(work, len(hopeless) + len(known), shared=[model, *hopeless, *gpus])
    sizes = [each for each in found if isinstance(each, int)]
    return Hints(
        largest=dict(zip(asked, sizes, strict=True)),
        advice=tuple(each for each in found if isinstance(each, Advice)),
    )


def handed_over(advice: Advice) -> Advice:
    """What of an advice is told, without the runs behind it."""
    _ = advice.missing_bytes, advice.saved_bytes
    better = without_run(advice.better) if advice.better is not None else None
    return replace(advice, answer=without_run(advice.answer), better=better)
