"""The data card: every file of ``memplan/data``, where its facts come from, and under which licence."""

import json
import re
from pathlib import Path

DATA = Path(__file__).parent.parent / "memplan" / "data"

HOLDS = {
    "config_defaults.json": "what each of transformers' and diffusers' configuration classes fills in, by its key",
    "gpus.json": "cards: memory as torch and the driver report it, rates, links; each entry names its sources, and what nobody read again",
    "models.json": "built-in models: hub id, class, and the sizes that differ from the class's defaults; no weights, no text",
    "outcomes.json": "how real runs ended, by kind of job and by what memplan had said of them: counts alone",
    "training_arguments.json": "names of training arguments, of TRL's configs that have them, and of optimizers",
    "presets": "what a training stack does where its file says nothing: one line for each default, with the file it was read in",
    "stacks": "keys of training stacks' files, and which setting each is",
}  # fmt: skip
"""File or folder -> what it holds."""

SAID_HERE = {
    "gpus.json": "vendors' data sheets and logs, as the file's `sources` name them one by one; torchtitan, torchao, composer, lightning and torch for rates",
    "outcomes.json": "the runs of the [accuracy page](accuracy.md): measured for memplan, sent, or published by those whom it names",
    "models.json": "`config.json` of the checkpoint that each entry names on the Hugging Face hub, or what its `source` names; transformers 5.23.0 for what is left out",
    "deepspeed_files.yaml": "axolotl 0.19.0, deepspeed_configs; llamafactory 0.9.5, examples/deepspeed",
    "plain.yaml": "none: settings in memplan's own words",
}  # fmt: skip
"""Sources of files that have no one line of their own for it."""

LICENCES = {
    "Apache-2.0": {
        "alignment-handbook": "LICENSE", "axolotl": "LICENSE", "composer": "LICENSE", "diffusers": "LICENSE",
        "lightning": "LICENSE of pytorch-lightning", "litgpt": "LICENSE.md", "llamafactory": "LICENSE",
        "nanotron": "LICENSE, which adds MIT and BSD-3-Clause for files of others",
        "nemo-automodel": "LICENSE", "open-r1": "LICENSE", "prime-rl": "LICENSE",
        "transformers": "METADATA of 5.23.0", "trl": "LICENSE",
        "unsloth": "LICENSE, which leaves studio and the command line out", "verl": "LICENSE",
    },
    "AGPL-3.0-only": {"unsloth_cli": "first line of unsloth_cli/config.py"},
    "BSD-3-Clause": {
        "megatron-lm": "LICENSE, which adds Apache-2.0 and MIT for files of others",
        "torch": "LICENSE of 2.13.0", "torchao": "LICENSE", "torchtitan": "LICENSE", "torchtune": "LICENSE",
    },
    "MIT": {"nanogpt": "LICENSE"},
    "CC-BY-SA-4.0": {"ml-engineering": "LICENSE-CC-BY-SA"},
}  # fmt: skip
"""Licence -> projects whose published facts (names of keys, defaults, sizes, rates) are used, and the file of each
that says so, read in November 2026."""

_ALIASES = {"llama-factory": "llamafactory"}
_PARTS = {"unsloth_cli": "unsloth"}
"""Parts of a project that are under another licence than it."""


def data_files() -> list[Path]:
    """Every data file of the package."""
    return sorted(path for path in DATA.rglob("*") if path.is_file())


def source_of(path: Path) -> str:
    """What the file says of its source, or what is said for it here."""
    if path.name in SAID_HERE and path.parent.name != "presets":
        return SAID_HERE[path.name]
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return str(json.loads(text)["source"])
    found = re.search(r'^source: "?(.+?)"?$', text, flags=re.MULTILINE)
    if found is None:
        msg = f"{path}: says no source: add one, or a line to docs/data_card.py"
        raise SystemExit(msg)
    return found[1]


def projects_in(source: str) -> set[str]:
    """Projects of ``LICENCES`` that a source names.

    >>> projects_in("trl 1.16.0, trainer/*_config.py")
    {'trl'}
    >>> projects_in("unsloth 2026.10.9, unsloth_cli/config.py")
    {'unsloth_cli'}
    """
    words = {word.lower() for word in re.findall(r"[A-Za-z][\w-]*", source)}
    known = {name for names in LICENCES.values() for name in names}
    found = {_ALIASES.get(word, word) for word in words} & known
    return found - {whole for part, whole in _PARTS.items() if part in found}


def licences_of(path: Path) -> str:
    """Licences of what the file's facts were read in."""
    projects = projects_in(source_of(path))
    found = [name for name, names in LICENCES.items() if projects & set(names)]
    return ", ".join(found) or "facts of no one project"


def card() -> str:
    """The tables of the page."""
    lines = ["| file | holds | read in | its licence |", "| --- | --- | --- | --- |"]
    for path in data_files():
        name = path.relative_to(DATA).as_posix()
        holds = HOLDS.get(name) or HOLDS[name.partition("/")[0]]
        lines.append(f"| `{name}` | {holds} | {source_of(path)} | {licences_of(path)} |")
    lines += ["", "| project | licence | as it says in |", "| --- | --- | --- |"]
    lines += [
        f"| {project} | {name} | {where} |"
        for name, projects in LICENCES.items()
        for project, where in projects.items()
    ]
    return "\n".join(lines)
