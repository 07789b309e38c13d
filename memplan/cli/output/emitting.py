"""``--emit``: the chosen setup, written for the framework that runs it."""

from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.output.terminal import remark, say, write_file
from memplan.errors import SetupError, UsageError, did_you_mean
from memplan.fast_dataclass import replace
from memplan.text import MAX_SHOWN, one_line, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memplan.estimator import Estimate
    from memplan.estimator.time.run_cost import TimeQuestion
    from memplan.model.spec import ModelSpec
    from memplan.sources.emitters import Emitted, Framework
    from memplan.sources.requests import Scheduler
    from memplan.training.setup import TrainingSetup


def emit_answer(
    answer: "Estimate",
    kind: str,
    output: str | None,
    question: "TimeQuestion | None",
    *,
    queue: str = "",
) -> None:
    """Write an answer's setup for a framework, or its job for a scheduler, in this queue of its."""
    from memplan.sources.emitters import Framework
    from memplan.sources.requests import Scheduler

    frameworks = {each.value: each for each in Framework}
    schedulers = {each.value: each for each in Scheduler}
    if kind in frameworks:
        _emit_setup(answer.setup, answer.model, frameworks[kind], output)
    elif kind in schedulers:
        _emit_request(answer, schedulers[kind], output, question, queue)
    elif (text := _plugged_text(answer, kind)) is not None:
        if output is None:
            say(text)
        else:
            write_file(Path(output), f"{text}\n", option="--output")
    else:
        from memplan.sources.plugins import plugged_names

        known = (*frameworks, *schedulers, *plugged_names("writers"))
        msg = f"--emit: {shortened(one_line(kind), MAX_SHOWN)!r} is not one of {', '.join(known)}.{did_you_mean(kind, known)}"
        raise SetupError(msg)


def _plugged_text(answer: "Estimate", kind: str) -> str | None:
    """What a plug-in of this name writes; None where there is none."""
    from memplan.sources.plugins import asked_safely, plugged

    write = plugged("writers", kind)
    if write is None:
        return None
    return str(asked_safely(f"--emit {kind}", write, answer.setup, answer.model)).rstrip()


def _emit_setup(
    setup: "TrainingSetup", model: "ModelSpec", kind: "Framework", output: str | None
) -> None:
    """Write a setup to a file or to stdout, and on stderr what the file cannot hold.

    A file that stands beside it is written beside it, or to stdout after it.
    """
    from memplan.sources.emitters import emit

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
    is_json = kind in (Framework.DEEPSPEED, Framework.TRAINING_ARGS)
    is_yaml = not is_json or suffix in (".yaml", ".yml")
    return made.yaml if is_yaml else made.json


def _emit_request(
    answer: "Estimate",
    scheduler: "Scheduler",
    output: str | None,
    question: "TimeQuestion | None",
    queue: str,
) -> None:
    from memplan.estimator.job_request import job_request
    from memplan.sources.requests import request_text

    request = replace(job_request(answer, question), queue=queue)
    text = request_text(request, scheduler)
    if output is None:
        say(text)
    else:
        write_file(Path(output), f"{text}\n", option="--output")
    if request.time_s is None and scheduler.takes_time:
        remark("no time limit is written: --tokens or --examples says how long the run is")


def emit_only(
    rows: "Sequence[Sequence[Estimate]]",
    kind: str,
    output: str | None,
    question: "TimeQuestion | None",
) -> None:
    """Write the one setup that was estimated.

    Raises ``UsageError`` where there are several.
    """
    from memplan.sources.requests import Scheduler

    if len(rows) > 1:
        msg = "--emit: writes one setup, and several were estimated: name --engine, --zero, --offload and --offload-param"
        raise UsageError(msg)
    if len(rows[0]) > 1 and kind in {each.value for each in Scheduler}:
        msg = f"--emit {kind}: asks for one kind of GPU: name it with --gpu"
        raise UsageError(msg)
    emit_answer(rows[0][0], kind, output, question)


def _remarks(made: "Emitted", framework: str) -> list[str]:
    found = [f"not in what is written for {framework}: {note}" for note in made.notes]
    if made.by_hand:
        words = " ".join(by_hand_words(made.by_hand))
        found.append(f"not in what is written for {framework}, set by hand: {words}")
    return found


def by_hand_words(fields: "Mapping[str, object]") -> list[str]:
    """Fields as options that say the same, where there are any, else as a setup file has them.

    >>> by_hand_words({"seq_len": 2048, "engine_options": {"wrapping": "layers"}})
    ['--seq-len 2048', '--engine-option wrapping=layers']
    """
    from memplan.options.asked import OPTION_OF_FIELD

    found = []
    for name, value in fields.items():
        if name == "adapter":
            continue  # a note says it whole
        if name == "engine_options":
            options = dict(value)  # type: ignore[call-overload]
            found += [f"--engine-option {key}={_word(each)}" for key, each in options.items()]
        else:
            option = OPTION_OF_FIELD.get(name)
            flag = f"{name}:" if option is None else f"--{option.replace('_', '-')}"
            found.append(_flagged(flag, value))
    return found


def _flagged(flag: str, value: object) -> str:
    if isinstance(value, bool) and flag.startswith("--"):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {_word(value)}"


def _word(value: object) -> str:
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, tuple | list):
        return ",".join(map(_word, value))
    return str(getattr(value, "value", value))
