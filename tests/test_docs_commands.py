"""Every command on a page of the documentation, and in README.md: it is understood, and it runs.

What a page shows with its answer is run by cog (``make check``); the others are run here.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from memplan.cli.commands import COMMANDS
from memplan.cli.with_typer.app import load_command
from memplan.cli.words.coercion import read_plainly

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
COG = re.compile(r"<!-- \[\[\[cog(.*?)\]\]\] -->(.*?)<!-- \[\[\[end\]\]\] -->", re.DOTALL)
LINE = re.compile(
    r"^(?:    |\$ |    \$ )(memplan \w+ .*)$|^(memplan (?:estimate|plan|sweep|explain) .*)$",
    re.MULTILINE,
)
INLINE = re.compile(r"`(memplan [a-z]+ -?[^`]*)`")
ELSEWHERE = {
    "verify": "trains, with torch",
    "mine.tape.json": "a tape that the page makes with torch",
    "path/to": "stands for a file of one's own",
    "run.pickle": "a run of one's own",
    "args.json": "a file of one's own",
    "...": "stands for options of one's own",
    "MODEL": "stands for a model",
    "tcp://scheduler:8786": "a cluster of one's own",
    "pools.yaml": "a platform's own file",
    "local": "the card of a machine that has one",
}
"""What cannot be run here, by a word of it, and why."""
STARTS = ("--help", "--setup", "--params", "--checkpoint", "--operation")
"""Options that a command may begin with: what it is about."""
WRITES = ("--output", "--snapshot", "--report")


def commands(page: Path) -> list[list[str]]:
    """The arguments of each that cog does not run."""
    text = COG.sub("", page.read_text(encoding="utf-8")).replace("\\\n", " ")
    found = [match[1] or match[2] for match in LINE.finditer(text)]
    found += [match[1] for match in INLINE.finditer(text)]
    words = [shlex.split(each.partition(" # ")[0])[1:] for each in found]
    return [each for each in words if each[0] in COMMANDS and len(each) > 1]


SHOWN = sorted({(page.name, shlex.join(each)) for page in PAGES for each in commands(page)})


def is_elsewhere(command: str) -> bool:
    words = shlex.split(command)
    without_model = words[1].startswith("--") and words[1] not in STARTS
    return without_model or any(word in words or f"{word}/" in command for word in ELSEWHERE)


def test_there_are_commands_on_many_pages() -> None:
    assert len({page for page, _ in SHOWN}) > 8
    assert len(SHOWN) > 30
    assert sum(is_elsewhere(command) for _, command in SHOWN) < len(SHOWN) / 2


@pytest.mark.parametrize(("page", "command"), SHOWN, ids=lambda text: text[:60])
def test_a_command_is_understood(page: str, command: str) -> None:
    name, *words = shlex.split(command)
    if words[-1].startswith("--against") and "..." in words:
        return
    words = [word for word in words if word not in ("...", "--help")]
    built = load_command(name)
    read_plainly(built.params)
    context = built.make_context(name, list(words))
    assert context.params, page


def test_what_cog_runs_is_understood() -> None:
    for page in PAGES:
        for block in COG.finditer(page.read_text(encoding="utf-8")):
            for _, command in re.findall(r"""(["'])(memplan [a-z]+ [^{]*?)\1[,)]""", block[1]):
                name, *words = shlex.split(command)[1:]
                built = load_command(name)
                read_plainly(built.params)
                if "--help" not in words:
                    built.make_context(name, list(words))


RUN = [(page, command) for page, command in SHOWN if not is_elsewhere(command)]


@pytest.mark.long
@pytest.mark.usefixtures("no_least_capacity")
@pytest.mark.parametrize(("page", "command"), RUN, ids=lambda text: text[:60])
def test_a_command_runs(
    page: str, command: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(command)
    monkeypatch.chdir(ROOT)
    for option in WRITES:
        if option in words:
            place = words.index(option) + 1
            words[place] = str(tmp_path / words[place])
    done = run(*words)
    assert done.exit_code == 0, (page, done.stderr)
    assert done.stdout.strip() or any(option in words for option in WRITES)
