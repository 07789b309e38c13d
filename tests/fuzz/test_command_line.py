"""Whatever is handed to the command line is answered, or refused in one short line.

The same few hundred cases in every run of the tests; ``make fuzz`` tries new ones.
"""

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.commands import CASES, Case, mutated, written

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_least_capacity")]

MAX_SECONDS = 20.0
"""For one command, on a machine that has other things to do."""
MAX_LINE = 1000
"""Characters of an error."""
ROUNDS = 3
"""Of all cases, in every run of the tests."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

Run = Callable[..., Any]


@contextmanager
def time_limit() -> Iterator[None]:
    """Interrupt what hangs, where there are signals."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(case: Case, run: Run, folder: Path) -> None:
    """Run a case and look at what it answers."""
    for name, value in case.files.items():
        (folder / name).write_bytes(written(name, value))
    names = {f"{{{name}}}": str(folder / name) for name in case.files}
    arguments = [names.get(word, word) for word in case.arguments]
    try:
        with time_limit():
            outcome = run(*arguments)
    except BaseException as error:
        error.add_note(f"memplan {arguments}\n{case.files}"[:5000])
        raise
    said = f"memplan {arguments}\n{case.files}\n{outcome.stderr}"[:5000]
    assert outcome.exit_code in (0, 2, 3, 4, 5), said
    assert not CONTROL.search(outcome.stdout + outcome.stderr), said
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("memplan: error: ")]
    assert len(errors) == (outcome.exit_code != 0), said
    if outcome.exit_code in (2, 3):
        assert len(errors[0]) <= MAX_LINE, said
        assert outcome.stderr.count("\n") < 30, said


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case.arguments[:3])[:40])
def test_every_command_answers_before_it_is_changed(case: Case, run: Run, tmp_path: Path) -> None:
    check(case, run, tmp_path)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_changed_command_is_answered_or_refused(seed: int, run: Run, tmp_path: Path) -> None:
    random_ = random.Random(seed)
    for case in CASES:
        check(mutated(case, random_), run, tmp_path)


@pytest.mark.fuzz
def test_no_changed_command_breaks_it(run: Run, tmp_path: Path, fuzz_seconds: float) -> None:
    seed = time.time_ns()
    end = time.monotonic() + fuzz_seconds
    while time.monotonic() < end:
        seed += 1
        random_ = random.Random(seed)
        check(mutated(random_.choice(CASES), random_), run, tmp_path)
