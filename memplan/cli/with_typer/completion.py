"""What a shell completes: installed by ``--install-completion``, and asked for at each Tab.

The shell runs ``memplan`` with ``_MEMPLAN_COMPLETE`` set; nothing else imports this.
"""

import os
from pathlib import Path

from memplan.cli.commands import COMPLETION_VARIABLE
from memplan.errors import UsageError

SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
DETECT = "this"
"""Stands for the shell that memplan was called from."""


def prepare() -> None:
    """Have Typer answer a shell's question in the form its scripts expect."""
    from typer._completion_classes import completion_init

    completion_init()


def script(shell: str) -> str:
    """What a shell has to run to complete ``memplan``. Raises ``UsageError`` for other shells."""
    from typer._completion_shared import get_completion_script

    return get_completion_script(
        prog_name="memplan", complete_var=COMPLETION_VARIABLE, shell=_known(shell)
    )


def install(shell: str) -> str:
    """Write that into the shell's start-up files, and say where. Raises ``UsageError``."""
    from typer._completion_shared import install as write_script

    name, path = write_script(
        shell=_known(shell), prog_name="memplan", complete_var=COMPLETION_VARIABLE
    )
    return f"{name} completes memplan from its next start on: written to {path}"


def _known(shell: str) -> str:
    if shell == DETECT:
        shell = _own_shell()
    if shell not in SHELLS:
        msg = f"the shell {shell!r} is not known: write one of {', '.join(SHELLS)} after the option"
        raise UsageError(msg)
    return shell


def _own_shell() -> str:
    """The shell that memplan was called from; else the one the user logs in with."""
    from typer._completion_shared import _get_shell_name

    return _get_shell_name() or Path(os.environ.get("SHELL", "")).name


def model_names(incomplete: str) -> list[str]:
    """Built-in names that begin so; paths where it is written like one."""
    if incomplete.startswith((".", "~", "/")) or incomplete.endswith((".json", ".yaml", ".yml")):
        return _paths(incomplete)
    from memplan.sources.about_models.registry import builtin_names

    begun = incomplete.lower()
    names = [name for name in builtin_names() if name.startswith(begun)]
    return names or _paths(incomplete)


def gpu_words(incomplete: str) -> list[str]:
    """Ids and short names of GPUs that begin as what stands after the last comma does."""
    from memplan.sources.cards.catalog import gpu_names

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in gpu_names() if name.startswith(last.lower())]


def _paths(incomplete: str) -> list[str]:
    """Folders and files of configs that begin so."""
    folder, slash, begun = incomplete.rpartition("/")
    start = Path(f"{folder}{slash}" or ".").expanduser()
    found = []
    try:
        for each in sorted(start.iterdir()):
            is_folder = each.is_dir()
            if each.name.startswith(begun) and (
                is_folder or each.suffix.lower() in (".json", ".yaml", ".yml")
            ):
                found.append(f"{folder}{slash}{each.name}{'/' if is_folder else ''}")
    except OSError:
        return []
    return found
