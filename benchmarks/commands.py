"""CPU time of whole commands, children counted, as a ratio to a minimal Typer program with a Rich table.

Either is run in turn on the same machine, so that what else it does falls out. Exits 1 when a bar is
missed. ``make bench`` runs it; ``MEMPLAN_PURE_PYTHON=1`` measures without the compiled replay, where
each bar is four times as high.
"""

import os
import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROUNDS = 5
PURE_FACTOR = 4
"""How much more a command may take where replays are made in Python."""

MINIMAL = """
import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer()


@app.command()
def main(rows: int = 10) -> None:
    table = Table("number", "square", "word")
    for number in range(rows):
        table.add_row(str(number), str(number * number), "word")
    Console().print(table)


app()
"""

WITH_BYTECODE = {key: each for key, each in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
"""The environment, in which both programs are compiled once, as an installation is."""


@dataclass(frozen=True)
class Measured:
    """A command and its bar, in minimal programs."""

    command: str
    bar: float
    rounds: int = ROUNDS


COMMANDS = (
    Measured("--help", 0.3),
    Measured("estimate t5-3b --gpus 8", 2.0),
    Measured("estimate llama-3.1-8b", 2.0),
    Measured("estimate llama-3.1-8b --gpus 8", 4.0),
    Measured("estimate llama-3.1-8b --gpus 8 --gpu h100 --engine fsdp", 1.2),
    Measured("estimate llama-3.1-8b --gpus 16384 --zero 2 --per-rank", 6.0, rounds=2),
    Measured("plan llama-3.1-70b --gpus 8..1024 --gpu h100", 10.0, rounds=1),
)


def cpu_s(arguments: list[str]) -> float:
    """CPU time of a process and its children, user and system [s]."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE.parent,
        check=True,
        stdout=subprocess.DEVNULL,
        env=WITH_BYTECODE,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ratio_of(measured: Measured) -> float:
    """The median over rounds in which both are run, one after the other."""
    found = []
    for _ in range(measured.rounds):
        minimal = cpu_s(["-c", MINIMAL])
        found.append(cpu_s(["-m", "memplan", *measured.command.split()]) / minimal)
    return statistics.median(found)


def main() -> None:
    """Print every ratio; exit 1 where one is beyond its bar."""
    cpu_s(["-m", "memplan", "estimate", "gpt2"])  # compiles what is imported
    missed = False
    factor = PURE_FACTOR if os.environ.get("MEMPLAN_PURE_PYTHON") else 1
    for each in COMMANDS:
        ratio, bar = ratio_of(each), each.bar * factor
        missed |= ratio > bar
        judged = "met" if ratio <= bar else "MISSED"
        print(f"memplan {each.command}: {ratio:.2f} (at most {bar:g}): {judged}", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
