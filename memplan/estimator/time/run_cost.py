"""How long a whole run takes, what energy it draws and what it costs, from the time of a step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memplan.errors import InputError
from memplan.estimator.time.site import USUAL_SITE, Site
from memplan.estimator.time.step_time import StepTime
from memplan.fast_dataclass import dataclass
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.power import board_power

if TYPE_CHECKING:
    from memplan.estimator.time.evaluating import Evaluations

DAY_S = 86_400
HOUR_S = 3_600


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeQuestion:
    """What is asked of a setup's time."""

    tokens: int | None = None
    """Of the whole run."""
    examples: int | None = None
    """Sequences of it, in place of tokens."""
    epochs: float = 1.0
    """How often these are gone through."""
    prices: Mapping[str, float] | float | None = None
    """Of an hour of one GPU, of each kind or of all; in whatever money."""
    mfu: float | None = None
    """The utilisation, where it is known: a share of the data sheet's rate."""
    site: Site = USUAL_SITE
    """The machines."""
    save_every_s: float | None = None
    """Between two checkpoints; None: as least is lost."""
    evaluations: "Evaluations | None" = None
    """How often the run is evaluated."""
    failures_per_gpu_day: float | None = None
    """How often one GPU ends the run; None: as was published."""

    def __post_init__(self) -> None:
        if self.failures_per_gpu_day is not None and not self.failures_per_gpu_day > 0:
            msg = f"failures_per_gpu_day: must be above 0, got {self.failures_per_gpu_day:g}; 0.001 is one in 1,000 days of a GPU"
            raise InputError(msg)
        if self.mfu is not None and not 0 < self.mfu <= 1:
            msg = f"mfu: must be above 0 and at most 1, got {self.mfu}; 0.45 is 45 %"
            raise InputError(msg)
        if self.tokens is not None and self.examples is not None:
            msg = "tokens: a run is as long as its tokens or its examples say: give one of the two"
            raise InputError(msg)

    @property
    def has_length(self) -> bool:
        """Whether a whole run is asked for."""
        return self.tokens is not None or self.examples is not None

    def price_of(self, gpu: GpuSpec | None) -> float | None:
        """Of an hour of this kind of GPU; None: not known."""
        if self.prices is None or isinstance(self.prices, int | float):
            return self.prices
        if gpu is None:
            return None
        names = (gpu.gpu_id, *gpu.aliases)
        return next((self.prices[name] for name in names if name in self.prices), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCost:
    """A whole run."""

    num_steps: float
    low_s: float
    expected_s: float
    high_s: float
    num_gpus: int
    watts: int | None
    """Of one card at its limit."""
    price: float | None
    """Of an hour of one GPU."""

    @property
    def days(self) -> float:
        """Expected."""
        return self.expected_s / DAY_S

    @property
    def gpu_hours(self) -> float:
        """All GPUs' hours, expected."""
        return self.expected_s / HOUR_S * self.num_gpus

    @property
    def energy_kwh(self) -> float | None:
        """The cards' own at their limit, the rest of the machines left out [kWh]."""
        return None if self.watts is None else self.gpu_hours * self.watts / 1000

    @property
    def cost(self) -> float | None:
        """In the money that the price is in."""
        return None if self.price is None else self.gpu_hours * self.price


def run_cost(
    time: StepTime, question: TimeQuestion, gpu: GpuSpec | None, *, sequences: int
) -> RunCost | None:
    """A whole run; None where its length is not asked for. ``sequences``: of one step, all GPUs'."""
    if question.tokens is not None:
        steps = question.epochs * question.tokens / time.tokens
    elif question.examples is not None:
        steps = question.epochs * question.examples / sequences
    else:
        return None
    return RunCost(
        num_steps=steps,
        low_s=steps * time.low_s,
        expected_s=steps * time.expected_s,
        high_s=steps * time.high_s,
        num_gpus=time.num_gpus,
        watts=board_power(gpu) if gpu is not None else None,
        price=question.price_of(gpu),
    )
