"""What a command prints, for README.md and the pages that show it; cog and scripts of this folder ask.

All commands run in this process, one after another: forty interpreters would take longer to start than
most answers take to find. What is printed is what a user sees who has no terminal: plain, 100 columns.
"""

import contextlib
import gc
import io
import os
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from memplan.cli.app import run
from memplan.search.patience import PATIENCE

ROOT = Path(__file__).parent.parent
SETTINGS = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
UNSET = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")

gc.set_threshold(PATIENCE)


def answer(command: str, *, exit_code: int = 0) -> tuple[str, str]:
    """What a command line prints, and what it says beside that on standard error.

    Ends the process where it exits otherwise.
    """
    code, printed, remarks = _answered(command)
    if code != exit_code:
        msg = f"{command}: exit code {code}: {remarks}"
        raise SystemExit(msg)
    return printed, remarks


@cache
def _answered(command: str) -> tuple[int, str, str]:
    """Its exit code, and what it prints and says; pages that show the same ask once."""
    program, *arguments = shlex.split(command)
    assert program == "memplan"
    out, err = _stream(), _stream()
    with _settings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run(arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return code, _text(out), _text(err)


def printed(write: Callable[[], None]) -> str:
    """What is printed by ``write``, as a command's answer would be."""
    out = _stream()
    with _settings(), contextlib.redirect_stdout(out):
        write()
    return _text(out)


def block(command: str, *, typed: str = "", lines: str | None = None) -> str:
    """A command and what it answers, as a block of code; ``lines`` are shown in place of the answer."""
    shown = answer(command)[0].rstrip() if lines is None else lines
    return f"```console\n$ {typed or command}\n{shown}\n```"


def lines(command: str, *numbers: int, exit_code: int = 0) -> str:
    """The same with some lines of the answer, counted from 0."""
    printed = answer(command, exit_code=exit_code)[0].splitlines()
    return block(command, lines="\n".join(printed[number].rstrip() for number in numbers))


def picture(command: str) -> str:
    """The command and what it answers, drawn as a terminal of 80 columns: an SVG that needs no network.

    Colours are those that a terminal shows; the drawing is the same wherever it is made.
    """
    from rich.console import Console  # noqa: TID251
    from rich.text import Text  # noqa: TID251

    console = Console(
        file=io.StringIO(), record=True, width=80, force_terminal=True, color_system="truecolor"
    )
    with _settings(COLUMNS="80", FORCE_COLOR="1", TERM="xterm-256color", COLORTERM="truecolor"):
        os.environ.pop("NO_COLOR", None)
        out = _stream()
        with contextlib.redirect_stdout(out):
            run(shlex.split(command)[1:])
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(_text(out).rstrip()), soft_wrap=True)
    drawn = console.export_svg(title="memplan", unique_id="memplan")
    return re.sub(r"\s*@font-face {.*?}", "", drawn, flags=re.DOTALL)


TERMINAL = "memplan estimate llama-3.1-8b --gpus 8 --zero 3 --offload none --gpu h100"
"""What README.md shows a picture of, in docs/terminal.svg."""


def part(command: str, first: str, last: str) -> str:
    """The same with a part of the answer: from the line that starts with one text to that with another."""
    lines = answer(command)[0].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(first))
    stop = next(
        number for number, line in enumerate(lines) if number > start and line.startswith(last)
    )
    shown = "\n".join(line.rstrip() for line in lines[start:stop]).rstrip()
    return block(command, lines=f"...\n{shown}\n...")


def head(command: str) -> str:
    """The same with the answer's lines up to the first table, the command over several lines."""
    first, *rest = command.split(" --")
    shown, line = [], first
    for option in rest:
        if len(line) + len(option) > 92:
            shown.append(line + " \\")
            line = "     --" + option
        else:
            line += " --" + option
    typed = "\n".join([*shown, line])
    return block(command, typed=typed, lines=answer(command)[0].partition("\n\n")[0].rstrip())


@contextlib.contextmanager
def _settings(**others: str) -> Iterator[None]:
    """The checkout's root, and the variables that decide how an answer looks."""
    before = dict(os.environ)
    os.environ.update(SETTINGS | others)
    for name in set(UNSET) - others.keys():
        os.environ.pop(name, None)
    try:
        with contextlib.chdir(ROOT):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8")


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()
