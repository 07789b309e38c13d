"""What the documentation site takes from elsewhere, so that nothing is written twice.

``{{ readme: In Python }}`` stands for that section of README.md, ``{{ file: CONTRIBUTING.md }}`` for a
whole file, ``{{ notebook: python.ipynb }}`` for the cells of a notebook, ``{{ accuracy: worst }}`` for a
part of the accuracy page that is made of the tests' figures. A name that is not there stops
the build. mkdocs.yml names this file as a hook.
"""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_PLACE = re.compile(r"^\{\{ (readme|file|notebook|accuracy): (.+) \}\}$", flags=re.MULTILINE)
_DRAWING = re.compile(r"<p>\{% drawing: (.+?) %\}</p>")
_ANSWER = re.compile(r"\{% answer: (.+?) %\}")
_PICTURE = re.compile(r'<p><img [^>]*src="[^"]*pictures/(\w+)\.png"[^>]*></p>')
_COG = re.compile(r"<!-- \[\[\[(cog.*?\]\]\]|end\]\]\]) -->\n?", flags=re.DOTALL)
_SOURCE = "https://github.com/memplan/memplan/blob/main/"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what a page names. Called by mkdocs."""
    text = _COG.sub("", markdown)
    return _PLACE.sub(lambda found: _PARTS[found[1]](found[2].strip()), text)


def on_page_content(html: str, **_: Any) -> str:
    """Put drawings where they belong: Markdown would take them apart. Called by mkdocs."""
    html = _ANSWER.sub(lambda found: answer(found[1].strip()), html)
    html = _PICTURE.sub(lambda found: picture(found[1].strip()), html)
    return _DRAWING.sub(lambda found: accuracy(found[1].strip()), html)


def answer(words: str) -> str:
    """What a command prints, as text in a page."""
    done = subprocess.run(
        [sys.executable, "-m", "memplan", *words.split()],
        cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    return escape(done.stdout.rstrip("\n"))


PICTURES = {
    "components": lambda: _memplan().estimate("llama-3.1-8b", gpus=8, zero=3, gpu="h100").plot(),
    "step": lambda: _memplan().estimate("llama-3.1-8b", gpus=8, zero=3, gpu="h100").plot("step"),
    "ranks": lambda: (
        _memplan()
        .estimate(
            "llama-3.2-1b", gpus=4, engine="megatron", pipeline_parallel=4, gradient_accumulation=8
        )
        .plot("ranks")
    ),
    "heat": lambda: (
        _memplan().sweep("llama-3.2-1b", batch_size="1..32", seq_len="1k..8k", gpu="a100").plot()
    ),
    "front": lambda: _memplan().plan("llama-3.1-8b", gpus=[8, 16], gpu="h100").plot(),
}
"""A picture of each kind, by its file in docs/pictures: the site has the drawing in that one's place."""


def picture(name: str) -> str:
    """One of ``PICTURES`` with the table behind it."""
    if name not in PICTURES:
        msg = f"there is no picture {name!r}; there are {', '.join(PICTURES)}"
        raise SystemExit(msg)
    html: str = PICTURES[name]()._repr_html_()
    return html


def _memplan() -> Any:
    return importlib.import_module("memplan")


def readme_section(title: str) -> str:
    """A section of README.md with those below it, without its heading."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL
    )
    if found is None:
        msg = f"README.md has no section {title!r}"
        raise SystemExit(msg)
    return _relinked(_COG.sub("", found[1]).strip("\n"))


def whole_file(name: str) -> str:
    """A file of the checkout."""
    return _relinked((ROOT / name).read_text(encoding="utf-8").strip())


def notebook(name: str) -> str:
    """The cells of a notebook, code as code."""
    cells = json.loads((ROOT / "docs" / name).read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    return "\n\n".join(parts)


def accuracy(name: str) -> str:
    """A part of the accuracy page."""
    place = importlib.util.spec_from_file_location(
        "accuracy_page", ROOT / "docs" / "accuracy_page.py"
    )
    assert place is not None
    assert place.loader is not None
    page = importlib.util.module_from_spec(place)
    place.loader.exec_module(page)
    text: str = page.part(name)
    return text


def _relinked(text: str) -> str:
    """Links as they are from docs/: its own pages beside each other, other files at their source."""

    def link(match: "re.Match[str]") -> str:
        target = match[1]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        if target.startswith("docs/") and not target.endswith(".ipynb"):
            return f"]({target.removeprefix('docs/')})"
        return f"]({_SOURCE}{target})"

    return re.sub(r"\]\(([^)]+)\)", link, text)


_PARTS = {"readme": readme_section, "file": whole_file, "notebook": notebook, "accuracy": accuracy}
