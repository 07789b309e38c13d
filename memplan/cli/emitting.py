"""``--emit``: the chosen setup, written for the framework that runs it."""

from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.terminal import remark, say, write_file
from memplan.errors import UsageError
from memplan.training.coercion import coerce_enum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.estimator import Estimate
    from memplan.model.spec import ModelSpec
    from memplan.sources.emitters import Emitted, Framework
    from memplan.training.setup import TrainingSetup


def emit_setup(
    setup: "TrainingSetup", model: "ModelSpec", framework: str, output: str | None
) -> None:
    """Write a setup to a file or to stdout, and on stderr what the file cannot hold.

    A file that stands beside it is written beside it, or to stdout after it.
    """
    from memplan.sources.emitters import Framework, emit

    kind = coerce_enum("--emit", framework, Framework)
    made = emit(setup, kind, model)
    text = _text(made, kind, Path(output or "").suffix.lower())
    beside = made.beside
    if output is None:
        say(text)
        if beside is not None:
            say(f"\n# {beside.name}\n{beside.text}")
    else:
        write_file(Path(output), f"{text}\n", option="--output")
        if beside is not None:
            write_file(Path(output).parent / beside.name, f"{beside.text}\n", option="--output")
    for note in _remarks(made, kind.value):
        remark(note)


def _text(made: "Emitted", kind: "Framework", suffix: str) -> str:
    """What is written, as a file of that ending has it."""
    from memplan.sources.emitters import Framework

    if kind is Framework.TORCHTITAN and suffix == ".toml":
        return made.toml
    if kind.takes_flags:
        return made.flags
    is_yaml = kind is Framework.ACCELERATE or suffix in (".yaml", ".yml")
    return made.yaml if is_yaml else made.json


def emit_only(answers: "Sequence[Estimate]", framework: str, output: str | None) -> None:
    """Write the one setup that was estimated.

    Raises ``UsageError`` where there are several.
    """
    if len(answers) > 1:
        msg = "--emit: writes one setup, and several were estimated: name --engine and --zero"
        raise UsageError(msg)
    emit_setup(answers[0].setup, answers[0].model, framework, output)


def _remarks(made: "Emitted", framework: str) -> list[str]:
    return [f"not in what is written for {framework}: {note}" for note in made.notes]
