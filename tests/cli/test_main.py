import importlib.util
import io
import os
import platform
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import app as app_module
from memplan.cli.commands import COMMANDS
from memplan.cli.taking import takes
from memplan.cli.with_typer.app import load_command
from memplan.errors import (
    CheckFailedError,
    ConfigError,
    HubGatedError,
    HubOfflineError,
    MemplanError,
    UsageError,
)
from memplan.options.table import Values


def install_command(monkeypatch: pytest.MonkeyPatch, body: Callable[[], Any]) -> None:
    """Add a command ``probe`` that runs ``body``."""

    def probe(values: Values) -> Any:  # noqa: ARG001
        """Run the body of a test."""
        return body()

    module = types.ModuleType("memplan.cli.probe")
    vars(module)["probe"] = takes()(probe)
    monkeypatch.setitem(sys.modules, "memplan.cli.probe", module)
    monkeypatch.setitem(COMMANDS, "probe", "Run the body of a test.")


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


def python(code: str, checkout: Path, **settings: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, text=True, check=False, timeout=60, **settings
    )


def test_version(run: Any) -> None:
    import memplan

    outcome = run("--version")
    assert outcome.exit_code == 0
    assert outcome.stdout == f"memplan {memplan.__version__}\n"


def replay_told(checkout: Path, **settings: str) -> str:
    code = "from memplan.cli import main; import sys; sys.argv[1:] = ['--version', '--verbose']; main()"
    kept = {key: value for key, value in os.environ.items() if key != "MEMPLAN_PURE_PYTHON"}
    lines = python(
        code, checkout, env={**kept, **settings}, capture_output=True
    ).stdout.splitlines()
    assert f"python: {platform.python_implementation()} {platform.python_version()}" in lines
    return next(line for line in lines if line.startswith("replay: "))


def test_the_version_says_which_replay_is_in_use(checkout: Path) -> None:
    built = importlib.util.find_spec("memplan.memory._replay") is not None
    usual = "compiled" if built else "in Python (nothing was compiled)"
    assert replay_told(checkout) == f"replay: {usual}"


def test_the_version_says_that_python_was_asked_for(checkout: Path) -> None:
    told = replay_told(checkout, MEMPLAN_PURE_PYTHON="1")
    assert told == "replay: in Python (MEMPLAN_PURE_PYTHON is set)"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []], ids=["--help", "-h", "nothing"])
def test_help_lists_every_command_in_order(run: Any, arguments: list[str]) -> None:
    outcome = run(*arguments)
    assert outcome.exit_code == 0
    listed = outcome.stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed if line[2:3].strip()] == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(run: Any, name: str) -> None:
    command = load_command(name)
    assert (command.help or "").splitlines()[0] == COMMANDS[name]
    for param in command.params:
        assert param.help, f"{param.name} has no help"
        assert getattr(param, "is_flag", False) or param.metavar, f"{param.name} has no metavar"
    outcome = run(name, "--help")
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith(f"Usage: memplan {name} [OPTIONS]")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["gpu"], "there is no command 'gpu'. Did you mean 'gpus'?", id="near command"),
        pytest.param(["zzz"], "There are: estimate, ", id="far command"),
        pytest.param(["--verson"], "--verson. Did you mean '--version'?", id="near option"),
        pytest.param(["--zzz"], "there is no option --zzz. Try 'memplan --help'.", id="far option"),
        pytest.param(["gpus", "--formt", "json"], "Did you mean '--format'?", id="in a command"),
        pytest.param(["gpus", "--format"], "Try 'memplan gpus --help'.", id="no value"),
        pytest.param(["gpus", "--format", "jsn"], "Did you mean 'json'?", id="bad choice"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(run: Any, arguments: list[str], message: str) -> None:
    outcome = run(*arguments)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("memplan: error: ")
    assert outcome.stderr.count("\n") == 1
    assert message in outcome.stderr


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        pytest.param(UsageError("a"), 2, id="usage"),
        pytest.param(ConfigError("b [red]x[/red]"), 3, id="input"),
        pytest.param(HubGatedError("c"), 4, id="hub"),
        pytest.param(HubOfflineError(32, "d"), 4, id="hub, with the number of a closed pipe"),
        pytest.param(CheckFailedError("e"), 5, id="check"),
    ],
)
def test_own_errors_are_one_line_with_their_exit_code(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: MemplanError, exit_code: int
) -> None:
    install_command(monkeypatch, raising(error))
    outcome = run("probe")
    assert (outcome.exit_code, outcome.stdout) == (exit_code, "")
    assert outcome.stderr == f"memplan: error: {error}\n"


def test_a_message_of_many_lines_becomes_one(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, raising(ConfigError("first\n  second")))
    assert run("probe").stderr == "memplan: error: first second\n"


def test_a_long_message_is_not_wrapped(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, raising(ConfigError("word " * 100 + "end")))
    assert run("probe").stderr.count("\n") == 1


def test_a_bug_keeps_its_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        run("probe")


def test_ctrl_c_is_quiet(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, raising(KeyboardInterrupt()))
    outcome = run("probe")
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (130, "", "")


def test_a_real_interrupt_ends_without_a_traceback(checkout: Path) -> None:
    code = (
        "import os, signal, sys; sys.argv[1:] = ['--version']; import memplan.cli.with_typer.app as app; "
        "app.build = lambda: os.kill(os.getpid(), signal.SIGINT); "
        "from memplan.cli import main; sys.exit(main())"
    )
    done = python(code, checkout, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_closed_stdout_is_no_bug(checkout: Path) -> None:
    code = "import sys; sys.stdout = None; from memplan.cli.app import run; sys.exit(run(['-h']))"
    done = python(code, checkout, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_may_return_its_exit_code(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, lambda: 5)
    assert run("probe").exit_code == 5


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [
        pytest.param({"NO_COLOR": "", "TERM": "xterm"}, True, id="terminal"),
        pytest.param({"NO_COLOR": "1", "TERM": "xterm"}, False, id="NO_COLOR"),
        pytest.param({"NO_COLOR": "", "TERM": "dumb"}, False, id="dumb terminal"),
    ],
)
def test_errors_are_red_on_a_terminal_that_wants_it(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], coloured: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert app_module.run(["--zzz"]) == 2
    assert ("\x1b[1;31m" in sys.stderr.getvalue()) is coloured  # type: ignore[attr-defined]


PRINT_MUCH = """
import sys, types
from memplan.cli import app, commands, taking
module = types.ModuleType("memplan.cli.probe")
def probe(values):
    "Print much."
    {body}
module.probe = taking.takes()(probe)
sys.modules["memplan.cli.probe"] = module
commands.COMMANDS["probe"] = "Print much."
sys.exit(app.run(["probe"]))
"""


PRINT_WITH_RICH = "from rich.console import Console; Console().print('x ' * 9999, highlight=False)"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("print('x' * 10**6)", id="print"),
        pytest.param("print('x')", id="found at the last flush"),
        pytest.param(PRINT_WITH_RICH, id="rich"),
    ],
)
def test_a_closed_pipe_is_quiet(checkout: Path, body: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PRINT_MUCH.format(body=body)],
        cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        process.stdout.close()  # type: ignore[union-attr]
        error = process.stderr.read()  # type: ignore[union-attr]
    assert (process.returncode, error) == (141, b"")


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        pytest.param(["--help"], ["rich", "pydantic", "memplan.cli.gpus"], id="help"),
        pytest.param(["gpus", "--help"], ["rich", "pydantic", "memplan.cli.models"], id="gpus -h"),
        pytest.param(["gpus", "h100"], ["typer", "yaml", "huggingface_hub"], id="gpus"),
        pytest.param(
            ["estimate", "t5-3b", "--gpus", "8"],
            ["typer", "yaml", "huggingface_hub", "memplan.cli.gpus"],
            id="estimate",
        ),
        pytest.param(["explain", "t5-small"], ["typer", "yaml", "huggingface_hub"], id="explain"),
    ],
)
def test_only_what_is_needed_is_imported(
    checkout: Path, arguments: list[str], absent: list[str]
) -> None:
    code = (
        f"import sys; from memplan.cli.app import run; code = run({arguments!r}); "
        f"print(*sorted(set({absent!r}) & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = python(code, checkout, capture_output=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_python_m_memplan_is_the_same_command(checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memplan", "--zzz"],
        cwd=checkout, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "memplan: error: there is no option --zzz. Try 'memplan --help'.\n"
