"""Whether the tests would see a slip in the estimation core: small changes at random, each of which some test has to fail on.

``python benchmarks/mutate.py --seed 1`` first runs the tests of the core once, file by file, and notes which of its places
each of them runs and how long it takes (kept in ``.mutants``, and used again while core and file are the same); then it draws
mutants of places that are run at all, and for each runs the quickest tests that run its place until one fails. It exits 1 where
fewer than ``LEAST_KILLED`` die, and names those that live. No file is changed. Tests are collected once; a mutant within a
function is tried in a fork of that process, in which the function's code is another. One of what a module does as it is imported
is tried in a process that is forked before memplan is, and finds the changed module in place of the one on disk. Nothing but the
standard library and pytest is needed.

What is drawn: a line of the core that some test runs, each as likely as any other, and one of its changes
(``benchmarks/mutants.py``). What is not: changes after which every answer is the same by the kind of place they are in. These
are words (messages, notes, docstrings, names of rows), what only a type checker reads, how much a cache keeps, defaults that
nothing reads, and checks that only refuse. A change that turns out to be equivalent by what the code around it does counts as living all the same.
"""

import argparse
import ast
import base64
import builtins
import functools
import gc
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
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import pytest
from mutants import RAN, Mutant, marked, mutants_of, names_read

if TYPE_CHECKING:
    from _pytest.reports import TestReport

ROOT = Path(__file__).parent.parent
PURE = "The estimation core is pure"
"""How the contract of ``pyproject.toml`` begins that names the core's rooms."""
SAYING = ("memplan.errors", "memplan.text")
"""Of these, what holds nothing but words."""
UNASKED = (
    *(f"tests/{each}" for each in ("browser", "cli", "fuzz", "live", "plugin", "published", "report", "sources", "tracing", "verify")),
    "tests/families/test_mutated_configs.py",
)  # fmt: skip
"""Tests that begin processes, read words or files, need other packages, or are content with what does not break: they would
only be slower."""
ASKED = (
    "tests/sources/test_registry.py",
    "tests/sources/test_requests.py",
    "tests/test_one_answer.py",
)
"""Of these, and of tests of no room, what looks at the core."""
PRELOADED = ("rich.console", "rich.table", "typer.main", "yaml")
"""What every process would import anew otherwise."""
SEEN = "keep in this folder which tests run what, for the next time"
LEAST_KILLED = 0.9
MOST_FILE_S = 40.0
"""Of a file of tests, what it runs in more CPU time than that is not looked at."""
MOST_MUTANT_S = 45.0
"""CPU time, together, of the tests that are run for one mutant where none fails."""
ENDLESS = 3
"""A mutant that takes so many times what its tests take hangs, which is seen as well."""
MOST_BYTES = 6 << 30
"""So is one that asks for more memory than that."""
FIRST = 6
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


def all_in_forks(
    starts: Iterable[Callable[[], int]], jobs: int
) -> Iterator[tuple[int, int, float]]:
    """Start each, ``jobs`` at a time; the number, the wait status and the CPU time of each as it ends."""
    running: dict[int, int] = {}
    waiting = enumerate(starts)
    while True:
        for number, start in waiting:
            running[start()] = number
            if len(running) >= jobs:
                break
        if not running:
            return
        process, status, used = os.wait3(0)
        if process in running:
            yield running.pop(process), status, used.ru_utime + used.ru_stime


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

    def key(self, name: str) -> str:
        """What stands for a file of tests and the core, as they are."""
        path = ROOT / name
        text = path.read_bytes() if path.is_file() else b""
        return hashlib.sha256(f"{self.digest} {name}\n".encode() + text).hexdigest()

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


def core() -> list[Path]:
    """Its packages and modules: those that the layers call pure, so that a new room is one of them at once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (pure,) = (each for each in contracts if each["name"].startswith(PURE))
    names = [each.replace(".", "/") for each in pure["source_modules"] if each not in SAYING]
    return [ROOT / each if (ROOT / each).is_dir() else ROOT / f"{each}.py" for each in names]


def modules() -> list[Path]:
    """The core's."""
    return [path for each in core() for path in (sorted(each.rglob("*.py")) or [each])]


def files_of_tests() -> list[str]:
    """Every file of tests but those of ``UNASKED``; each of the core's own packages with its examples as one."""
    examples = [each.relative_to(ROOT).as_posix() for each in core()]
    files = sorted((ROOT / "tests").glob("*/**/test_*.py"))
    names = [each.relative_to(ROOT).as_posix() for each in files]
    return [*examples, *(each for each in names if not each.startswith(UNASKED)), *ASKED]


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


def import_all(places: Places) -> None:
    """Import the whole core."""
    for name in places.first:
        importlib.import_module(
            name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        )


def look_at(names: Mapping[str, Path], places: Places, jobs: int) -> None:
    """Write down what every test of these files runs; one that was stopped in the middle has what it ran until then."""

    def ask(plugin: Asked, session: pytest.Session) -> None:
        import_all(places)
        starts = (
            lambda name=name, path=path: fork(
                lambda: look(plugin, session, name, ran, path), MOST_FILE_S
            )
            for name, path in names.items()
        )
        for number, *_ in all_in_forks(starts, jobs):
            part = list(names.values())[number]
            part.touch()  # one that ended before it began has run nothing
            part.rename(part.with_suffix(".jsonl"))

    ran = bytearray(places.count)
    setattr(builtins, RAN, ran)
    codes = places.codes()
    os.waitpid(fork(lambda: pytest_with(ask, codes), None), 0)


def look_at_all(places: Places, folder: Path, jobs: int) -> list[Seen]:
    """What every test runs: of files that were looked at when core and file said the same, as it was noted then."""
    folder.mkdir(parents=True, exist_ok=True)
    noted = {name: folder / f"{places.key(name)}.jsonl" for name in files_of_tests()}
    for path in set(folder.iterdir()) - set(noted.values()):
        path.unlink()
    unseen = {name: path.with_suffix(".part") for name, path in noted.items() if not path.exists()}
    if unseen:
        look_at(unseen, places, jobs)
    lines = [line for path in noted.values() for line in path.read_text("utf-8").splitlines()]
    # The last line of what was stopped may be half a line.
    return [Seen(*json.loads(line)) for line in lines if line.endswith("]")]


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


def readers(names: Iterable[str], places: Places) -> dict[str, set[int]]:
    """The places at which each of these names is read, as a variable or of anything that has it."""
    found: dict[str, set[int]] = {name: set() for name in names}
    for path in modules():
        first = places.first[path.relative_to(ROOT).as_posix()]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.stmt):
                for name in names_read(node) & found.keys():
                    found[name].add(first + node.lineno)
    return found


def tests_for(
    mutants: Sequence[Mutant], seen: Sequence[Seen], places: Places
) -> list[list[list[Seen]]]:
    """For each, the tests that run its place; those of what runs at import, which no test runs, are the ones that run its module
    or a user of it, first those that run a place there where its name is read."""
    found: list[list[list[Seen]]] = [[[], [], []] for _ in mutants]
    using = users({each.path for each in mutants})
    spans = [[places.span(path) for path in using[each.path]] for each in mutants]
    all_readers = readers({each.name for each in mutants}, places)
    reading = [
        [
            place
            for place in all_readers[each.name]
            if any(own.start <= place < own.stop for own in span)
        ]
        for each, span in zip(mutants, spans, strict=True)
    ]
    for test in seen:
        if test.is_import:
            continue
        ran = test.ran()
        for mutant, groups, read, own in zip(mutants, found, reading, spans, strict=True):
            direct, likely, near = groups
            if ran[places.first[mutant.path] + mutant.place]:
                direct.append(test)
            elif any(ran[each] for each in read):
                likely.append(test)
            elif any(1 in ran[each] for each in own):
                near.append(test)
    return [[direct] if direct else [likely, near] for direct, likely, near in found]


def in_turn(
    mutant: Mutant, groups: Iterable[Sequence[Seen]], imports: Mapping[str, float]
) -> list[list[str]]:
    """Tests in the order in which they are run, as many as there is time for."""
    found = []
    left = MOST_MUTANT_S
    for tests in groups:
        for seconds, names in _chunks(mutant, tests, imports):
            if seconds <= left:
                found.append(names)
                left -= seconds
    return found


def _chunks(
    mutant: Mutant, tests: Sequence[Seen], imports: Mapping[str, float]
) -> list[tuple[float, list[str]]]:
    """A few of each file first, and what is named after the module, which fails soonest."""
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
            chunks.append((turn, own not in file, seconds, [test.name for test in chunk]))
            start, size, turn = start + size, 2 * size, turn + 1
    return [(seconds, names) for _, _, seconds, names in sorted(chunks)]


@dataclass(eq=False)
class Collected:
    """Tests of a session, by their ids."""

    plugin: Asked
    session: pytest.Session
    items: dict[str, pytest.Item]

    @classmethod
    def of(cls, plugin: Asked, session: pytest.Session, names: Iterable[str]) -> "Collected":
        """Everything in these files."""
        files = dict.fromkeys(name.partition("::")[0] for name in names)
        items = session.perform_collect(list(files))
        return cls(plugin, session, {item.nodeid: item for item in items})

    def run(self, names: Iterable[str], found: Path) -> None:
        """Run tests until one fails, and say which."""
        items = [self.items[name] for name in names if name in self.items]
        for item, then in zip(items, [*items[1:], None], strict=True):
            found.write_text(item.nodeid, "utf-8")
            self.plugin.run(self.session, item, then)  # type: ignore[arg-type]
            if self.plugin.has_failed:
                return


def in_order(chunks: Sequence[Sequence[str]]) -> list[str]:
    """All tests, those of a file together where one chunk follows another of it."""
    return [name for chunk in chunks for name in chunk]


def trial(names: Sequence[str], found: Path) -> Callable[[Asked, pytest.Session], None]:
    """Collect tests under a mutant, and run them until one fails."""

    def ask(plugin: Asked, session: pytest.Session) -> None:
        found.write_text(names[0], "utf-8")
        tests = Collected.of(plugin, session, names)
        if session.testsfailed or not tests.items.keys() >= set(names):
            plugin.has_failed = True
            return
        tests.run(names, found)

    return ask


# -- a function's code in the place of another ---------------------------------------------------


def changed_functions(before: CodeType, after: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """Functions of a module that differ, outermost ones; None where what runs at import does.

    >>> before = compile("def f():\\n    return 1\\ndef g():\\n    return 2", "example", "exec")
    >>> after = compile("def f():\\n    return 1\\ndef g():\\n    return 3", "example", "exec")
    >>> [(old.co_name, new.co_consts[1]) for old, new in changed_functions(before, after) or ()]
    [('g', 3)]
    """
    if _bare(before) != _bare(after):
        return None
    found: list[tuple[CodeType, CodeType]] = []
    for old, new in zip(_inner(before), _inner(after), strict=True):
        if old == new:
            continue
        if old.co_flags & OPTIMIZED and old.co_name not in MADE_AT_ONCE:
            found.append((old, new))
            continue
        inner = changed_functions(old, new)
        if inner is None or old.co_flags & OPTIMIZED:
            return None
        found += inner
    return found


OPTIMIZED = 1
"""Of ``co_flags``: a function's, and no class's."""
MADE_AT_ONCE = ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>")
"""Code that is a function's, and is run where it stands."""


def _inner(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _bare(code: CodeType) -> tuple[object, ...]:
    """What it does itself."""
    consts = tuple("code" if isinstance(each, CodeType) else repr(each) for each in code.co_consts)
    return code.co_code, code.co_names, consts


def swapped(pairs: Sequence[tuple[CodeType, CodeType]]) -> bool:
    """Give every function of these the other code, and forget what was computed with the old one; whether there were all."""
    wanted = {_place(old): new for old, new in pairs}
    seen = set()
    gc.unfreeze()  # What was set aside is listed nowhere.
    for each in gc.get_objects():
        kind = type(each)
        if kind is FunctionType and _place(each.__code__) in wanted:
            seen.add(_place(each.__code__))
            each.__code__ = wanted[_place(each.__code__)]
        elif kind is functools._lru_cache_wrapper:
            each.cache_clear()
    return seen == wanted.keys()


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


@dataclass(eq=False)
class Trial:
    """A mutant, its tests in order, and where it is said which of them is run."""

    mutant: Mutant
    names: list[str]
    found: Path

    def pairs(self) -> list[tuple[CodeType, CodeType]] | None:
        """The functions it changes; None where it has to be there as its module is imported."""
        path = ROOT / self.mutant.path
        before = compile(path.read_bytes(), str(path), "exec")
        return changed_functions(before, self.code())

    def code(self) -> CodeType:
        """Its module."""
        path = ROOT / self.mutant.path
        return compile(self.mutant.source(ROOT), str(path), "exec")

    def start(self, names: Sequence[str], tests: "Collected | None") -> int:
        """Begin; the process."""
        seconds = ENDLESS * MOST_MUTANT_S
        if tests is None:
            replaced = {str(ROOT / self.mutant.path): self.code()}
            return fork(lambda: pytest_with(trial(names, self.found), replaced), seconds)
        return fork(lambda: self._here(names, tests), seconds)

    def _here(self, names: Sequence[str], tests: Collected) -> int:
        pairs = self.pairs()
        if not pairs or not swapped(pairs):
            return BROKEN
        tests.run(names, self.found)
        return FAILED if tests.plugin.has_failed else 0

    def outcome(self, tests: Collected | None) -> int:
        """What becomes of it: ``FAILED`` where a test fails that fails by itself as well.

        One that only fails behind others, in a process that it does not share with them else, says nothing of it.
        """
        names = self.names
        while names:
            _, status = os.waitpid(self.start(names, tests), 0)
            if status == 0:
                return 0
            if os.WIFSIGNALED(status):
                return FAILED
            if os.WEXITSTATUS(status) != FAILED:
                return BROKEN
            name = self.found.read_text("utf-8")
            if name == names[0]:  # nothing ran before it
                return FAILED
            _, alone = os.waitpid(self.start([name], tests), 0)
            if alone != 0:
                return FAILED
            names = names[names.index(name) + 1 :]
        return 0


def main() -> int:
    """Draw, run, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seen", type=Path, default=ROOT / ".mutants", help=SEEN)
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
        seen = look_at_all(places, options.seen, options.jobs)
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
    within: list[Trial] = []
    at_import: list[Trial] = []
    for number, (mutant, groups) in enumerate(
        zip(mutants, tests_for(mutants, seen, places), strict=True)
    ):
        chunks = in_turn(mutant, groups, imports)
        each = Trial(mutant, in_order(chunks), folder / f"trial-{number}")
        (at_import if each.pairs() is None or len(groups) > 1 else within).append(each)
    results = folder / "results"
    lines = os.open(results, os.O_RDWR | os.O_CREAT)
    out = os.dup(1)

    def try_all(trials: Sequence[Trial], tests: Collected | None) -> None:
        starts = (lambda each=each: fork(lambda: each.outcome(tests), None) for each in trials)
        for number, status, seconds in all_in_forks(starts, jobs):
            each = trials[number]
            says, lives = _said(each, status, seconds)
            os.write(out, f"{says}\n".encode())
            os.write(lines, f"{int(lives)} {mutants.index(each.mutant)}\n".encode())

    def ask(plugin: Asked, session: pytest.Session) -> None:
        import_all(places)
        tests = Collected.of(plugin, session, [name for each in within for name in each.names])
        try_all(within, tests)

    os.waitpid(fork(lambda: pytest_with(ask, {}), None), 0)
    try_all(at_import, None)
    rows = [line.split() for line in results.read_text("utf-8").splitlines()]
    done = {int(number): lives == "1" for lives, number in rows}
    yield from (each for number, each in enumerate(mutants) if done.get(number, True))


def _said(each: Trial, status: int, seconds: float) -> tuple[str, bool]:
    """What became of a mutant, and whether it lives."""
    if os.waitstatus_to_exitcode(status) == FAILED:
        how = each.found.read_text("utf-8") if each.found.exists() else "its import"
        return f"dies  in {seconds:.1f} s  {each.mutant}  by {how}", False
    word = "LIVES" if status == 0 else "LIVES (the tool failed)"
    return f"{word} {len(each.names)} tests in {seconds:.1f} s  {each.mutant}", True


def _cpu_s() -> float:
    used: Any = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)
    return float(used.ru_utime + used.ru_stime + own.ru_utime + own.ru_stime)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
