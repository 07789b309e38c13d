"""What ``pip install memplan`` brings and ``import memplan`` costs: the wheel's size, and the import's time.

The wheel is built in a copy of the checkout. The import is timed against an interpreter that imports
nothing, in turn, from files that are compiled as pip compiles them. Exits 1 when a bar is missed.
``make bench`` runs it.
"""

import compileall
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAPERS = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")

MAX_WHEEL_MIB = 2.5
"""Less than a tenth of what rich, typer and huggingface_hub bring beside it."""
MAX_IMPORT_MS = 5.0
"""Of ``import memplan``, beyond the interpreter's own start."""
ROUNDS = 40


def built_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    copy = folder / "sources"
    shutil.copytree(
        ROOT / "memplan", copy / "memplan", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in PAPERS:
        shutil.copy2(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, copy]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the wheel cannot be built:\n{done.stdout}{done.stderr}")
    (wheel,) = folder.glob("memplan-*.whl")
    return wheel


def start_s(code: str, folder: Path) -> float:
    """Wall time of an interpreter that runs this [s]."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-S", "-c", code], cwd=folder, check=True)
    return time.perf_counter() - start


def import_ms(folder: Path) -> float:
    """What ``import memplan`` adds to an interpreter's start [ms]; the median over rounds."""
    rounds = [(start_s("import memplan", folder), start_s("pass", folder)) for _ in range(ROUNDS)]
    return statistics.median(ours - bare for ours, bare in rounds) * 1000


def main() -> int:
    """Measure both, and say which bars are met."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = built_wheel(folder)
        size = wheel.stat().st_size / 2**20
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "installed")
        compileall.compile_dir(folder / "installed", quiet=1)
        took = import_ms(folder / "installed")
    met = size <= MAX_WHEEL_MIB, took <= MAX_IMPORT_MS
    words = ["met" if each else "MISSED" for each in met]
    print(f"wheel: {size:.2f} MiB (at most {MAX_WHEEL_MIB}): {words[0]}")
    print(f"import memplan: {took:.1f} ms (at most {MAX_IMPORT_MS}): {words[1]}")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
