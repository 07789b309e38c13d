"""A tool of the driver's is asked, and not waited for without end."""

import shutil
import subprocess

from memplan.text import one_line


class CardsUnreadableError(Exception):
    """A tool or a library that tells of cards is there, and what it said cannot be used."""


PATIENCE_S = 20
"""An assumption, not measured: long enough for a driver that wakes many cards first, short for somebody who waits."""
MAX_ANSWER = 20_000_000
"""Characters, an assumption: a hundred times what a machine of eight cards should need."""


def answer_of(command: tuple[str, ...]) -> str | None:
    """What the tool prints; None where there is no such tool.

    Raises ``CardsUnreadableError`` where it fails, hangs or does not end.
    """
    if shutil.which(command[0]) is None:
        return None
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        msg = f"`{shown}` did not answer in {PATIENCE_S} s"
        raise CardsUnreadableError(msg) from None
    except OSError as error:
        msg = f"`{shown}` cannot be run: {error.strerror or error}"
        raise CardsUnreadableError(msg) from None
    said = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        told = one_line(said or done.stderr.decode(errors="replace"))[:200]
        msg = f"`{shown}` failed: {told or f'exit code {done.returncode}'}"
        raise CardsUnreadableError(msg)
    if len(said) > MAX_ANSWER:
        msg = f"`{shown}` printed {len(said):,} characters"
        raise CardsUnreadableError(msg)
    return said


def whole_bytes(value: object, unit_bytes: int = 1) -> int | None:
    """A number of bytes out of what a tool said, such as ``"81559 MiB"``; None where it says none.

    >>> whole_bytes("81559 MiB", 2**20) == 81559 * 2**20, whole_bytes("N/A")
    (True, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    text = str(value).split()[:1]
    try:
        number = float(text[0]) if text else -1.0
    except ValueError:
        return None
    if not 0 <= number * unit_bytes < 2**53:  # a petabyte and more is no card; nor is NaN
        return None
    return int(number * unit_bytes)
