"""Wall time of an estimate, a large sweep, CSV rows and a plan, through the library on one core.

The grid: an 8B Llama on 1 to 512 GPUs x ZeRO 0-3 and FSDP with and without resharding x micro-batch
1 to 32 x 1k to 16k tokens x checkpointing none and full: 19,200 setups with 320 distinct activations
(for each precision). Exits 1 when a bar is missed. ``make bench`` runs it.
"""

import argparse
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent

AXES: Mapping[str, object] = {
    "num_gpus": [2**power for power in range(10)],
    "engine": ["deepspeed", "fsdp"],
    "zero_stage": [0, 1, 2, 3],
    "fsdp_strategy": ["full_shard", "shard_grad_op"],
    "micro_batch_size": list(range(1, 33)),
    "seq_len": [1024, 2048, 4096, 8192, 16384],
    "checkpointing": ["none", "full"],
}
NUM_SETUPS = 19_200
GPUS = ("a100-80gb",)

ESTIMATE_BAR_MS = 2.0
SWEEP_BAR_S = 15.0
PLAN_BAR_S = 2.0
CSV_BAR = 8.0
"""CSV of 1,000 rows, as a multiple of one estimate's wall time."""
MEMORY_BAR_BYTES = 8 * 2**20
"""How much more a sweep may hold after its last quarter than after its first."""

CSV_COMMAND = (
    "sweep", "llama-3.1-8b", "--gpus", "1..512", "--zero", "0-3", "--batch-size", "1-25",
    "--gpu", "h100", "--format", "csv",
)  # fmt: skip
ESTIMATE_COMMAND = ("estimate", "llama-3.1-8b", "--gpus", "8", "--zero", "2", "--gpu", "h100")


@dataclass(frozen=True)
class Figure:
    """One measurement and its bar."""

    name: str
    value: float
    bar: float
    unit: str

    @property
    def met(self) -> bool:
        return self.value <= self.bar

    def __str__(self) -> str:
        judged = "met" if self.met else "MISSED"
        return f"{self.name}: {self.value:.2f} {self.unit} (at most {self.bar:g}): {judged}"


def timed(run: Callable[[], object]) -> float:
    """How long a call takes [s]."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def estimate_ms(*, runs: int = 101) -> float:
    """The median of estimates of 80 layers, each of a length that was not seen before [ms]."""
    import memplan

    model = memplan.load_model("llama-3.1-70b")
    setups = [memplan.TrainingSetup(seq_len=1024 + number) for number in range(runs + 1)]
    memplan.estimate(model, setups.pop())
    return 1000 * statistics.median(
        timed(partial(memplan.estimate, model, each)) for each in setups
    )


def sweep_grid(*, with_time: bool = False) -> None:
    """The whole grid, each setup's step time too where it is asked for."""
    import memplan
    from memplan.estimator.time.step_time import step_time

    found = 0
    for each in memplan.sweep("llama-3.1-8b", AXES, gpus=GPUS):
        found += 1
        if with_time:
            step_time(each.estimates[0])
    if found != NUM_SETUPS:
        sys.exit(f"the grid gave {found} setups, not {NUM_SETUPS}")


def plan_70b() -> None:
    """A plan over 8 to 1024 GPUs."""
    import memplan

    base = memplan.TrainingSetup(seq_len=8192)
    counts = tuple(8 * 2**power for power in range(8))
    goal = memplan.Goal(num_gpus=counts, global_batch_size=1024, base=base)
    memplan.plan("llama-3.1-70b", goal, gpu="h100")


def memory_growth() -> int:
    """What a sweep holds more at its end than after its first quarter [bytes]."""
    import memplan

    axes = {**AXES, "num_gpus": [8], "engine": "fsdp", "micro_batch_size": list(range(1, 129))}
    results = memplan.sweep("llama-3.1-8b", axes)
    tracemalloc.start()
    held = []
    for number, _ in enumerate(results):
        if number in (639, 2559):
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return held[1] - held[0]


def command_s(arguments: tuple[str, ...], *, runs: int = 3) -> float:
    """The shortest wall time of a command [s]."""
    command = [sys.executable, "-m", "memplan", *arguments]
    return min(
        timed(lambda: subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True))
        for _ in range(runs)
    )


def measure() -> list[Figure]:
    """All figures, in order."""
    one_ms = estimate_ms()
    sweep_s = timed(sweep_grid)
    timed_s = timed(partial(sweep_grid, with_time=True))
    plan_s = timed(plan_70b)
    ratio = command_s(CSV_COMMAND) / command_s(ESTIMATE_COMMAND)
    growth = memory_growth() / 2**20
    return [
        Figure("estimate of 80 layers, warm", one_ms, ESTIMATE_BAR_MS, "ms"),
        Figure(f"sweep of {NUM_SETUPS:,} setups", sweep_s, SWEEP_BAR_S, "s"),
        Figure("the same with step times", timed_s, SWEEP_BAR_S, "s"),
        Figure("plan of 70B over 8..1024 GPUs", plan_s, PLAN_BAR_S, "s"),
        Figure("CSV of 1,000 rows, in estimates", ratio, CSV_BAR, "x"),
        Figure("growth of a sweep's memory", growth, MEMORY_BAR_BYTES / 2**20, "MiB"),
    ]


def main() -> int:
    """Measure, print and judge."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    sys.path.insert(0, str(HERE.parent))
    figures = measure()
    for figure in figures:
        print(figure)
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
