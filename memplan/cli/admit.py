"""``memplan admit``."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.cli.mcp import NETWORK, ROOT
from memplan.cli.taking import NO_VALUES, Argument, takes
from memplan.fast_dataclass import replace
from memplan.options.rows.shared import FAIL_ON, POOLS
from memplan.options.table import Option, Values

if TYPE_CHECKING:
    from memplan.hardware.pool import Pool
    from memplan.search.admission import Admission

STDIN = "-"
OFFLINE = "HF_HUB_OFFLINE"
"""The hub's own variable, which switches it off."""
MAX_REQUEST = 1 << 20
"""Characters of a request that are read."""


class AdmitFormat(StrEnum):
    """How the answer is written."""

    TABLE = "table"
    JSON = "json"


FORMAT = Option(
    flag="--format", kind=AdmitFormat, default=AdmitFormat.TABLE, metavar="FORMAT", panel="",
    help_text="table, or json for hooks.",
)  # fmt: skip
POOL = Option(
    flag="--pool", kind=str | None, metavar="NAME", panel="",
    help_text="Judge this pool alone, whatever the request says.",
)  # fmt: skip
ITS_ROOT = replace(
    ROOT, default=None, kind=str | None,
    help_text="Files that the request names are read below this folder alone. [default: the request's own]",
)  # fmt: skip


ARGUMENT = Argument(
    parameter="request",
    metavar="REQUEST.YAML",
    help_text="A job in the words of memplan.estimate, with `pool` where one is meant; - reads it from stdin.",
    completes="",
)


@takes(POOLS, POOL, FAIL_ON, FORMAT, ITS_ROOT, NETWORK, argument=ARGUMENT)
def admit(
    request: str,
    values: Values = NO_VALUES,
) -> None:
    """Say whether a job may start, and in which pool: for schedulers' hooks."""
    from memplan.errors import CheckFailedError

    fails_on_tight = _fails_on_tight(values["fail_on"])
    pools = _pools(values["pools"])
    asked = _read(request)
    if values["pool"] is not None:
        asked["pool"] = values["pool"]
    with _below(request, values):
        found = _judged(asked, pools, fails_on_tight=fails_on_tight)
    _show(found, values["format"])
    if not found.admitted:
        raise CheckFailedError(found.reason)


def _judged(
    asked: dict[str, object], pools: "Sequence[Pool]", *, fails_on_tight: bool
) -> "Admission":
    """The answer. A word that a request has wrong is an input's mistake, not the command line's: ``ConfigError``."""
    from memplan.errors import ConfigError, UsageError
    from memplan.options.admitting import admission

    try:
        return admission(asked, pools, fails_on_tight=fails_on_tight)
    except UsageError as error:
        msg = f"request: {error}"
        raise ConfigError(msg) from None


def _fails_on_tight(word: str | None) -> bool:
    from memplan.errors import UsageError

    if word not in (None, "oom", "tight"):
        msg = f"--fail-on: {word!r} is not one of oom, tight"
        raise UsageError(msg)
    return word == "tight"


def _pools(file: str | None) -> "tuple[Pool, ...]":
    """The platform's pools. What is wrong with them is the hook's mistake, not the request's: ``UsageError``."""
    from memplan.errors import InputError, UsageError
    from memplan.sources.cards.organisation import pools_file
    from memplan.sources.pools import chosen_pools, read_pools

    if file is None and pools_file(None) is None:
        msg = "--pools: name the file of what the platform has"
        raise UsageError(msg)
    try:
        return read_pools(chosen_pools(file))
    except InputError as error:
        msg = f"--pools: {error}"
        raise UsageError(msg) from None


@contextmanager
def _below(request: str, values: Values) -> Iterator[None]:
    """Inside, files are read below the root alone, and nobody is asked over a network unless that is allowed."""
    import os

    from memplan.errors import UsageError
    from memplan.sources.about_models.hub import cache_folder
    from memplan.sources.files import confined_to

    folder = values["root"]
    if folder is None:
        folder = "." if request == STDIN else Path(request).parent
    root = Path(folder).resolve()
    if not root.is_dir():
        msg = f"--root: {folder} is no folder"
        raise UsageError(msg)
    before, asks_hub = Path.cwd(), os.environ.get(OFFLINE)
    if not values["network"]:
        os.environ[OFFLINE] = "1"
    with confined_to(root, cache_folder()):
        os.chdir(root)
        try:
            yield
        finally:
            os.chdir(before)
            os.environ.pop(OFFLINE, None)
            os.environ.update({} if asks_hub is None else {OFFLINE: asks_hub})


def _read(request: str) -> dict[str, object]:
    from memplan.sources.files import mapping_in, read_mapping

    if request != STDIN:
        return read_mapping(request)
    return mapping_in(sys.stdin.read(MAX_REQUEST + 1), label="stdin", max_characters=MAX_REQUEST)


def _show(found: "Admission", output_format: AdmitFormat) -> None:
    from memplan.cli.output.terminal import say
    from memplan.report.admission import print_admission
    from memplan.report.rows.written import json_text

    if output_format is AdmitFormat.JSON:
        say(json_text(found.to_dict(), indent=2))
        return
    from memplan.report.terminal.console import TerminalConsole

    print_admission(TerminalConsole(), found)
