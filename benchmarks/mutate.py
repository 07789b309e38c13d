"""Whether the tests would see a slip in the estimation core: small changes at random, each of which some test has to fail on.

``python benchmarks/mutate.py --seed 1`` first runs the tests of ``TESTS`` once, file by file, and notes which places of the
core each of them runs and how long it takes; then it draws mutants of places that are run at all, and for each runs the
quickest tests that run its place until one fails. It exits 1 where fewer than ``LEAST_KILLED`` die, and names those that
live. No file is changed: a process that is forked before memplan is imported finds the changed module in place of the one on
disk. Nothing but the standard library and pytest is needed.
"""

import argparse
import ast
import base64
import builtins
import hashlib
import importlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import pytest
from mutants import RAN, Mutant, marked, mutants_of

if TYPE_CHECKING:
    from _pytest.reports import TestReport

ROOT = Path(__file__).parent.parent
CORE = ("graph", "memory", "training", "compute", "estimator", "families", "search")
"""Packages of the estimation core that are mutated."""
TESTS = (
    *(f"memplan/{each}" for each in CORE),
    "tests/memory", "tests/graph", "tests/training", "tests/compute", "tests/estimator", "tests/formulas",
    "tests/families", "tests/search", "tests/accuracy", "tests/sources/test_requests.py", "tests/test_every_field.py",
)  # fmt: skip
"""Tests and examples that look at it: most of those of the command line and of reports would only be slower."""
PRELOADED = ("rich.console", "rich.table", "typer.main", "yaml")
"""What every process would import anew otherwise."""
LEAST_KILLED = 0.9
MOST_FILE_S = 40.0
"""Of a file of tests, what it runs in more CPU time than that is not looked at."""
MOST_MUTANT_S = 45.0
"""CPU time, together, of the tests that are run for one mutant where none fails."""
ENDLESS = 3
"""A mutant that takes so many times what its tests take hangs, which is seen as well."""
MOST_BYTES = 6 << 30
"""So is one that asks for more memory than that."""
FIRST = 4
"""How many tests of a file are run before any further one of a file that was run; twice as many each time after."""
FAILED, BROKEN = 1, 2
"""How a process ends in which a test failed, and one that could not do what it was asked for."""


# -- one process per question --------------------------------------------------------------------


class Code:
    """Compiled modules that are imported in place of those on disk."""

    def __init__(self, replaced: Mapping[str, CodeType]) -> None:
        self.replaced = replaced

    def install(self) -> None:
        """Have every import look here first."""
        usual = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            return self.replaced.get(loader.path) or usual(loader, fullname)

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


@dataclass(eq=False)  # pytest keeps plugins in sets
class Asked:
    """A pytest plugin that collects and runs what it is asked for, instead of what the command line says."""

    ask: Callable[["Asked", pytest.Session], None]
    has_failed: bool = False
    has_passed: bool = False

    def run(self, session: pytest.Session, item: pytest.Item, then: pytest.Item | None) -> bool:
        """Whether a test passes."""
        self.has_passed = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=then)
        return self.has_passed and not session.testsfailed

    def pytest_runtest_logreport(self, report: "TestReport") -> None:
        """Note it."""
        self.has_failed |= report.failed
        self.has_passed |= report.when == "call" and report.passed

    def pytest_collection(self) -> bool:
        """Nothing yet."""
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Everything at its time."""
        self.ask(self, session)
        return True


def fork(run: Callable[[], int], seconds: float | None) -> int:
    """Start a process of so much CPU time, or of any; it ends with what ``run`` returns."""
    process = os.fork()
    if process:
        return process
    if seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        signal.alarm(int(20 * seconds))  # what waits for ever takes no CPU time
    try:
        os._exit(run())
    except BaseException:  # noqa: BLE001 - no process goes on as if it were its parent
        os._exit(BROKEN)


def pytest_with(
    ask: Callable[["Asked", pytest.Session], None], replaced: Mapping[str, CodeType]
) -> int:
    """Run pytest with these modules, silently; its exit status, 0 where nothing was collected."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    Code(replaced).install()
    plugin = Asked(ask)
    flags = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "--capture=no"]
    status = pytest.main(flags, plugins=[plugin])
    if plugin.has_failed:
        return FAILED
    # Nothing is found where nothing was looked for, and tests that were skipped are none that failed.
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else BROKEN


def all_in_forks(starts: Iterable[Callable[[], int]], jobs: int) -> Iterator[tuple[int, int]]:
    """Start each, ``jobs`` at a time; the number and the wait status of each as it ends."""
    running: dict[int, int] = {}
    waiting = enumerate(starts)
    while True:
        for number, start in waiting:
            running[start()] = number
            if len(running) >= jobs:
                break
        if not running:
            return
        process, status = os.waitpid(-1, 0)
        if process in running:
            yield running.pop(process), status


# -- which tests run which places ----------------------------------------------------------------


class Places:
    """Every line of the core, numbered through."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.count = 0
        digest = hashlib.sha256()
        for path in modules():
            text = path.read_text(encoding="utf-8")
            digest.update(text.encode())
            self.first[path.relative_to(ROOT).as_posix()] = self.count
            self.count += text.count("\n") + 2
        self.digest = digest.hexdigest()

    def codes(self) -> dict[str, CodeType]:
        """The core with marks."""
        return {
            str(ROOT / name): compile(marked((ROOT / name).read_text("utf-8"), first), name, "exec")
            for name, first in self.first.items()
        }

    def span(self, path: str) -> slice:
        """Those of one module."""
        first = self.first[path]
        after = min((each for each in self.first.values() if each > first), default=self.count)
        return slice(first, after)


def modules() -> list[Path]:
    """The core's."""
    return [path for package in CORE for path in sorted((ROOT / "memplan" / package).rglob("*.py"))]


def files_of_tests() -> list[str]:
    """Every file of ``TESTS``; each of the core's own packages with its examples as one."""
    found: list[str] = []
    for folder in TESTS:
        files = sorted((ROOT / folder).rglob("test_*.py"))
        found += [each.relative_to(ROOT).as_posix() for each in files] or [folder]
    return found


@dataclass(frozen=True)
class Seen:
    """What one test, or the import of its file, runs."""

    name: str
    """The test's id, or the file alone."""
    seconds: float
    packed: str

    @property
    def file(self) -> str:
        """Where it is."""
        return self.name.partition("::")[0]

    @property
    def is_import(self) -> bool:
        """Whether it is what the file needs before any test."""
        return self.name == self.file

    def ran(self) -> bytes:
        """One byte a place."""
        return zlib.decompress(base64.b64decode(self.packed))


def look(plugin: Asked, session: pytest.Session, name: str, ran: bytearray, found: Path) -> int:
    """Run one file or folder of tests, noting what each runs."""
    with found.open("w", encoding="utf-8") as file:

        def note(what: str, began: float) -> None:
            seconds = time.process_time() - began
            packed = base64.b64encode(zlib.compress(bytes(ran), 1)).decode()
            file.write(json.dumps([what, seconds, packed]) + "\n")
            file.flush()

        began = time.process_time()
        items = session.perform_collect([name])
        note(name, began)
        for item, then in zip(items, [*items[1:], None], strict=True):
            began = time.process_time()
            ran[:] = bytes(len(ran))
            if plugin.run(session, item, then):  # type: ignore[arg-type]
                note(item.nodeid, began)
            session.testsfailed = 0
    return 0


def look_at_all(places: Places, folder: Path, jobs: int) -> list[Seen]:
    """What every test runs."""
    names = files_of_tests()
    found = [folder / f"{number}.jsonl" for number in range(len(names))]

    def ask(plugin: Asked, session: pytest.Session) -> None:
        for name in places.first:
            importlib.import_module(
                name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            )
        starts = (
            lambda name=name, path=path: fork(
                lambda: look(plugin, session, name, ran, path), MOST_FILE_S
            )
            for name, path in zip(names, found, strict=True)
        )
        for _ in all_in_forks(starts, jobs):
            pass

    ran = bytearray(places.count)
    setattr(builtins, RAN, ran)
    codes = places.codes()
    os.waitpid(fork(lambda: pytest_with(ask, codes), 10 * MOST_FILE_S), 0)
    rows = []
    for path in found:
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        # The last line of what was stopped may be half a line.
        rows += [Seen(*json.loads(line)) for line in lines if line.endswith("]")]
    return rows


def remembered(path: Path | None, places: Places) -> list[Seen]:
    """What was seen when this very core was last looked at."""
    if path is None or not path.exists():
        return []
    digest, *rows = path.read_text("utf-8").splitlines()
    return [Seen(*json.loads(row)) for row in rows] if digest == places.digest else []


def remember(path: Path | None, places: Places, seen: Sequence[Seen]) -> None:
    """Keep it for the next time."""
    if path is not None:
        rows = [json.dumps([each.name, each.seconds, each.packed]) for each in seen]
        path.write_text("\n".join([places.digest, *rows]), "utf-8")


# -- which mutants, and which tests for each -----------------------------------------------------


def drawn(seen: Sequence[Seen], places: Places, number: int, seed: int) -> list[Mutant]:
    """Mutants of places that some test runs, each line as likely as any other."""
    run = 0
    for each in seen:
        run |= int.from_bytes(each.ran(), "little")
    is_run = run.to_bytes(places.count, "little")
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for path in modules():
        for mutant in mutants_of(path, ROOT):
            if is_run[places.first[mutant.path] + mutant.place]:
                by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    chance = random.Random(seed)
    lines = sorted(by_line)
    return [chance.choice(by_line[each]) for each in chance.sample(lines, min(number, len(lines)))]


def users(paths: Iterable[str]) -> dict[str, set[str]]:
    """The core's modules that import something of each of these, and itself."""
    found = {path: {path} for path in paths}
    names = {path.removesuffix(".py").replace("/", "."): path for path in found}
    names |= {each.removesuffix(".__init__"): path for each, path in names.items()}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in names:
                found[names[node.module]].add(path.relative_to(ROOT).as_posix())
    return found


def tests_for(
    mutants: Sequence[Mutant], seen: Sequence[Seen], places: Places
) -> list[tuple[list[Seen], list[Seen]]]:
    """For each, the tests that run its place; and those that run its module or a user of it, for what runs at import."""
    found: list[tuple[list[Seen], list[Seen]]] = [([], []) for _ in mutants]
    using = users({each.path for each in mutants})
    spans = [[places.span(path) for path in using[each.path]] for each in mutants]
    for test in seen:
        if test.is_import:
            continue
        ran = test.ran()
        for mutant, (direct, near), own in zip(mutants, found, spans, strict=True):
            if ran[places.first[mutant.path] + mutant.place]:
                direct.append(test)
            elif any(1 in ran[each] for each in own):
                near.append(test)
    return found


def in_turn(mutant: Mutant, tests: Sequence[Seen], imports: Mapping[str, float]) -> list[list[str]]:
    """Tests in the order in which they are run, a few of each file first, as many as there is time for."""
    by_file: dict[str, list[Seen]] = {}
    for each in sorted(tests, key=lambda test: test.seconds):
        by_file.setdefault(each.file, []).append(each)
    chunks = []
    own = Path(mutant.path).stem
    for file, each in by_file.items():
        start, size, turn = 0, FIRST, 0
        while start < len(each):
            chunk = each[start : start + size]
            seconds = sum(test.seconds for test in chunk) + (0 if turn else imports.get(file, 0))
            # What is named after the module fails soonest.
            chunks.append((turn, own not in file, seconds, [test.name for test in chunk]))
            start, size, turn = start + size, 2 * size, turn + 1
    found = []
    left = MOST_MUTANT_S
    for _, _, seconds, names in sorted(chunks):
        if seconds <= left:
            found.append(names)
            left -= seconds
    return found


def trial(chunks: Sequence[Sequence[str]], found: Path) -> Callable[[Asked, pytest.Session], None]:
    """Run tests until one fails, and say which."""

    def ask(plugin: Asked, session: pytest.Session) -> None:
        for names in chunks:
            file = names[0].partition("::")[0]
            by_name = {item.nodeid: item for item in session.perform_collect([file])}
            if session.testsfailed or not by_name.keys() >= set(names):
                plugin.has_failed = True
                found.write_text(names[0], "utf-8")
                return
            items = [by_name[name] for name in names]
            for item, then in zip(items, [*items[1:], None], strict=True):
                found.write_text(item.nodeid, "utf-8")
                plugin.run(session, item, then)  # type: ignore[arg-type]
                if plugin.has_failed:
                    return

    return ask


def start_of(mutant: Mutant, chunks: Sequence[Sequence[str]], found: Path) -> int:
    """Begin a trial; its process."""
    path = str(ROOT / mutant.path)
    code = compile(mutant.source(ROOT), path, "exec")
    seconds = ENDLESS * MOST_MUTANT_S
    return fork(lambda: pytest_with(trial(chunks, found), {path: code}), seconds)


def outcome(mutant: Mutant, chunks: Sequence[Sequence[str]], found: Path) -> int:
    """What becomes of it: ``FAILED`` where a test fails that fails by itself as well.

    One that only fails behind others, in a process that it does not share with them else, says nothing of it.
    """
    while True:
        _, status = os.waitpid(start_of(mutant, chunks, found), 0)
        if status == 0:
            return 0
        if os.WIFSIGNALED(status) or not found.exists():
            return FAILED
        name = found.read_text("utf-8")
        if os.waitstatus_to_exitcode(status) != FAILED:
            return BROKEN
        _, alone = os.waitpid(start_of(mutant, [[name]], found), 0)
        if alone != 0:
            return FAILED
        chunks = behind(name, chunks)


def behind(name: str, chunks: Sequence[Sequence[str]]) -> list[list[str]]:
    """The tests that come after one.

    >>> behind("b", [["a", "b", "c"], ["d"]])
    [['c'], ['d']]
    """
    names = [each for chunk in chunks for each in chunk]
    done = set(names[: names.index(name) + 1])
    left = [[each for each in chunk if each not in done] for chunk in chunks]
    return [chunk for chunk in left if chunk]


def main() -> int:
    """Draw, run, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--seen", type=Path, help="keep here which tests run what, for the next time"
    )
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    for name in PRELOADED:
        importlib.import_module(name)
    assert "memplan" not in sys.modules
    began = time.monotonic()
    places = Places()
    with tempfile.TemporaryDirectory(prefix="memplan-mutants-") as name:
        folder = Path(name)
        seen = remembered(options.seen, places)
        if not seen:
            seen = look_at_all(places, folder, options.jobs)
            remember(options.seen, places, seen)
        count = sum(not each.is_import for each in seen)
        _say(
            f"{count} tests looked at in {time.monotonic() - began:.0f} s, {_cpu_s():.0f} s of CPU"
        )
        mutants = drawn(seen, places, options.mutants, options.seed)
        living = list(_tried(mutants, seen, places, folder, options.jobs))
    killed = len(mutants) - len(living)
    minutes = (time.monotonic() - began) / 60
    _say(
        f"{killed} of {len(mutants)} mutants died, in {minutes:.1f} minutes, {_cpu_s():.0f} s of CPU"
    )
    return 0 if killed >= LEAST_KILLED * len(mutants) else 1


def _tried(
    mutants: Sequence[Mutant], seen: Sequence[Seen], places: Places, folder: Path, jobs: int
) -> Iterator[Mutant]:
    """Try each; those that live."""
    imports = {each.file: each.seconds for each in seen if each.is_import}
    chunks = [
        [*in_turn(mutant, direct, imports), *in_turn(mutant, near, imports)] if not direct
        else in_turn(mutant, direct, imports)
        for mutant, (direct, near) in zip(mutants, tests_for(mutants, seen, places), strict=True)
    ]  # fmt: skip
    found = [folder / f"trial-{number}" for number in range(len(mutants))]
    starts = (
        lambda mutant=mutant, names=names, path=path: fork(
            lambda: outcome(mutant, names, path), None
        )
        for mutant, names, path in zip(mutants, chunks, found, strict=True)
    )
    for number, status in all_in_forks(starts, jobs):
        if os.waitstatus_to_exitcode(status) == FAILED:
            how = found[number].read_text("utf-8") if found[number].exists() else "imports"
            _say(f"dies  {mutants[number]}  by {how}")
        else:
            word = "LIVES" if status == 0 else "LIVES (the tool failed)"
            _say(f"{word} {sum(map(len, chunks[number]))} tests  {mutants[number]}")
            yield mutants[number]


def _cpu_s() -> float:
    used: Any = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)
    return float(used.ru_utime + used.ru_stime + own.ru_utime + own.ru_stime)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
