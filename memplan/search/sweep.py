"""Every setup of a grid, estimated on every GPU: lazily, in a stable order, in flat memory."""

from collections.abc import Iterator, Sequence

from memplan.errors import SetupError
from memplan.estimator import Estimate, estimate, settled
from memplan.fast_dataclass import dataclass
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.search.grid import Grid, Impossible
from memplan.training.setup import TrainingSetup
from memplan.upward import Displayed


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """One setup of a sweep."""

    estimates: tuple[Estimate, ...]
    """On each GPU, in the order asked for; a single one without a verdict where none was."""

    @property
    def setup(self) -> TrainingSetup:
        """The setup, with every default filled in."""
        return self.estimates[0].setup


class Sweep(Displayed):
    """The results of a grid; estimates are made while it is iterated over.

    Iterating raises ``SetupError`` at its end where not a single setup could be trained.
    """

    def __init__(
        self,
        model: ModelSpec,
        grid: Grid,
        gpus: Sequence[GpuSpec] = (),
        *,
        exact: bool = False,
    ) -> None:
        self.model = model
        self.exact = exact
        """Every run is replayed through the allocator, whether bounds leave its verdict open or not."""
        self.grid = grid
        self.gpus = tuple(gpus)
        self.num_combinations = grid.num_combinations
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
        for each in self.grid.combinations():
            self.num_tried += 1
            result = self._try(each)
            if isinstance(result, SweepResult):
                if not found:
                    self.assumptions = result.estimates[0].assumptions
                found += 1
                yield result
            elif result is not None:
                self.impossible[result.reason] = self.impossible.get(result.reason, 0) + 1
        if not found:
            msg = next(iter(self.impossible), "the sweep leaves no setup: every one is excluded")
            raise SetupError(msg)

    def rows(self) -> list[dict[str, object]]:
        """Every setup on every GPU as a flat row, for a table of pandas' or polars'.

        Computes them all. Raises as iterating does.

        >>> import memplan
        >>> axes = {"micro_batch_size": [1, 2], "seq_len": 128}
        >>> rows = memplan.sweep("gpt2", axes, gpus=["t4"]).rows()
        >>> [(row["micro_batch_size"], row["gpu"], row["verdict"]) for row in rows]
        [(1, 't4-16gb', 'fits'), (2, 't4-16gb', 'fits')]
        """
        return [each.to_dict() for result in self for each in result.estimates]

    def __repr__(self) -> str:
        count = self.num_combinations
        cards = f" on {', '.join(gpu.short_name for gpu in self.gpus)}" if self.gpus else ""
        return f"Sweep({self.model.name}: {count} combination{'s' * (count != 1)}{cards})"

    def _try(
        self, combination: TrainingSetup | Impossible | None
    ) -> SweepResult | Impossible | None:
        if not isinstance(combination, TrainingSetup):
            return combination
        try:
            estimates = estimate_on_gpus(self.model, combination, self.gpus)
        except SetupError as error:
            return Impossible(str(error))
        if self.exact:
            estimates = tuple(settled(each, always=True) for each in estimates)
        return SweepResult(estimates=estimates)


def sweep(
    model: ModelSpec, grid: Grid, gpus: Sequence[GpuSpec] = (), *, exact: bool = False
) -> Sweep:
    """Estimate every setup of a grid, on every GPU; nothing is computed until it is iterated."""
    return Sweep(model, grid, gpus, exact=exact)


def estimate_on_gpus(
    model: ModelSpec, setup: TrainingSetup, gpus: Sequence[GpuSpec]
) -> tuple[Estimate, ...]:
    """One setup on several GPUs; without any, one estimate without a verdict.

    ``estimate`` remembers walks and accounts, which GPUs that run the same kernels share.
    """
    return tuple(estimate(model, setup, gpu) for gpu in gpus) or (estimate(model, setup),)
