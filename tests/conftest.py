"""What every test shares: one terminal, no hub, and the command line as a function."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from hypothesis.internal.entropy import deterministic_PRNG

from tests.batches import one_batch
from tests.forgetting import forget_everything

# What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Even more patient than the command line: to look once through the ten million objects that ten thousand
# tests have made takes ten seconds, and finds next to nothing.
PATIENCE = 1_000_000_000
gc.set_threshold(PATIENCE)

# Before anything builds a console: what is printed must not depend on where the tests run.
os.environ.update(COLUMNS="100", TERM="dumb", NO_COLOR="1", HF_HUB_OFFLINE="1", MEMPLAN_CONFIG="")
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "HF_TOKEN", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)

# The same examples in every run; `make fuzz` looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("fuzz", deadline=None)
settings.load_profile("fuzz" if "FUZZ_SECONDS" in os.environ else "fixed")
if "FUZZ_SECONDS" not in os.environ:
    # Constants out of whatever is imported by then: examples would hang on which tests ran before, and nine
    # hundred files be parsed for them in each process.
    providers._get_local_constants = Constants
# The first test with examples would have the collector look through all that others have left, for seconds.
with deterministic_PRNG():
    pass

FUZZ_SECONDS = 60.0
"""What all fuzzers together may take where ``FUZZ_SECONDS`` does not say."""

CHECKOUT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run of the command line left behind."""

    exit_code: int
    stdout: str
    stderr: str


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt")
    parser.addoption(
        "--update-accuracy", action="store_true", help="rewrite the figures of the README's table"
    )
    parser.addoption("--network", action="store_true", help="run the tests that need the hub")


FUZZERS = pytest.StashKey[int]()
"""How many tests share the time of the fuzzers."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files with long ones first: none is left for the end, where other processes would wait for it.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    fuzzers = [item for item in items if item.get_closest_marker("fuzz")]
    config.stash[FUZZERS] = len(fuzzers)
    if "fuzz" not in str(config.option.markexpr):
        for item in fuzzers:
            item.add_marker(pytest.mark.skip(reason="takes minutes: ask for it with -m fuzz"))
    if config.getoption("--network"):
        os.environ.pop("HF_HUB_OFFLINE", None)
        return
    skip = pytest.mark.skip(reason="needs the Hugging Face hub: ask for it with --network")
    for item in items:
        if "network" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    gc.freeze()  # tests and modules stay to the end


def pytest_runtest_setup() -> None:
    gc.set_threshold(PATIENCE)  # a command that ran in this process has left it its own


def pytest_sessionfinish() -> None:
    """What is unclosed and in a cycle is found once, not in each of pytest's five looks; not among what is remembered."""
    forget_everything()
    gc.collect()
    gc.freeze()


@pytest.fixture
def fuzz_seconds(request: pytest.FixtureRequest) -> float:
    """How long this one of the fuzzers may look for something [s]."""
    total = float(os.environ.get("FUZZ_SECONDS", FUZZ_SECONDS))
    return total / max(1, request.config.stash[FUZZERS])


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout."""
    return CHECKOUT


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """The folder of reference counts and measurements, beside the checkout where there is one."""
    folder = CHECKOUT.parent / "shared" / "reference"
    if not folder.is_dir():
        pytest.skip("there is no ../shared/reference beside this checkout")
    return folder


@pytest.fixture
def no_least_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much less memory would do as well is not looked for: of tests that a command is read and answered.

    Nothing of it is kept in a run, which is remembered and answers other tests.
    """
    from memplan.memory.required import PlayedRun

    monkeypatch.setattr(
        PlayedRun, "required_bytes", property(lambda played: played.peaks.reserved_bytes)
    )


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run ``memplan`` with these arguments, in this process."""

    def run_memplan(*arguments: str) -> Outcome:
        from memplan.cli.app import run as run_app

        capsys.readouterr()
        try:
            exit_code = run_app(arguments)
        except SystemExit as stop:
            exit_code = stop.code if isinstance(stop.code, int) else 1
        printed = capsys.readouterr()
        return Outcome(exit_code=exit_code, stdout=printed.out, stderr=printed.err)

    return run_memplan


@pytest.fixture
def labels_are_ids() -> Iterator[None]:
    """The batch of most scripts that records are made with, ``model(input_ids=ids, labels=ids)``."""
    with one_batch():
        yield
