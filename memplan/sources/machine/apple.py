"""The GPU of a Mac: what Metal recommends of the memory that it shares with the CPU.

Read off logs (the catalog's source ``GGML``): two thirds of 16 and 32 GB, three quarters of 64. Of what lies between the lower share is taken. What
others have of it is not told.
"""

import sys

from memplan.hardware.gpu import Vendor
from memplan.hardware.machine import LocalCard
from memplan.sources.machine.asking import CardsUnreadableError, answer_of, whole_bytes
from memplan.units import GIB

QUESTION = ("sysctl", "-n", "machdep.cpu.brand_string", "hw.memsize")
LARGE_BYTES = 64 * GIB


def apple_cards() -> tuple[LocalCard, ...] | None:
    """The one GPU; None where this is no Mac, or one with Intel's processor.

    Raises ``CardsUnreadableError`` where ``sysctl`` tells no size.
    """
    if sys.platform != "darwin":
        return None
    said = answer_of(QUESTION)
    lines = (said or "").splitlines()
    if not lines or not lines[0].startswith("Apple "):
        return None
    whole = whole_bytes(lines[1]) if len(lines) > 1 else None
    if not whole:
        msg = f"`{' '.join(QUESTION)}` told no size of the memory"
        raise CardsUnreadableError(msg)
    name = f"{lines[0][:60].strip()} {round(whole / GIB)}GB"
    return (
        LocalCard(
            index=0,
            name=name,
            vendor=Vendor.APPLE,
            total_bytes=recommended_bytes(whole),
            used_bytes=0,
        ),
    )


def recommended_bytes(whole_bytes: int) -> int:
    """Metal's ``recommendedMaxWorkingSetSize`` [bytes].

    >>> recommended_bytes(64 * 2**30) // 2**20, recommended_bytes(32 * 2**30) // 2**20
    (49152, 21845)
    """
    return whole_bytes * 3 // 4 if whole_bytes >= LARGE_BYTES else whole_bytes * 2 // 3
