"""Every setup of a grid, estimated on every GPU: lazily, in a stable order, in flat memory."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from memplan.errors import SetupError
from memplan.estimator import Estimate, estimate, without_run
from memplan.fast_dataclass import dataclass, replace
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.search.grid import Grid, Impossible, Open
from memplan.search.patience import PATIENT
from memplan.training.setup import TrainingSetup
from memplan.upward import Displayed, Drawn, provided

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from memplan.estimator.time.run_cost import TimeQuestion


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """One setup of a sweep."""

    estimates: tuple[Estimate, ...]
    """On each GPU, in the order asked for; a single one without a verdict where none was."""

    @property
    def setup(self) -> TrainingSetup:
        """The setup, with every default filled in."""
        return self.estimates[0].setup


def _check_one_card(grid: Grid, gpus: tuple[GpuSpec, ...]) -> None:
    """Refuse to look for the largest that fits several cards."""
    if grid.looked_for is not None and len(gpus) != 1:
        msg = f"{grid.looked_for.value}: max is the largest that fits one GPU: name one"
        raise SetupError(msg)


class Sweep(Displayed):
    """The results of a grid, or of a part of one; estimates are made while it is iterated over.

    Iterating raises ``SetupError`` at its end where not a single setup of the grid could be trained.
    """

    def __init__(
        self,
        model: ModelSpec,
        grid: Grid,
        gpus: Sequence[GpuSpec] = (),
        *,
        num_jobs: int = 1,
        node_memory_bytes: int | None = None,
        times: "TimeQuestion | None" = None,
        notes: Sequence[str] = (),
        executor: "Executor | None" = None,
        part: range | None = None,
    ) -> None:
        self.model = model
        self.node_memory_bytes = node_memory_bytes
        """CPU RAM of one node; None: there is no verdict on it [bytes]."""
        self.times = times
        """What is asked of time, which rows then tell too; None: nothing."""
        self.notes = tuple(notes)
        """What the reader should know."""
        self.num_jobs = num_jobs
        """Processes that estimate; 1: this one."""
        self.grid = grid
        self.gpus = tuple(gpus)
        _check_one_card(grid, self.gpus)
        self.executor = executor
        """Who does the work, in place of processes of its own; None: these."""
        whole = range(grid.num_combinations)
        self.part = whole if part is None else part
        """Numbers of the combinations that are looked at, in the grid's order."""
        self.is_whole = self.part == whole
        self.num_combinations = len(self.part)
        """Of all axes, those included that yield no result."""
        self.num_tried = 0
        """Combinations that were looked at so far."""
        self.assumptions: tuple[str, ...] = ()
        """Of the first result, once it is there."""
        self.impossible: dict[str, int] = {}
        """Why combinations cannot be trained, and how many for each reason; so far."""

    def __iter__(self) -> Iterator[SweepResult]:
        self.num_tried = found = 0
        self.impossible = {}
        for result in self._results():
            self.num_tried += 1
            if isinstance(result, SweepResult):
                if not found:
                    self.assumptions = result.estimates[0].assumptions
                found += 1
                yield result
            elif result is not None:
                self.impossible[result.reason] = self.impossible.get(result.reason, 0) + 1
        if not found and self.is_whole:
            msg = next(iter(self.impossible), "the sweep leaves no setup: every one is excluded")
            raise SetupError(msg)

    def _results(self) -> "Iterator[SweepResult | Impossible | None]":
        """What becomes of every combination, in order."""
        node, start, stop = self.node_memory_bytes, self.part.start, self.part.stop
        num_jobs = min(self.num_jobs, self.num_combinations)
        if self.executor is None and num_jobs <= 1:
            tasks = self.grid.combinations(start, stop)
            return (answer_task(each, self.model, self.gpus, node) for each in tasks)
        from memplan.search.in_parallel.elsewhere import Elsewhere  # which most sweeps do without

        elsewhere = Elsewhere(
            work=answer_part,
            given=(self.grid, self.model, self.gpus, node),
            shared=(self.model, *self.gpus),
        )
        if self.executor is not None:
            return elsewhere.answers(self.executor, start, stop)
        from memplan.search.in_parallel.processes import over_processes  # only then

        return over_processes(partial(elsewhere.answers, start=start, stop=stop), num_jobs)

    def from_number(self, number: int, count: int | None = None) -> "Sweep":
        """The rest of it from one combination on, or so many of them; not computed yet.

        >>> from memplan.sources.models import load_model
        >>> whole = Sweep(load_model("gpt2"), Grid(axes={"micro_batch_size": [1, 2, 3, 4]}))
        >>> whole.from_number(2).part, whole.from_number(1, 1).part
        (range(2, 4), range(1, 2))
        """
        part = range(number, self.part.stop if count is None else number + count)
        return Sweep(
            self.model, self.grid, self.gpus, num_jobs=self.num_jobs, node_memory_bytes=self.node_memory_bytes,
            times=self.times, notes=self.notes, executor=self.executor if count is None else None, part=part,
        )  # fmt: skip

    @property
    def number(self) -> int:
        """Of the combination that was looked at last, in the grid's order from 0."""
        return self.part.start + self.num_tried - 1

    def rows(self) -> list[dict[str, object]]:
        """Every setup on every GPU as a flat row, for a table of pandas' or polars'.

        Computes them all. Raises as iterating does.

        >>> import memplan
        >>> axes = {"micro_batch_size": [1, 2], "seq_len": 128}
        >>> rows = memplan.sweep("gpt2", axes, gpus=["t4"]).rows()
        >>> [(row["micro_batch_size"], row["gpu"], row["verdict"]) for row in rows]
        [(1, 't4-16gb', 'fits'), (2, 't4-16gb', 'fits')]
        """
        answers = [each for result in self for each in result.estimates]
        return [replace(each, times=self.times).to_dict() for each in answers]

    def to_dict(self) -> dict[str, object]:
        """The document that ``memplan sweep --format json`` writes. Computes them all, as ``rows`` does."""
        found: dict[str, object] = provided("sweep_document", self)
        return found

    def plot(self, rows: str | None = None, columns: str | None = None) -> Drawn:
        """A heat map of what each setup needs, by two axes (``seq-len``, ``batch``, ``gpus``, ``setup``, ...).

        By default the first two that vary. Computes them all. Raises ``UsageError`` for an axis that
        there is not.
        """
        found: Drawn = provided("sweep_picture", self, rows, columns)
        return found

    def to_pandas(self) -> Any:
        """The rows as a ``pandas.DataFrame``. Raises ``UsageError`` where pandas is not installed."""
        return provided("data_frame", self)

    def __repr__(self) -> str:
        count = self.num_combinations
        cards = f" on {', '.join(gpu.short_name for gpu in self.gpus)}" if self.gpus else ""
        return f"Sweep({self.model.name}: {count} combination{'s' * (count != 1)}{cards})"


Task = TrainingSetup | Open | Impossible | None
"""One combination of a grid."""


def answer_task(
    task: Task,
    model: ModelSpec,
    gpus: Sequence[GpuSpec],
    node_memory_bytes: int | None,
) -> SweepResult | Impossible | None:
    """What becomes of one combination of a grid."""
    if task is None or isinstance(task, Impossible):
        return task
    try:
        with PATIENT:
            if isinstance(task, Open):
                task = _filled(task, model, gpus[0])
            estimates = estimate_on_gpus(model, task, gpus)
    except SetupError as error:
        return Impossible(str(error))
    if node_memory_bytes is not None:
        estimates = tuple(replace(each, node_memory_bytes=node_memory_bytes) for each in estimates)
    return SweepResult(estimates=estimates)


def _filled(task: Open, model: ModelSpec, gpu: GpuSpec) -> TrainingSetup:
    """The setup with the largest value that fits, or the least there is where none does."""
    from memplan.search.largest import largest_setup  # which most sweeps do without

    found = largest_setup(
        model, task.setup, gpu, task.quantity, global_batch_size=task.global_batch_size
    )
    return found.setup


def answer_task_elsewhere(
    task: Task,
    model: ModelSpec,
    gpus: Sequence[GpuSpec],
    node_memory_bytes: int | None,
) -> SweepResult | Impossible | None:
    """The same, to be sent to another process: runs stay where they were played."""
    result = answer_task(task, model, gpus, node_memory_bytes)
    if not isinstance(result, SweepResult):
        return result
    for each in result.estimates:
        _ = each.required_bytes, each.all_notes  # which are told of it
    return SweepResult(estimates=tuple(without_run(each) for each in result.estimates))


Given = tuple[Grid, ModelSpec, tuple[GpuSpec, ...], int | None]
"""What the parts of a sweep have in common: grid, model, cards, CPU RAM of a node."""


def answer_part(given: Given, start: int, stop: int) -> list[SweepResult | Impossible | None]:
    """What becomes of the combinations from one number to another, to be sent to another process."""
    grid, model, gpus, node = given
    return [
        answer_task_elsewhere(task, model, gpus, node) for task in grid.combinations(start, stop)
    ]


def sweep(
    model: ModelSpec,
    grid: Grid,
    gpus: Sequence[GpuSpec] = (),
    *,
    num_jobs: int = 1,
    node_memory_bytes: int | None = None,
) -> Sweep:
    """Estimate every setup of a grid, on every GPU; nothing is computed until it is iterated."""
    return Sweep(model, grid, gpus, num_jobs=num_jobs, node_memory_bytes=node_memory_bytes)


def estimate_on_gpus(
    model: ModelSpec, setup: TrainingSetup, gpus: Sequence[GpuSpec]
) -> tuple[Estimate, ...]:
    """One setup on several GPUs; without any, one estimate without a verdict.

    ``estimate`` remembers walks and accounts, which GPUs that run the same kernels share.
    """
    return tuple(estimate(model, setup, gpu) for gpu in gpus) or (estimate(model, setup),)
