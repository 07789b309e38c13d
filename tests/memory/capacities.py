"""The least capacity as the records were made: by bisection, of the steps that they ran."""

from memplan.memory.replaying.ledger import Ledger
from memplan.memory.replaying.replay import AllocatorPeaks, OnCard, Replayer
from memplan.units import MIB

FURTHER_STEPS = 2
"""Beyond those that are played out, of which there are two or three: records have four."""


def bisected(on_card: OnCard, *, max_cycles: int = FURTHER_STEPS) -> int:
    """A capacity with which a run completes, and dies with 2 MiB less, between what it asks for and reserves [bytes]."""
    peaks = on_card(None, max_cycles=max_cycles)
    low, high = peaks.allocated_bytes // (2 * MIB) - 2, -(-peaks.reserved_bytes // (2 * MIB))
    while high - low > 1:
        middle = (low + high) // 2
        if on_card(middle * 2 * MIB, max_cycles=max_cycles).died_at is None:
            high = middle
        else:
            low = middle
    return high * 2 * MIB


def in_steps(ledger: Ledger, num_steps: int) -> OnCard:
    """What becomes of so many steps of a run."""
    further = max(0, num_steps - len(ledger.steps))

    def on_card(
        capacity_bytes: int | None,
        *,
        max_cycles: int = further,  # noqa: ARG001
    ) -> AllocatorPeaks:
        return run_of(ledger).on_card(capacity_bytes, max_cycles=further)

    return on_card


def run_of(ledger: Ledger) -> Replayer:
    """What a ledger holds, with the step that recurs."""
    return Replayer(ledger.events, ledger.streams, ledger.cycle)
