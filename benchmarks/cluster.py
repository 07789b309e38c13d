"""One Dask worker against several on this machine: the same grid, in turn, so that what else runs here hits both.

``python benchmarks/cluster.py --workers 2 --rounds 3`` prints each run's wall time and the ratio of the medians. It needs
``memplan[dask]``. The scheduler and the sweep itself run on the same cores, which a real cluster does not ask of its workers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
GRID = (
    "llama-3.1-8b", "--gpus", "8,16,32", "--engine", "deepspeed", "--zero", "0-3", "--batch-size", "1-20",
    "--seq-len", "1024,2048,4096,8192", "--checkpointing", "none,full", "--gpu", "h100",
)  # fmt: skip


@contextmanager
def cluster(num_workers: int, folder: Path) -> Iterator[str]:
    """A scheduler's address."""
    place = folder / f"{num_workers}-{time.monotonic_ns()}.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def started(module: str, *words: str) -> "subprocess.Popen[bytes]":
        command = [
            sys.executable,
            "-m",
            f"distributed.cli.{module}",
            "--scheduler-file",
            str(place),
        ]
        return subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--no-dashboard", *words],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    running = [started("dask_scheduler", "--port", "0")]
    while not place.exists():
        time.sleep(0.05)
    running += [started("dask_worker", "--nthreads", "1", "--no-nanny") for _ in range(num_workers)]
    try:
        yield json.loads(place.read_text())["address"]
    finally:
        for each in reversed(running):
            each.kill()
            each.wait()


def timed(num_workers: int, folder: Path) -> tuple[float, int]:
    """How long a sweep takes [s], and its rows."""
    output = folder / f"rows-{time.monotonic_ns()}.jsonl"
    with cluster(num_workers, folder) as address:
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "memplan", "sweep", *GRID, "--output", str(output), "--dask", address],
            cwd=ROOT, check=True, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        taken = time.perf_counter() - begun
    with output.open() as file:
        return taken, sum(1 for _ in file)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    found: dict[int, list[float]] = {1: [], options.workers: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for workers, times in found.items():
                taken, rows = timed(workers, Path(folder))
                times.append(taken)
                print(
                    f"round {number + 1}: {workers} workers, {rows:,} rows: {taken:.1f} s",
                    flush=True,
                )
    one, several = (statistics.median(times) for times in found.values())
    print(f"{options.workers} workers are {one / several:.2f} times as fast as one")


if __name__ == "__main__":
    main()
