"""What a report of a mistake has to say of the machine: ``memplan --version --verbose``."""


def version_text(*, verbose: bool) -> str:
    """The version; ``verbose``: with Python's, the system's, the dependencies', the replay in use and the cache."""
    from memplan import __version__

    lines = [f"memplan {__version__}"]
    if verbose:
        lines += [f"{name}: {text}" for name, text in _details().items()]
    return "\n".join(lines)


def version_line() -> str:
    """``memplan 1.0, compiled, Python 3.11.7``."""
    import platform

    from memplan import __version__

    return f"memplan {__version__}, replay {_replay()}, Python {platform.python_version()}"


def _details() -> dict[str, str]:
    import platform
    import sys

    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "installed in": str(_home()),
        "replay": _replay(),
        **_dependencies(),
        "config cache": _cache(),
        "stdout": f"{sys.stdout.encoding}, {'a terminal' if sys.stdout.isatty() else 'no terminal'}",
    }


def _home() -> object:
    from pathlib import Path

    return Path(__file__).resolve().parent.parent


def _replay() -> str:
    """Whether runs are replayed by compiled code, and why not."""
    from os import environ

    from memplan.memory.replaying.replay import COMPILED, PURE_PYTHON, is_outdated

    if COMPILED is not None:
        return "compiled"
    if environ.get(PURE_PYTHON):
        return f"in Python ({PURE_PYTHON} is set)"
    if is_outdated():
        return "in Python (what was compiled is of another version: install memplan again)"
    return "in Python (nothing was compiled)"


def _dependencies() -> dict[str, str]:
    """What memplan requires, and the versions there are."""
    from importlib.metadata import PackageNotFoundError, requires, version

    try:
        names = [text.split(";")[0] for text in requires("memplan") or []]
    except PackageNotFoundError:  # run from a checkout
        names = list(REQUIRED)
    found = {}
    for text in names:
        name = text.split(">")[0].split("=")[0].strip()
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


REQUIRED = ("typer", "rich", "pyyaml", "huggingface_hub")


def _cache() -> str:
    """Where configs of the hub are kept."""
    from huggingface_hub import constants

    offline = " (HF_HUB_OFFLINE is set)" if constants.is_offline_mode() else ""
    return f"{constants.HF_HUB_CACHE}{offline}"
