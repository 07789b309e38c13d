"""memplan's own command line, called by a web page: the browser page's worker imports this module.

It is packed beside memplan's wheel (``docs/browser/build.py``) and runs in Pyodide, where there is no
terminal, no process and no network: what the command writes to its two streams is handed back, and so
are the files that it wrote.
"""

import base64
import contextlib
import io
import os
import sys
from pathlib import Path

FOLDER = Path("/home/pyodide/question")
"""Where the page's files lie, and where the command runs."""

Answer = tuple[int, str, str, dict[str, str], dict[str, str]]
"""Exit code, what went to stdout and to stderr, and the files written by their paths: text, and what is none
in base64."""


def answer(arguments: list[str], files: dict[str, str], *, columns: int, colour: bool) -> Answer:
    """Run ``memplan ARGUMENTS`` beside the page's files, in a terminal of so many columns."""
    _lay_out(files)
    _describe_terminal(columns, colour=colour)
    sys.argv = ["memplan", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        from memplan.cli.app import run
        from memplan.cli.output import terminal

        written: dict[str, bytes] = {}
        terminal.taken = lambda path, data: written.update({str(path): data})
        try:
            code = run(arguments)
        finally:
            terminal.taken = None
    return code, out.getvalue(), err.getvalue(), *_sorted(written)


def _lay_out(files: dict[str, str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.chdir(FOLDER)
    for each in FOLDER.iterdir():
        each.unlink()
    for name, text in files.items():
        Path(Path(name).name).write_text(text, encoding="utf-8")


def _describe_terminal(columns: int, *, colour: bool) -> None:
    os.environ.update(COLUMNS=str(columns), HF_HUB_OFFLINE="1")
    for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
        os.environ.pop(name, None)
    os.environ.update(
        {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
        if colour
        else {"NO_COLOR": "1", "TERM": "dumb"}
    )


def _sorted(written: dict[str, bytes]) -> tuple[dict[str, str], dict[str, str]]:
    """Files that the command made, wherever it was to put them: the page offers them for download."""
    texts, others = {}, {}
    for path, data in written.items():
        try:
            texts[path] = data.decode("utf-8")
        except UnicodeDecodeError:
            others[path] = base64.b64encode(data).decode("ascii")
    return texts, others
