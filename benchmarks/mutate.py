"""Whether the tests would see a slip in the estimation core: small changes at random, each of which some test has to fail on.

``python benchmarks/mutate.py --seed 1`` first runs the tests of ``TESTS`` once, file by file, and notes which lines of the core
each runs and how long it takes; then it draws mutants of lines that are run at all, and for each runs the quickest
files that run its line, in a copy of the checkout, until one fails. It exits 1 where fewer than ``LEAST_KILLED`` die, and
names those that live. Nothing but the standard library and pytest is needed.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parent.parent
CORE = ("graph", "memory", "training", "compute", "estimator", "families")
"""Packages of the estimation core that are mutated."""
TESTS = (
    "tests/memory", "tests/graph", "tests/training", "tests/compute", "tests/estimator",
    "tests/formulas", "tests/families", "tests/accuracy", "tests/test_every_field.py",
    "tests/test_golden.py",
)  # fmt: skip
"""Tests that look at it: most of those of the command line and of reports would only be slower."""
LEAST_KILLED = 0.9
MOST_FILE_S = 90.0
"""Files that take longer to look at, which is twice as long as to run, are left out."""
MOST_MUTANT_S = 120.0
"""Together, of the files that are run for one mutant, where none fails."""
ENDLESS = 4
"""A mutant that takes so many times what its files take hangs, which is seen as well."""

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
RENAMED = {"max": "min", "min": "max", "any": "all", "all": "any", "reversed": "list"}


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    path: str
    line: int
    start: int
    stop: int
    """Bytes of the file that are put in the place of others."""
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {_short(self.before)}  ->  {_short(self.after)}"


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 70 else f"{words[:67]}..."


class Finder(ast.NodeVisitor):
    """Every mutant of a module. What is only said or checked is left out: annotations, decorators,
    messages of errors, what only a type checker reads."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.bytes = source.encode()
        self.found: list[Mutant] = []
        self.starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def change(self, node: ast.expr | ast.stmt, after: ast.expr | ast.stmt | str) -> None:
        """Note a mutant that has something else in a node's place."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        stop = self.starts[node.end_lineno - 1] + node.end_col_offset
        text = after if isinstance(after, str) else f"({ast.unparse(after)})"
        before = self.bytes[start:stop].decode()
        self.found.append(Mutant(self.path, node.lineno, start, stop, before, text))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """The body, without the docstring."""
        for each in (*node.args.defaults, *node.args.kw_defaults):
            if each is not None:
                self.visit(each)
        self.visit_body(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_body(node.body)

    def visit_body(self, body: Sequence[ast.stmt]) -> None:
        for each in body:
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                continue
            self.visit(each)

    def visit_Module(self, node: ast.Module) -> None:
        self.visit_body(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [each.id for each in node.targets if isinstance(each, ast.Name)]
        if "__slots__" not in names and "__all__" not in names:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """What it says is no estimate."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Nor is what a type checker is told."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words."""

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        refuses = any(isinstance(each, ast.Raise) for each in node.body)
        if not refuses:
            self.change(node.test, ast.UnaryOp(ast.Not(), node.test))
            self.visit(node.test)
        for each in (*node.body, *node.orelse):
            self.visit(each)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.change(node, ast.IfExp(node.test, node.orelse, node.body))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            operator = COMPARED[type(node.ops[0])]()
            self.change(node, ast.Compare(node.left, [operator], node.comparators))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = COMPUTED.get(type(node.op))
        if other is not None and not _joins_text(node):
            self.change(node, ast.BinOp(node.left, other(), node.right))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        other = COMPUTED.get(type(node.op))
        if other is not None:
            self.change(node, ast.unparse(ast.AugAssign(node.target, other(), node.value)))
        self.visit(node.value)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.change(node, ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.change(node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.change(node, str(not node.value))
        elif isinstance(node.value, int):
            self.change(node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in RENAMED:
            self.change(node.func, RENAMED[node.func.id])
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call for what it does is not made."""
        if isinstance(node.value, ast.Call):
            self.change(node, "pass")
        self.generic_visit(node)


def _joins_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(
        isinstance(each, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in sides
    )


def mutants_of(path: Path, root: Path) -> list[Mutant]:
    """All that can be made of one module."""
    source = path.read_text(encoding="utf-8")
    finder = Finder(path.relative_to(root).as_posix(), source)
    finder.visit(ast.parse(source))
    return finder.found


# -- which tests run which lines -----------------------------------------------------------------

PLUGIN = """
import json, os, sys, time

ROOT = os.getcwd() + os.sep
CORE = tuple(ROOT + os.path.join("memplan", each) + os.sep for each in os.environ["MUTATED"].split(","))
CALLS = 40
seen, waiting, calls_of, began = {}, {}, {}, time.perf_counter()

def lines_of(code):
    return {line for _, _, line in code.co_lines() if line}

def calls(frame, event, _):
    code = frame.f_code
    left = waiting.get(code)
    if left is None:
        own = code.co_filename.startswith(CORE)
        left = waiting[code] = lines_of(code) if own else ()
        if own:
            seen.setdefault(code.co_filename[len(ROOT):], set()).add(code.co_firstlineno)
    if not left:
        return None
    calls_of[code] = calls_of.get(code, 0) + 1
    if calls_of[code] > CALLS:
        left.clear()
        return None
    return steps

def steps(frame, event, _):
    if event == "line":
        code = frame.f_code
        waiting[code].discard(frame.f_lineno)
        seen[code.co_filename[len(ROOT):]].add(frame.f_lineno)
    return steps

sys.settrace(calls)

def pytest_sessionfinish(session, exitstatus):
    sys.settrace(None)
    found = {"seconds": time.perf_counter() - began, "status": int(exitstatus),
             "lines": {path: sorted(lines) for path, lines in seen.items()}}
    with open(os.environ["FOUND"], "w") as file:
        json.dump(found, file)
"""
"""A plugin of pytest that notes the lines of a function's first calls, then lets it run untraced."""


class Checkout:
    """A copy of what git tracks, in which files are changed and tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = time.time_ns()
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, check=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, tracked.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def write(self, name: str, text: bytes) -> None:
        """Write a file that no compiled module of an earlier one stands for."""
        path = self.folder / name
        path.write_bytes(text)
        self.clock += 2_000_000_000
        os.utime(path, ns=(self.clock, self.clock))

    def pytest(self, *arguments: str, timeout_s: float, **environment: str) -> int | None:
        """Its exit status; None where it took too long."""
        command = [
            sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=no",
            *arguments,
        ]  # fmt: skip
        try:
            return subprocess.run(
                command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                timeout=timeout_s, check=False, env={**os.environ, **environment},
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return None


@dataclass(frozen=True)
class Seen:
    """What one file of tests runs."""

    name: str
    seconds: float
    lines: dict[str, frozenset[int]]


def look(checkout: Checkout, name: str) -> Seen | None:
    """Run one file of tests under the eyes of ``PLUGIN``; None where it fails or is slow as it is."""
    found = checkout.folder / f"{name.replace('/', '.')}.json"
    status = checkout.pytest(
        "-p", "mutation_plugin", name, timeout_s=2 * MOST_FILE_S, PYTHONPATH=str(checkout.folder),
        MUTATED=",".join(CORE), FOUND=str(found),
    )  # fmt: skip
    if status != 0 or not found.exists():
        return None
    said = json.loads(found.read_text(encoding="utf-8"))
    if said["seconds"] > MOST_FILE_S:
        return None
    lines = {path: frozenset(each) for path, each in said["lines"].items()}
    return Seen(name, said["seconds"], lines)


def remembered(path: Path | None) -> list[Seen]:
    """What was seen when it was last looked at."""
    if path is None or not path.exists():
        return []
    return [
        Seen(name, seconds, {each: frozenset(lines) for each, lines in found.items()})
        for name, seconds, found in json.loads(path.read_text(encoding="utf-8"))
    ]


def remember(path: Path | None, seen: Sequence[Seen]) -> None:
    """Keep it for the next time."""
    if path is not None:
        rows = [
            (each.name, each.seconds, {name: sorted(lines) for name, lines in each.lines.items()})
            for each in seen
        ]
        path.write_text(json.dumps(rows), encoding="utf-8")


def files_of_tests() -> Iterator[str]:
    """Every file of ``TESTS``."""
    for folder in TESTS:
        path = ROOT / folder
        for each in sorted(path.rglob("test_*.py")) if path.is_dir() else (path,):
            yield each.relative_to(ROOT).as_posix()


def files_for(mutant: Mutant, seen: Sequence[Seen]) -> list[Seen]:
    """The quickest of those that run its line, as many as there is time for."""
    found: list[Seen] = []
    left = MOST_MUTANT_S
    own = Path(mutant.path).stem
    running = [each for each in seen if mutant.line in each.lines.get(mutant.path, ())]
    # What is named after the module first: it fails soonest.
    for each in sorted(running, key=lambda file: (own not in file.name, file.seconds)):
        if each.seconds <= left:
            found.append(each)
            left -= each.seconds
    return found


def outlives(mutant: Mutant, files: Sequence[Seen], checkout: Checkout) -> bool:
    """Whether all of the tests pass with it."""
    path = checkout.folder / mutant.path
    before = path.read_bytes()
    text = before[: mutant.start] + mutant.after.encode() + before[mutant.stop :]
    checkout.write(mutant.path, text)
    try:
        seconds = sum(each.seconds for each in files)
        names = [each.name for each in files]
        return checkout.pytest(*names, timeout_s=ENDLESS * seconds + 30) == 0
    finally:
        checkout.write(mutant.path, before)


def drawn(seen: Sequence[Seen], number: int, seed: int) -> list[Mutant]:
    """Mutants of lines that some test runs, each line as likely as any other."""
    run: dict[str, set[int]] = {}
    for each in seen:
        for path, lines in each.lines.items():
            run.setdefault(path, set()).update(lines)
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for package in CORE:
        for path in sorted((ROOT / "memplan" / package).rglob("*.py")):
            for mutant in mutants_of(path, ROOT):
                if mutant.line in run.get(mutant.path, ()):
                    by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    chance = random.Random(seed)
    lines = sorted(by_line)
    return [chance.choice(by_line[each]) for each in chance.sample(lines, min(number, len(lines)))]


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
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memplan-mutants-") as folder:
        checkouts: Queue[Checkout] = Queue()
        for number in range(options.jobs):
            checkout = Checkout(Path(folder) / str(number))
            (checkout.folder / "mutation_plugin.py").write_text(PLUGIN, encoding="utf-8")
            checkouts.put(checkout)

        def borrowed_look(name: str) -> Seen | None:
            checkout = checkouts.get()
            try:
                return look(checkout, name)
            finally:
                checkouts.put(checkout)

        def borrowed_trial(mutant: Mutant) -> tuple[Mutant, bool, float]:
            checkout = checkouts.get()
            start = time.monotonic()
            try:
                lived = outlives(mutant, files_for(mutant, seen), checkout)
            finally:
                checkouts.put(checkout)
            return mutant, lived, time.monotonic() - start

        with ThreadPoolExecutor(options.jobs) as pool:
            seen = remembered(options.seen)
            if not seen:
                looks = pool.map(borrowed_look, files_of_tests())
                seen = [each for each in looks if each is not None]
                remember(options.seen, seen)
            _say(f"{len(seen)} files of tests looked at in {time.monotonic() - began:.0f} s")
            mutants = drawn(seen, options.mutants, options.seed)
            living = []
            for mutant, lived, seconds in pool.map(borrowed_trial, mutants):
                if lived:
                    living.append(mutant)
                _say(f"{'LIVES' if lived else 'dies '} {seconds:5.1f} s  {mutant}")
    killed = len(mutants) - len(living)
    minutes = (time.monotonic() - began) / 60
    _say(f"{killed} of {len(mutants)} mutants died, in {minutes:.1f} minutes")
    return 0 if killed >= LEAST_KILLED * len(mutants) else 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
