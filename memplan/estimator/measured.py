"""What a run was measured to hold, part by part, and a prediction of the same run beside it."""

from collections.abc import Mapping
from statistics import median

from memplan.estimator.estimate import Estimate
from memplan.estimator.named_run import named_run
from memplan.fast_dataclass import dataclass
from memplan.memory.replaying.part_peaks import PartPeaks, part_peaks
from memplan.memory.runtime import ByteRange, overhead_range
from memplan.training.choices import AllocatorKind
from memplan.training.setup import TrainingSetup

PARTS = ("load", "forward", "backward", "step")
"""Of a run, as they are measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """Where memory ran out."""

    part: str
    message: str
    """torch's own, its first line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A run that took place: on a GPU, or on fake tensors."""

    model: Mapping[str, object]
    """Its config, as a ``config.json`` holds one."""
    model_name: str
    task: str
    setup: TrainingSetup
    """With every default filled in."""
    gpu: str
    """The card as torch prints its name; of a run on fake tensors, the catalog's name of the one pretended."""
    gpu_memory_bytes: int
    """As ``torch.cuda.get_device_properties`` has it."""
    compute_capability: tuple[int, int] | None
    is_fake: bool
    """Followed on fake tensors: what a kernel needs inside, and what lies beside the allocator, is missing."""
    is_alone: bool
    """One process that stands for a rank of several: its collectives carried nothing."""
    versions: Mapping[str, str]
    """Of memplan, torch, transformers and what else ran; CUDA's and the driver's."""
    num_params: int
    num_steps: int
    parts: Mapping[str, PartPeaks]
    """The last step's, and loading; what was reached, where memory ran out."""
    held_bytes: int
    """Between steps, as asked for."""
    context_bytes: int | None
    """What the driver counts for the process beside the allocator's segments; None: it did not say."""
    driver_bytes: int | None
    """What it counts in all, at the end."""
    others_bytes: int = 0
    """What other processes held of the card when this one began."""
    num_retries: int = 0
    """How often the allocator gave its cache back for want of memory."""
    rank: int = 0
    death: Death | None = None
    """Where memory ran out; None: the steps completed."""
    step_seconds: tuple[float, ...] = ()
    """Of each optimizer step that ended, its micro-batches in it, the GPU waited for; empty: not measured."""

    @property
    def step_s(self) -> float | None:
        """The middle one of the steps from the third on, before which much is made once; None: not measured [s].

        >>> from dataclasses import replace
        >>> made = Measurement(
        ...     model={}, model_name="m", task="causal-lm", setup=TrainingSetup(), gpu="g", gpu_memory_bytes=0,
        ...     compute_capability=None, is_fake=False, is_alone=False, versions={}, num_params=0, num_steps=3,
        ...     parts={}, held_bytes=0, context_bytes=None, driver_bytes=None, step_seconds=(2.0, 0.5, 0.25, 0.75, 0.375),
        ... )
        >>> made.step_s
        0.375
        """
        later = self.step_seconds[2:]
        return median(later) if later else None

    @property
    def peaks(self) -> PartPeaks:
        """The most that was reached in any part."""
        found = self.parts.values()
        return PartPeaks(
            requested_bytes=max((each.requested_bytes for each in found), default=0),
            allocated_bytes=max((each.allocated_bytes for each in found), default=0),
            reserved_bytes=max((each.reserved_bytes for each in found), default=0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number, as predicted and as measured [bytes]."""

    part: str
    what: str
    """``asked for``, ``allocated``, ``reserved``, ``held`` or ``parameters``."""
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1 if self.measured else float(self.predicted > 0)


def figures_of(estimate: Estimate, measured: Measurement) -> list[Figure]:
    """Every figure of a measurement that the estimate of its run has too.

    Where memory ran out, there is none of the parts: the verdict is what can be compared.
    """
    found = [
        Figure(
            part="", what="parameters", predicted=estimate.num_params, measured=measured.num_params
        )
    ]
    if measured.death is not None:
        return found
    predicted = predicted_parts(estimate)
    for part in PARTS:
        own, other = predicted.get(part), measured.parts.get(part)
        if own is None or other is None:
            continue
        for what, name in COUNTERS.items():
            if measured.is_fake and what != "asked for":
                continue  # fake tensors have no addresses, and kernels no scratch
            figure = Figure(
                part=part, what=what, predicted=getattr(own, name), measured=getattr(other, name)
            )
            found.append(figure)
    found.append(
        Figure(
            part="held",
            what="asked for",
            predicted=estimate.held_bytes,
            measured=measured.held_bytes,
        )
    )
    return found


COUNTERS = {
    "asked for": "requested_bytes",
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
}
"""What is compared of a part, and the fields of ``PartPeaks``."""


def beside_bytes(estimate: Estimate, measured: Measurement) -> ByteRange:
    """What lies beside the allocator's segments; NCCL's is none where collectives carried nothing [bytes]."""
    if not measured.is_alone:
        return estimate.overhead_bytes
    return overhead_range(measured.compute_capability, num_communicators=0)


def predicted_parts(estimate: Estimate) -> dict[str, PartPeaks]:
    """The peaks of the parts of the run that is played out, of the last step of each."""
    ledger = named_run(estimate).ledger
    last = max(each.step for each in ledger.stretches)
    marks = [
        (
            each.start,
            each.part.value
            if each.step in (0, last) and _is_of(each.part.value, each.step, last)
            else "",
        )
        for each in ledger.stretches
    ]
    expandable = estimate.setup.allocator is AllocatorKind.EXPANDABLE
    found = part_peaks(ledger.events, ledger.streams, marks, expandable=expandable)
    found.pop("", None)
    return found


def _is_of(part: str, step: int, last: int) -> bool:
    return step == (0 if part == "load" else last)
