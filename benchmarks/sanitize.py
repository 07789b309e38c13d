"""The compiled core under gcc's or clang's sanitizers: no byte is touched that is not its own, nothing undefined is done.

``python benchmarks/sanitize.py`` compiles ``memplan/memory/_replay.c`` so, in a copy of what its tests need, and runs
them there. It says so and does nothing where there is no compiler with sanitizers; what it is given goes to pytest.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = Path("memplan/memory/_replay.c")
TESTS = "tests/memory/test_replay.py"
NEEDED = ("conftest.py", "tests/*.py", "tests/memory/*.py")
FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-g",
    "-O1",
    "-shared",
    "-fPIC",
)
RUNTIMES = ("libasan.so", f"libclang_rt.asan-{os.uname().machine}.so", "libclang_rt.asan.so")
"""Of gcc and of clang: what has to be there before Python's own allocations are made."""


def compiler() -> list[str]:
    """The one that Python's extensions are built with."""
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def runtime(command: list[str]) -> Path | None:
    """The sanitizers' library; None: this compiler has none, or is not there."""
    for name in RUNTIMES:
        try:
            printed = subprocess.run(
                [*command, f"-print-file-name={name}"], capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None
        if Path(printed).is_absolute():
            return Path(printed)
    return None


def copy(folder: Path) -> None:
    """The package and the tests, without what was compiled before."""
    shutil.copytree(
        ROOT / "memplan", folder / "memplan",
        ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd"),
    )  # fmt: skip
    for pattern in (*NEEDED, "pyproject.toml"):
        for source in ROOT.glob(pattern):
            copied = folder / source.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copied)


def build(command: list[str], folder: Path) -> None:
    """Compile it beside its source."""
    includes = sysconfig.get_path("include")
    module = folder / SOURCE.with_suffix(".abi3.so")
    subprocess.run(
        [*command, *FLAGS, f"-I{includes}", str(folder / SOURCE), "-o", str(module)], check=True
    )


def tested(folder: Path, library: Path, arguments: list[str]) -> int:
    """Run the tests in the copy; any finding ends the run."""
    environment = {
        **{key: value for key, value in os.environ.items() if key not in ("MEMPLAN_PURE_PYTHON", "PYTHONPATH")},
        "LD_PRELOAD": str(library),
        "PYTHONMALLOC": "malloc",
        # Of an interpreter that ends, leaks are not told from what it keeps.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }  # fmt: skip
    python = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
    ]
    used = "from memplan.memory.replaying.replay import COMPILED; assert COMPILED is not None, 'not used'"
    subprocess.run([sys.executable, "-c", used], cwd=folder, env=environment, check=True)
    return subprocess.run(
        [*python, *arguments, TESTS], cwd=folder, env=environment, check=False
    ).returncode


def main(arguments: list[str]) -> int:
    """Compile, run."""
    command = compiler()
    library = runtime(command)
    if library is None:
        sys.stdout.write(f"{command[0]} has no sanitizers here: nothing was run\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="memplan-sanitize-") as name:
        folder = Path(name)
        copy(folder)
        build(command, folder)
        return tested(folder, library, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
