"""``--emit``: the chosen setup, written for the framework that runs it."""

from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.terminal import remark, say, write_file
from memplan.errors import UsageError
from memplan.training.setup import coerce_enum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.estimator import Estimate
    from memplan.sources.emitters import Emitted
    from memplan.training.setup import TrainingSetup


def emit_setup(setup: "TrainingSetup", framework: str, output: str | None) -> None:
    """Write a setup to a file or to stdout, and on stderr what the file cannot hold."""
    from memplan.sources.emitters import Framework, emit

    kind = coerce_enum("--emit", framework, Framework)
    made = emit(setup, kind)
    is_yaml = kind is Framework.ACCELERATE or (output or "").lower().endswith((".yaml", ".yml"))
    text = made.yaml if is_yaml else made.json
    if kind is Framework.TORCHTITAN:
        text = made.flags
    if output is None:
        say(text)
    else:
        write_file(Path(output), f"{text}\n", option="--output")
    for note in _remarks(made, kind.value):
        remark(note)


def emit_only(answers: "Sequence[Estimate]", framework: str, output: str | None) -> None:
    """Write the one setup that was estimated.

    Raises ``UsageError`` where there are several.
    """
    if len(answers) > 1:
        msg = "--emit: writes one setup, and several were estimated: name --engine and --zero"
        raise UsageError(msg)
    emit_setup(answers[0].setup, framework, output)


def _remarks(made: "Emitted", framework: str) -> list[str]:
    return [f"not in what is written for {framework}: {note}" for note in made.notes]
