"""Where answers go: streams that take every character, and files that are whole or not there."""

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from memplan.errors import InputError
from memplan.text import one_line, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memplan.report.rows.written import Row

_PLAIN = {
    0x2192: "->", 0x2264: "<=", 0x2265: ">=", 0x00D7: "x", 0x2212: "-", 0x2013: "-", 0x2014: "-",
    0x2026: "...", 0x00B7: "*", 0x00B2: "^2", 0x2248: "~", 0x03A8: "Psi",
}  # fmt: skip
"""What stands for an arrow, a sign or a dash that a terminal's encoding lacks; a question mark for
every other character."""
ESCAPING = "memplan.plain"
"""Name of the error handler that writes so."""


def prepare_streams() -> None:
    """Make stdout and stderr writable whatever they are: closed, or in an encoding of the past."""
    sys.stdout = _prepared(sys.stdout)
    sys.stderr = _prepared(sys.stderr)


def _prepared(stream: TextIO | None) -> TextIO:
    if stream is None:  # as it is after `memplan >&-`
        return _nowhere()
    reconfigure: Any = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        import codecs

        codecs.register_error(ESCAPING, _plainly)
        reconfigure(errors=ESCAPING)
    return stream


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(_PLAIN.get(ord(each), "?") for each in lost), error.end


def say(text: str) -> None:
    """Write an answer that is made already."""
    sys.stdout.write(f"{text}\n")


def remark(text: str) -> None:
    """Write a line about the answer beside it, on stderr."""
    sys.stderr.write(f"memplan: {one_line(text)}\n")


answers_command = False
"""Whether a command line is being answered; else memplan is a library in somebody's process."""


def told(text: str) -> None:
    """A remark of the library's: beside a command's answer, else a warning of Python's."""
    if answers_command:
        remark(text)
        return
    import warnings

    warnings.warn(text, stacklevel=2)


def say_legend(wanted: bool, *, is_table: bool) -> None:
    """Write what every word means, where that was asked for.

    Raises ``UsageError`` where the answer is none for people.
    """
    if not wanted:
        return
    if not is_table:
        from memplan.cli.words.unused import refuse

        refuse("--legend", ["--format"])
    from memplan.report.terminal.console import TerminalConsole
    from memplan.report.terminal.legend import print_legend

    print_legend(TerminalConsole())


def say_rows(
    rows: "Sequence[Row]",
    output_format: str,
    assumptions: "Sequence[str]",
    *,
    schema_version: int,
) -> None:
    """Write rows in a format for scripts."""
    from memplan.report.rows.written import rows_csv, rows_json, rows_markdown

    if output_format == "json":
        text = rows_json(rows, schema_version=schema_version, assumptions=assumptions)
    else:
        text = rows_csv(rows) if output_format == "csv" else rows_markdown(rows)
    say(text)


def fail(message: str, *, code: int) -> int:
    """Print one line to stderr and return the exit code."""
    label = "memplan: error:"
    if _has_colour(sys.stderr):
        label = f"\x1b[1;31m{label}\x1b[0m"
    try:
        sys.stderr.write(f"{label} {shortened(one_line(message))}\n")
        sys.stderr.flush()
    except OSError:  # the exit code still says it
        abandon(sys.stderr)
    return int(code)


def _has_colour(stream: TextIO) -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


def abandon(stream: TextIO) -> None:
    """Point a stream that cannot be written at nothing, so that the flush at exit cannot fail."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # no file, as in a test
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


taken: "Callable[[Path, bytes], None] | None" = None
"""What takes files in place of a disk, where there is none that the user sees: the page in a browser."""


def write_file(path: Path, text: str, *, option: str) -> None:
    """Write text, as ``write_bytes`` does."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"), option=option)


def write_bytes(path: Path, data: bytes, *, option: str) -> None:
    """Write a file whole or not at all: beside its place first, then moved there.

    What is no regular file (``/dev/stdout``, a pipe that is read) is written as it stands.

    Raises ``InputError``, which names the option, where it cannot be written.
    """
    if taken is not None:
        taken(path, data)
        return
    try:
        mode = _mode(path)
        if mode is None or stat.S_ISREG(mode):
            _replace(path.resolve(), data, mode)
        else:
            _write_through(path, data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        msg = f"{option}: {path} cannot be written: {reason}"
        raise InputError(msg) from None


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _replace(path: Path, data: bytes, mode: int | None) -> None:
    import tempfile

    if mode is not None and not os.access(path, os.W_OK):
        raise PermissionError(None, "it may not be written: check its permissions")
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
    beside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        beside.chmod(stat.S_IMODE(mode) if mode is not None else _usual_mode())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _usual_mode() -> int:
    """The permissions of a new file; the mask can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _write_through(path: Path, data: bytes) -> None:
    """Write to a device or a pipe; one that nobody reads is refused rather than waited for."""
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
