"""Wall time of ``memplan`` against a minimal Typer app in the same environment.

Both run as pip would have installed them: bytecode compiled, a console script that imports and
calls. Each round runs every command once, in turn, so that a slow moment of the machine falls on all of
them; a ratio is the median over the rounds of (this command / the app's run in the same round).
Exits 1 when a bar is missed. ``make bench`` runs it.
"""

import argparse
import compileall
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent

# What pip writes for a console script.
LAUNCHER = """\
import sys
from {module} import {function}
if __name__ == "__main__":
    sys.exit({function}())
"""

BARS = (
    # (memplan's arguments, the minimal app's arguments, the ratio allowed)
    (("estimate", "t5-3b", "--gpus", "8"), (), 1.5),
    (("--help",), ("--help",), 1.2),
)

WARM_UP_ROUNDS = 2


def install(folder: Path) -> None:
    """Copy memplan and the minimal app into a folder, compile them, and write their scripts."""
    shutil.copytree(HERE.parent / "memplan", folder / "memplan")
    shutil.copy(HERE / "minimal_app.py", folder)
    compileall.compile_dir(folder, quiet=1)
    (folder / "ours").write_text(LAUNCHER.format(module="memplan.cli", function="main"))
    (folder / "theirs").write_text(LAUNCHER.format(module="minimal_app", function="app"))


def wall_time(script: Path, arguments: tuple[str, ...]) -> float:
    """Run one script to its end [s]; fail loudly when it fails."""
    command = [sys.executable, str(script), *arguments]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    elapsed = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr.decode()}")
    return elapsed


def measure(folder: Path, *, rounds: int) -> list[list[tuple[float, float]]]:
    """Return, for each bar, the (memplan, minimal app) wall times of every round [s]."""
    pairs: list[list[tuple[float, float]]] = [[] for _ in BARS]
    for number in range(WARM_UP_ROUNDS + rounds):
        for bar, (ours, theirs, _) in enumerate(BARS):
            minimal = wall_time(folder / "theirs", theirs)
            pair = (wall_time(folder / "ours", ours), minimal)
            if number >= WARM_UP_ROUNDS:
                pairs[bar].append(pair)
    return pairs


def report(pairs: list[list[tuple[float, float]]]) -> bool:
    """Print one line per bar; return whether all were met."""
    met = True
    for (ours, theirs, allowed), times in zip(BARS, pairs, strict=True):
        ratio = statistics.median(own / minimal for own, minimal in times)
        own_ms, minimal_ms = (statistics.median(side) * 1e3 for side in zip(*times, strict=True))
        met &= ratio <= allowed
        print(
            f"memplan {' '.join(ours)}: {own_ms:.1f} ms; "
            f"{' '.join(('minimal app', *theirs))}: {minimal_ms:.1f} ms; "
            f"ratio {ratio:.2f} (at most {allowed}): {'met' if ratio <= allowed else 'MISSED'}"
        )
    return met


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="runs of each command (default 20)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        return 0 if report(measure(Path(folder), rounds=rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
