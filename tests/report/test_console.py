"""Lines of text are written as rich writes them, without rich."""

import random
import subprocess
import sys

import pytest
from rich.text import Text as RichText

from memplan.report.terminal.console import TerminalConsole, Text
from memplan.report.terminal.rich_console import PrintableConsole

WORDS = ("fits", "needs", "17.9-20.6", "of", "31.7", "GiB", "·", "模型", "cafe\u0301", "a-long-name-" * 4, "─" * 30,
         "", " ", "\t", "x\x1b[2J", "\n", "batch <= 4")  # fmt: skip
STYLES = ("", "bold", "dim", "green", "bold red", "yellow", "dim cyan", "italic underline")


def drawn_at_random(source: random.Random) -> Text:
    text = Text(style=source.choice(STYLES))
    for _ in range(source.randint(0, 14)):
        word = source.choice(WORDS) + " " * source.randint(0, 2)
        text.append(word, style=source.choice(STYLES))
    if source.random() < 0.3 and text.plain:
        start = source.randrange(len(text.plain))
        text.stylize(source.choice(STYLES), start, start + source.randint(0, 20))
    return text


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"FORCE_COLOR": "1", "TERM": "xterm"},
        {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": "1"},
        {"FORCE_COLOR": "1", "TERM": "dumb"},
        {"FORCE_COLOR": "1", "TERM": "dumb", "LINES": "30"},
        {"TTY_COMPATIBLE": "1", "COLORTERM": "truecolor"},
    ],
    ids=str,
)
def test_it_writes_what_rich_writes(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("COLORTERM", "LINES", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    source = random.Random(28)
    for _ in range(300):
        text, soft_wrap = drawn_at_random(source), source.random() < 0.3
        monkeypatch.setenv("COLUMNS", str(source.choice((8, 20, 40, 80, 100))))
        TerminalConsole().print(text, soft_wrap=soft_wrap)
        ours = capsys.readouterr().out
        PrintableConsole().print(text, soft_wrap=soft_wrap)
        theirs = capsys.readouterr().out
        assert seen(ours) == seen(theirs), (text.plain, text.spans)


def seen(written: str) -> list[tuple[str, str]]:
    """Each character with what was said of it last: how runs of characters are cut up shows nowhere."""
    found, told, place = [], "", 0
    while place < len(written):
        if written.startswith("\x1b[", place):
            end = written.index("m", place)
            told = "" if written[place + 2 : end] == "0" else written[place + 2 : end]
            place = end + 1
        else:
            found.append((written[place], told if written[place] != "\n" else ""))
            place += 1
    return found


def test_an_empty_line_and_plain_strings(capsys: pytest.CaptureFixture[str]) -> None:
    console = TerminalConsole()
    console.print()
    console.print("    needs [17] of 31", markup=False, soft_wrap=True)
    assert capsys.readouterr().out == "\n    needs [17] of 31\n"


def test_what_rich_draws_is_handed_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    TerminalConsole().print(RichText("drawn", style="#123456"))
    TerminalConsole().print(Text("coloured", style="#123456"))
    assert capsys.readouterr().out == "drawn\ncoloured\n"


def test_answers_are_printed_without_rich() -> None:
    script = (
        "import sys; from memplan.cli import main; sys.argv[1:] = ['estimate', 'gpt2']; main(); "
        "print([name for name in sys.modules if name.split('.')[0] in ('rich', 'yaml', 'pydantic')], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
