"""Flags of a command line, alone or in the shell script that runs it: what ``--emit megatron`` writes, and launchers.

Variables that the script sets are put in where they are used, ``${NAME:-default}`` and ``$((products))`` too, and lists of
words (``NAME=( ... )``) are read where they stand. Nothing is run, and branches are not chosen: of a flag that stands twice the
first counts. Hydra's words, ``trainer.nnodes=2``, are sections as its files have them; of those the last counts, as Hydra has it, of the
first run alone.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping

from memplan.errors import ConfigError

SHELL_SUFFIXES = frozenset({".sh", ".bash", ".args", ".txt"})
"""Files that are read so."""
_SET = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(?![(])(.*)$")
_DEFAULT = re.compile(r"\$\{(\w+):?[-=]((?:[^{}]|\$\{\w+\})*)\}")
_NAMED = re.compile(r"\$\{(\w+)\}|\$([A-Za-z_]\w*)")
_SUM = re.compile(r"\$\(\((.+?)\)\)(?!\))")
_UNKNOWN = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_PROGRAM = re.compile(r"(?:.*/)?(pretrain_\w+)[.]py")
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:[.@/]\w+)*)=(.*)", re.DOTALL)
_OPENS = re.compile(r"\s*(?:export\s+)?[A-Za-z_]\w*=\"")
_CONFIGURATION = frozenset({"config-name", "config-path"})
_MACHINES = re.compile(r".*[$](?:[({]\w+[)}]|\w+)")
_FILE = re.compile(r"\s*cat\b.*<<-?\s*['\"]?([A-Za-z_]\w*)")
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_SHORT = re.compile(r"-[A-Za-z]\w*")
_WHOLE = re.compile(r"[+-]?\d+")
_ENDS = frozenset(
    {"$@", "$*", ")", "fi", "else", "then", "done", "}", ";;", "&&", "|", "||", ";", "&", "\\"}
)
"""Words of the shell's own, which are no flag's value, and what a script was called with."""


def flags_of(text: str, *, source: str) -> dict[str, object]:
    r"""The flags with their values: True where there is none, numbers as such, several words with spaces between them.

    ``program`` is the first of Megatron-LM's programs that the script runs. Raises ``ConfigError`` where quotes do not close.

    >>> flags_of("TP=2\nrun --tensor-model-parallel-size $TP --bf16 \\\n  --lr 1e-4", source="a.sh")
    {'tensor-model-parallel-size': 2, 'bf16': True, 'lr': 0.0001}
    """
    found: dict[str, object] = {}
    name, words = "", list[str]()
    for word in _words(text, {}, source=source):
        match = _FLAG.fullmatch(word)
        program = _PROGRAM.fullmatch(word)
        if program is not None:
            found.setdefault("program", program[1])
        if match is None:
            if name and not _ends(word) and not word.startswith("${"):
                words.append(word)
            elif _ends(word):
                _keep(found, name, words)
                name = ""
            continue
        _keep(found, name, words)
        name, words = match[1], []
        if match[2] is not None:
            _keep(found, name, [match[2]])
            name = ""
    _keep(found, name, words)
    return found


def overrides_of(
    text: str, *, source: str, parse: Callable[[str], object]
) -> tuple[dict[str, object], str | None]:
    """What Hydra's words lay over a configuration, and where that is; nothing where no two such words are there.

    ``program`` is the file that is run, where it is one and no installed module; one named behind its words is cleaned up.
    ``parse`` reads a value. What a path begins with, where only the machine knows it, is left out of it.

    >>> overrides_of("python -m main a.b=2 +a.c=$HOME/x --config-path $HERE/b --config-name=own", source="a.sh", parse=str)
    ({'a': {'b': '2', 'c': 'HOME/x'}}, 'b/own')
    """
    found: dict[str, object] = {}
    where: dict[str, str] = {}
    count, awaited, is_run, is_module = 0, "", False, False
    for word in _words(text, {}, source=source):
        if word == "-m":
            if is_module and count:
                break  # another run, as of a branch that is not chosen
            is_module = is_run = True
            found.pop("program", None)
        elif word.endswith(".py") and "=" not in word and not count:
            is_run, found["program"] = True, word
        flag = _FLAG.fullmatch(word)
        if awaited or (flag is not None and flag[1] in _CONFIGURATION):
            asked, value = (awaited, word) if flag is None else (flag[1], flag[2])
            awaited = asked if value is None else ""
            where |= {} if value is None else {asked: value.strip("'\"")}
            continue
        match = _OVERRIDE.fullmatch(word)
        if match is not None and (is_run or "." in match[1]):
            count += "." in match[1]
            _lay(found, match[1].split("."), parse(_known_part(match[2])))
    return (found, _place(where)) if count > 1 else ({}, None)


def _place(where: Mapping[str, str]) -> str | None:
    """A configuration's path without what only the machine knows of it.

    >>> _place({"config-path": "$(pwd)/a/config", "config-name": "own.yaml"}), _place({"config-name": "own"})
    ('a/config/own', 'own')
    """
    if "config-name" not in where:
        return None
    folder = _MACHINES.sub("", where.get("config-path", ""))
    return f"{folder}/{where['config-name']}".lstrip("/").removesuffix(".yaml")


def _known_part(value: str) -> str:
    """A path without the sign of what only the machine knows.

    >>> _known_part("${HOME}/models/a"), _known_part("$NODES")
    ('HOME/models/a', '${NODES}')
    """
    return _UNKNOWN.sub(r"\1" if "/" in value else r"${\1}", value)


def _lay(found: dict[str, object], parts: list[str], value: object) -> None:
    for part in parts[:-1]:
        inner = found.get(part)
        if not isinstance(inner, dict):
            inner = found[part] = {}
        found = inner
    found[parts[-1]] = value


_LAUNCHERS = frozenset({
    "master_addr", "master_port", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone",
    "max_restarts", "monitor_interval", "start_method", "role", "log_dir", "redirects", "tee", "local_addr",
    "local_ranks_filter",
})  # fmt: skip
"""Flags of torchrun's own (``torch/distributed/run.py``) that say nothing of how many processes there are."""


def sections_of(flags: Mapping[str, object], parse: Callable[[str], object]) -> dict[str, object]:
    """Flags as sections of a configuration, by the dots in their names.

    >>> sections_of({"a.b": "[1]", "c": 2}, lambda text: [1])
    {'a': {'b': [1]}, 'c': 2}
    """
    found: dict[str, object] = {}
    for name, value in flags.items():
        key = name if "." in name else name.replace("-", "_")
        if key in _LAUNCHERS:
            continue
        _lay(found, key.split("."), parse(_known_part(value)) if isinstance(value, str) else value)
    return found


def laid_over(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """A configuration's sections with those of another over them.

    >>> laid_over({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    found = dict(base)
    for name, value in over.items():
        below = found.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        found[name] = laid_over(below, value) if both else value  # type: ignore[arg-type]
    return found


def _ends(word: str) -> bool:
    """Whether a word belongs to no flag: the shell's own, or the program that is run."""
    return word in _ENDS or word.endswith(".py") or _SHORT.fullmatch(word) is not None


def _keep(found: dict[str, object], name: str, words: list[str]) -> None:
    if name and name not in found:
        found[name] = True if not words else _value(" ".join(words))


def _words(text: str, known: dict[str, str], *, source: str) -> Iterator[str]:
    """Every word of the script, its variables put in; a quoted flag with its value is two."""
    for line in _whole_lines(text):
        plain = _filled(line, known)
        try:
            words = _without_variables(plain, known)
        except ValueError:
            if "--" in plain:
                msg = f"{source}: has a quote that does not close: {line.strip()[:60]}"
                raise ConfigError(msg) from None
            continue
        for word in words:
            yield from word.split() if word.startswith("--") and " " in word else _opened(word)


def _without_variables(line: str, known: dict[str, str]) -> list[str]:
    """The words of a line but the variables that it sets, for itself alone or for what follows.

    A flag in a value is not given here: it is where the variable is.

    >>> _without_variables("export A='--b 2'", {}), _without_variables("A=1 B=2 run --c", {})
    ([], ['run', '--c'])
    """
    match = _SET.match(line)
    if match is None:
        return shlex.split(line, comments=True)
    words = shlex.split(match[2], comments=True)
    if len(words) < 2 or any(mark in match[2] for mark in ("$(", "`")) or match[2][:1].isspace():
        known[match[1]] = " ".join(words)
        return []
    known[match[1]] = words[0]
    return _without_variables(" ".join(map(shlex.quote, words[1:])), known)


MAX_LINES = 200
"""Lines that one quoted text goes over."""


def _whole_lines(text: str) -> Iterator[str]:
    """Lines of a script; a value in quotes that goes over several of them is one."""
    kept = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#"))
    lines = kept.replace("\\\n", " ").split("\n")
    at = 0
    while at < len(lines):
        line, stop = lines[at], at + 1
        if _OPENS.match(line) and line.count('"') == 1:
            ends = (n for n in range(stop, min(stop + MAX_LINES, len(lines))) if '"' in lines[n])
            stop = next(ends, at) + 1
            line = " ".join(lines[at:stop])
        yield line
        at = _behind_file(lines, line, stop)


def _behind_file(lines: list[str], line: str, at: int) -> int:
    """Where a script goes on behind the text of a file that it writes with ``cat``.

    >>> _behind_file(["cat <<EOF > a", "b=c", "EOF", "run"], "cat <<EOF > a", 1)
    3
    """
    match = _FILE.match(line)
    if match is None:
        return at
    ends = (number for number in range(at, len(lines)) if lines[number].strip() == match[1])
    return next(ends, at - 1) + 1


def _opened(word: str) -> Iterator[str]:
    """A list's first word without what opens the list, and its end by itself; a flag that is a case's label is none."""
    if word.startswith("--") and word.endswith(")"):
        return
    inner = re.sub(r"^\w+\+?=\(", "", word)
    closed = inner.endswith(")") and "(" not in inner
    yield from filter(None, (inner[:-1] if closed else inner, ")" if closed else ""))


def _filled(line: str, known: dict[str, str]) -> str:
    """With variables, defaults (which may stand in one another) and sums put in."""
    filled = _NAMED.sub(lambda match: known.get(match[1] or match[2], match[0]), line)
    for _ in range(MAX_NESTED):
        before = filled
        filled = _DEFAULT.sub(lambda match: known.get(match[1]) or match[2], before)
        if filled == before:
            break
    return _SUM.sub(lambda match: _computed(match[1], known) or match[0], filled)


MAX_NESTED = 10
"""Defaults in defaults that are put in."""
_SIGNS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def _computed(text: str, known: Mapping[str, str]) -> str | None:
    """What the shell makes of whole numbers, variables and brackets; None where it is something else.

    >>> _computed("(a + 2) * 3", {"a": "1"}), _computed("a / 0", {"a": "1"})
    ('9', None)
    """
    if len(text) > MAX_SUM:
        return None
    try:
        return str(_value_of(ast.parse(text.strip(), mode="eval").body, known))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


MAX_SUM = 200
"""Characters of a sum that is worked out."""


def _value_of(node: ast.expr, known: Mapping[str, str]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return int(known[node.id]) if node.id in known else _not_a_sum()
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value_of(node.left, known), _value_of(node.right, known))
    return _not_a_sum()


def _not_a_sum() -> int:
    msg = "is no sum"
    raise ValueError(msg)


def _value(text: str) -> object:
    if _WHOLE.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text.strip("'\"")
