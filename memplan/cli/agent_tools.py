"""Commands as tools for agents: their schemas, and how a call becomes a command line and its answer.

A tool is a command, its arguments are the command's options, and its answer is what a terminal would show, behind the command that
repeats it. Nothing here knows of a protocol.
"""

import contextlib
import io
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memplan.errors import ExitCode, UsageError, did_you_mean
from memplan.fast_dataclass import dataclass
from memplan.text import shown

TOOLS = ("estimate", "plan", "explain", "compare", "models", "gpus")
"""Commands that agents may call: none trains, waits for anybody or writes."""
WITHHELD = frozenset(
    {
        "output", "report", "snapshot", "token", "jobs", "annotate", "help", "notebook", "write_baseline",
    }
)  # fmt: skip
"""Options that write files, hold secrets or take the whole machine."""
MAX_ANSWER = 20_000
"""Characters of an answer: what a model reads at once without losing the thread."""
MAX_QUESTION = 20_000
"""Characters of a command line."""
COLUMNS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolAnswer:
    """What came of a call."""

    text: str
    is_error: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentTool:
    """One command as a tool."""

    name: str
    description: str
    schema: Mapping[str, Any]
    """JSON Schema of its arguments."""


def agent_tools() -> list[AgentTool]:
    """Every tool with its schema, made of the command's own options."""
    from memplan.cli.commands import COMMANDS

    return [
        AgentTool(name=name, description=COMMANDS[name], schema=_schema(name)) for name in TOOLS
    ]


def _schema(name: str) -> dict[str, Any]:
    params = _params(name)
    return {
        "type": "object",
        "properties": {key: _property(param) for key, param in params.items()},
        "required": [key for key, param in params.items() if param.required],
        "additionalProperties": False,
    }


def _params(name: str) -> dict[str, Any]:
    """A command's parameters by the names that a call gives them."""
    from memplan.cli.with_typer.app import load_command

    return {each.name: each for each in load_command(name).params if each.name not in WITHHELD}


def _property(param: Any) -> dict[str, Any]:
    if getattr(param, "is_flag", False):
        return {"type": "boolean", "description": param.help or ""}
    text = " ".join((getattr(param, "help", "") or "").split())
    one = {"type": ["string", "number"]}
    if param.multiple or param.nargs == -1:
        return {"anyOf": [one, {"type": "array", "items": one}], "description": text}
    return {**one, "description": text}


def call(name: str, arguments: Mapping[str, Any], root: Path) -> ToolAnswer:
    """Run a command; paths are below ``root``.

    Whatever a user would be told on standard error is the answer of a call that failed.
    """
    try:
        words = _words(name, arguments, root)
    except UsageError as error:
        return ToolAnswer(text=f"error: {error}", is_error=True)
    code, printed = _run(words, root)
    answered = code in (ExitCode.OK, ExitCode.CHECK_FAILED)
    head = f"$ memplan {shlex.join(words)}\n" if answered else ""
    return ToolAnswer(text=_cut(head + printed), is_error=not answered)


def _words(name: str, arguments: Mapping[str, Any], root: Path) -> list[str]:
    """The command line. Raises ``UsageError`` for what is no option, and for a path outside."""
    if name not in TOOLS:
        msg = f"there is no tool {shown(name)}; there are {', '.join(TOOLS)}"
        raise UsageError(msg)
    params = _params(name)
    values, flags = [], []
    for key, value in arguments.items():
        if key not in params:
            msg = f"{name} has no argument {shown(key)}.{did_you_mean(key, tuple(params))}"
            raise UsageError(msg)
        if value is None:
            continue
        texts = _texts(key, params[key], value)
        for text in texts:
            _stay_inside(key, text, root)
        if params[key].param_type_name == "argument":
            values += texts
        else:
            flags += _flags(params[key], value, texts)
    # Behind "--" nothing is an option, whatever a model is called.
    words = [name, *flags, *(["--", *values] if values else [])]
    if sum(map(len, words)) > MAX_QUESTION:
        msg = f"the arguments are longer than {MAX_QUESTION:,} characters: put them into a file below the root"
        raise UsageError(msg)
    return words


def _texts(key: str, param: Any, value: Any) -> list[str]:
    """A value as it would be typed. Raises ``UsageError`` for what is no text or number."""
    several = (
        value if isinstance(value, list) and (param.multiple or param.nargs == -1) else [value]
    )
    for each in several:
        if not isinstance(each, str | int | float):
            msg = f"{key}: give a text or a number, not {shown(each)}"
            raise UsageError(msg)
    return [str(each) for each in several]


def _flags(param: Any, value: Any, texts: list[str]) -> list[str]:
    flag = max(param.opts, key=len)
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            msg = f"{param.name}: give true or false, not {shown(value)}"
            raise UsageError(msg)
        denied = max(param.secondary_opts, key=len) if param.secondary_opts else ""
        return [flag] if value else [denied] if denied else []
    return [f"{flag}={text}" for text in texts]


def _stay_inside(key: str, text: str, root: Path) -> None:
    """Raise ``UsageError`` where some part of a value is a path that leads outside."""
    for part in text.replace("=", ",").split(","):
        if part.strip().startswith("~") or not _leads_into(root, part.strip()):
            msg = f"{key}: {shown(text)} leads outside {root}, which is all that may be read here"
            raise UsageError(msg)


def _leads_into(root: Path, part: str) -> bool:
    try:
        return (root / part).resolve().is_relative_to(root)
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # too long, a null character, a circle of links: no file
        return "/" not in part and "\\" not in part


def _run(words: list[str], root: Path) -> tuple[int, str]:
    """The exit code, and what was printed, remarks last."""
    from memplan.cli.app import run
    from memplan.sources.about_models.hub import cache_folder
    from memplan.sources.files import confined_to

    out, err = _Stream(), _Stream()
    with (
        _settings(root),
        confined_to(root, cache_folder()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = run(words)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else ExitCode.BUG
        except Exception as error:  # noqa: BLE001  # a bug in one answer must not end the server
            code = ExitCode.BUG
            err.write(f"memplan: a bug: {type(error).__name__}: {error}\n")
    return code, out.getvalue() + err.getvalue()


class _Stream(io.StringIO):
    """What a command writes to; it may ask for other error handlers, which text has no use for."""

    def reconfigure(self, **_: Any) -> None:
        """Nothing is encoded here."""


@contextlib.contextmanager
def _settings(root: Path) -> Iterator[None]:
    """Plain text of a known width, seen from the root."""
    before, folder = dict(os.environ), Path.cwd()
    os.environ.update(COLUMNS=str(COLUMNS), TERM="dumb", NO_COLOR="1")
    os.chdir(root)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


def _cut(text: str) -> str:
    if len(text) <= MAX_ANSWER:
        return text
    kept = text[:MAX_ANSWER].rpartition("\n")[0]
    return f"{kept}\n(cut here, of {len(text):,} characters: ask for less)"
