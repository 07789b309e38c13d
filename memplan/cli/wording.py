"""The library's errors, in the command line's words.

The library speaks of fields and arguments: at the head of a message (``seq_len: must be ...``), and
between backticks where it says what to give (```family='llama'```). Whoever typed options reads of
options. Imported when there is something to report.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from memplan.options.asked import OPTION_OF_FIELD
from memplan.options.rows.shared import FILES, LAUNCH_FILES

PARAMETERS = OPTION_OF_FIELD | {
    "zero_stage": "zero", "offload_optimizer": "offload", "num_jobs": "jobs",
}  # fmt: skip
"""Fields that a command's parameter has another name for."""
_ADVICE = re.compile(r"`(\w+)(?:=([^`]*))?`")
_FILE_OPTIONS = frozenset(option.flag for option in (*FILES, *LAUNCH_FILES))
_HEAD = re.compile(r"(\w+)(?=: )")


def option_names(command: Any) -> dict[str, str]:
    """The options of a command: parameter, or field that it sets -> as it is typed."""
    found = {
        param.name: param.opts[0]
        for param in command.params
        if param.param_type_name == "option" and param.opts
    }
    fields = {field: found[name] for field, name in PARAMETERS.items() if name in found}
    return {**found, **fields}


def in_options(message: str, options: Mapping[str, str], arguments: Sequence[str]) -> str:
    """The message with options for fields: those it advises, and the one at its head.

    A field that a file may have named keeps the name that it has there, unless its option was typed.

    >>> known = {"family": "--family", "seq_len": "--seq-len"}
    >>> in_options("read it with `family='llama'`", known, [])
    'read it with --family llama'
    >>> in_options("seq_len: must be from 1", known, ["--seq-len", "0"])
    '--seq-len: must be from 1'
    >>> in_options("seq_len: must be from 1", known, ["--setup", "run.yaml"])
    'seq_len: must be from 1'
    """

    def advised(match: "re.Match[str]") -> str:
        option = options.get(match[1])
        if option is None and match[2]:
            option = f"--{match[1].replace('_', '-')}"  # of the commands that have it
        if option is None:
            return match[0]
        value = (match[2] or "").strip("'\"")
        return option if value in ("", "True") else f"{option} {value}"

    text = _ADVICE.sub(advised, message)
    head = _HEAD.match(text)
    option = options.get(head[1]) if head else None
    typed = {word.partition("=")[0] for word in arguments}
    if head and option and (option in typed or _FILE_OPTIONS.isdisjoint(typed)):
        return f"{option}{text[head.end() :]}"
    return text
