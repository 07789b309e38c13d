"""Flags of a command line, alone or in the shell script that runs it: what ``--emit megatron`` writes, and launchers.

Variables that the script sets are put in where they are used, ``${NAME:-default}`` and ``$((products))`` too, and lists of
words (``NAME=( ... )``) are read where they stand. Nothing is run, and branches are not chosen: of a flag that stands twice the
first counts.
"""

import re
import shlex
from collections.abc import Iterator

from memplan.errors import ConfigError

SHELL_SUFFIXES = frozenset({".sh", ".bash", ".args", ".txt"})
"""Files that are read so."""
_SET = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(?![(])(.*)$")
_DEFAULT = re.compile(r"\$\{(\w+):-([^{}]*)\}")
_NAMED = re.compile(r"\$\{(\w+)\}|\$([A-Za-z_]\w*)")
_SUM = re.compile(r"\$\(\(([\d\s*+/-]+)\)\)")
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_WHOLE = re.compile(r"[+-]?\d+")
_ENDS = frozenset({")", "fi", "else", "then", "done", "}", ";;", "&&", "|", "||", ";", "&", "\\"})
"""Words of the shell's own, which are no flag's value."""


def flags_of(text: str, *, source: str) -> dict[str, object]:
    r"""The flags with their values: True where there is none, numbers as such, several words with spaces between them.

    Raises ``ConfigError`` where quotes do not close.

    >>> flags_of("TP=2\nrun --tensor-model-parallel-size $TP --bf16 \\\n  --lr 1e-4", source="a.sh")
    {'tensor-model-parallel-size': 2, 'bf16': True, 'lr': 0.0001}
    """
    known: dict[str, str] = {}
    found: dict[str, object] = {}
    name, words = "", list[str]()
    for word in _words(text, known, source=source):
        match = _FLAG.fullmatch(word)
        if match is None:
            if name and not _ends(word) and not word.startswith("${"):
                words.append(word)
            elif _ends(word):
                _keep(found, name, words)
                name = ""
            continue
        _keep(found, name, words)
        name, words = match[1], [] if match[2] is None else [match[2]]
    _keep(found, name, words)
    return found


def _ends(word: str) -> bool:
    """Whether a word belongs to no flag: the shell's own, or the program that is run."""
    return word in _ENDS or word.endswith(".py")


def _keep(found: dict[str, object], name: str, words: list[str]) -> None:
    if name and name not in found:
        found[name] = True if not words else _value(" ".join(words))


def _words(text: str, known: dict[str, str], *, source: str) -> Iterator[str]:
    """Every word of the script, its variables put in; a quoted flag with its value is two."""
    for line in text.replace("\\\n", " ").split("\n"):
        plain = _filled(line, known)
        match = _SET.match(plain)
        try:
            words = shlex.split(plain, comments=True)
            if match is not None:
                # A flag in a value is not given here: it is where the variable is.
                known[match[1]] = " ".join(shlex.split(match[2], comments=True))
                continue
        except ValueError:
            if "--" in plain:
                msg = f"{source}: has a quote that does not close: {line.strip()[:60]}"
                raise ConfigError(msg) from None
            continue
        for word in words:
            yield from word.split() if word.startswith("--") and " " in word else _opened(word)


def _opened(word: str) -> Iterator[str]:
    """A list's first word without what opens the list, and its end by itself; a flag that is a case's label is none."""
    if word.startswith("--") and word.endswith(")"):
        return
    inner = re.sub(r"^\w+\+?=\(", "", word)
    closed = inner.endswith(")") and "(" not in inner
    yield from filter(None, (inner[:-1] if closed else inner, ")" if closed else ""))


def _filled(line: str, known: dict[str, str]) -> str:
    filled = _DEFAULT.sub(lambda match: known.get(match[1]) or match[2], line)
    filled = _NAMED.sub(lambda match: known.get(match[1] or match[2], match[0]), filled)
    return _SUM.sub(lambda match: str(_computed(match[1])), filled)


def _computed(text: str) -> str:
    """A product or a sum of whole numbers, from left to right; as it stands where it is none."""
    parts = text.replace(" ", "")
    pieces = re.findall(r"\d+|[*+/-]", parts)
    total = int(pieces[0]) if pieces and pieces[0].isdecimal() else 0
    for sign, number in zip(pieces[1::2], pieces[2::2], strict=False):
        if not number.isdecimal() or (sign == "/" and int(number) == 0):
            return text
        value = int(number)
        total = {"*": total * value, "+": total + value, "-": total - value}.get(
            sign, total // value if value else total
        )
    return str(total)


def _value(text: str) -> object:
    if _WHOLE.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text.strip("'\"")
