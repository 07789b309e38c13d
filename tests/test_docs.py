"""What stands beside the code: the documentation site, its notebook, the package's own papers."""

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import memplan
from memplan.cli.commands import COMMANDS
from memplan.memory.deepspeed.options import OPTION_NAMES
from memplan.sources.stacks.presets import preset_names

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def module(name: str) -> ModuleType:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


# -- the site --------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, which may name Python objects."""


def pages(entries: list[Any]) -> list[str]:
    found = []
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += pages(value) if isinstance(value, list) else [value]
    return found


def test_every_page_is_in_the_navigation_and_there() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)
    assert site["strict"] is True
    assert sorted(pages(site["nav"])) == sorted(path.name for path in DOCS.glob("*.md"))


MOST_ENTRIES = 8


def sections(entries: list[Any]) -> list[list[Any]]:
    """The list itself, and each list in it."""
    lists = [value for entry in entries if isinstance(entry, dict) for value in entry.values()]
    return [
        entries,
        *(each for value in lists if isinstance(value, list) for each in sections(value)),
    ]


def test_no_section_of_the_navigation_is_long() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)
    titles = [next(iter(entry)) for entry in site["nav"]]
    assert titles == ["Get started", "How to", "Reference", "Why", "Contribute"]
    assert max(map(len, sections(site["nav"]))) <= MOST_ENTRIES
    assert "search" in site["plugins"]


def test_the_readme_is_short_and_leads_to_pages_that_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 170
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert len(links) > 12
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_picture_of_a_terminal_is_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    shown = module("shown")
    drawn = (DOCS / "terminal.svg").read_text(encoding="utf-8")
    assert shown.picture(shown.TERMINAL) == drawn
    assert "needs" in drawn
    assert "url(http" not in drawn


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_what_a_page_takes_from_elsewhere_is_there(page: Path) -> None:
    hooks = module("site_hooks")
    text = hooks.on_page_markdown(page.read_text(encoding="utf-8"), page=None)
    assert "{{ " not in text.replace("${{ ", "")
    assert "[[[" not in text
    assert text.startswith("# ")
    assert len(text) > 300


def test_the_accuracy_page_shows_every_record() -> None:
    page = module("accuracy_page")
    parts = {name: page.part(name) for name in page.PARTS}
    assert all(len(text) > 200 for text in parts.values())
    rows = page.published_rows()
    assert len(rows) > 250
    assert parts["published"].count("\n| ") == len(rows) + 2 * parts["published"].count("<details")
    drawn = sum(len(points) for _, points in page.point_groups())
    assert parts["predicted against measured"].count("<circle") == drawn + len(page.point_groups())
    peaks = page.peaks_now()
    assert set(page.read("accuracy_points")) == peaks.keys() - {
        "allocator's replay",
        "allocator's search",
    }
    assert parts["error by engine"].count("<ellipse") >= len(peaks) + 4


def test_what_counts_as_unseen_is_there_and_what_was_first_seen_was_written_down_then() -> None:
    page = module("accuracy_page")
    sections = page.sections()
    assert all(any(name.startswith(each) for name in sections) for each in page.UNSEEN)
    shown = page.unseen(is_whole=True) + page.seen(is_whole=True)
    # Two lines below a head, and parameter counts, are no figures of sections.
    assert shown.count("\n| ") == sum(map(len, sections.values())) + 3
    for draw in page.read("first_seen")["draws"]:
        said = " ".join((ROOT / draw["where"]).read_text(encoding="utf-8").split())
        assert draw["says"] in said
        assert {"runs", "figure", "to"} <= draw.keys()


def test_what_was_inferred_is_shown_both_ways() -> None:
    page = module("accuracy_page")
    inferred = [row for row in page.published_rows() if "inferred" in row]
    assert inferred
    for row in inferred:
        assert "as stated: " in page.published_cells(row)[-1]
        assert row["inferred"] in page.published_cells(row)[0]


def test_a_release_keeps_its_figures() -> None:
    page = module("accuracy_page")
    kept = page.read("accuracy_history")
    assert "0.1.0" in kept
    assert all(found.keys() <= page.peaks_now().keys() for found in kept.values())


def test_a_section_that_is_gone_stops_the_build() -> None:
    with pytest.raises(SystemExit, match="no section 'Nothing'"):
        module("site_hooks").on_page_markdown("{{ readme: Nothing }}")


def test_links_lead_from_the_site() -> None:
    relinked = module("site_hooks")._relinked
    assert relinked("[a](docs/commands.md) [b](configs/x.yaml) [c](#d) [e](https://f)") == (
        "[a](commands.md) [b](https://github.com/memplan/memplan/blob/main/configs/x.yaml) [c](#d) "
        "[e](https://f)"
    )


def test_every_command_has_its_page() -> None:
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"## memplan {name}\n" in text


def test_every_kernel_is_documented() -> None:
    made = module("kernels")
    text = (DOCS / "kernels.md").read_text(encoding="utf-8")
    assert made.document() in text
    for kind in (*made.CHOICES.values(), made.LossKernel):
        for value, said in made.docstrings(kind).items():
            assert len(said) > 10, value


def test_every_engine_option_is_documented() -> None:
    made = module("engine_options")
    text = (DOCS / "engine-options.md").read_text(encoding="utf-8")
    assert made.document() in text
    for title, _, kind in made.ENGINES.values():
        assert title in text
        for name, (_, meaning) in made.rows(kind).items():
            assert len(meaning) > 10, name
    for name, (_, meaning) in made.deepspeed_rows().items():
        assert len(meaning) > 10, name
    for name in OPTION_NAMES:
        assert f"`{name}`" in text
    assert "| `zero_init` | true | The model is built inside `deepspeed.zero.Init`" in text


def test_every_preset_is_documented() -> None:
    text = (DOCS / "presets.md").read_text(encoding="utf-8")
    assert module("presets").document() in text
    for name in preset_names():
        assert f"\n## {name}\n" in text


def test_every_key_of_the_stacks_is_documented() -> None:
    text = (DOCS / "stack-keys.md").read_text(encoding="utf-8")
    assert module("keys_page").document() in text


# -- jobs ------------------------------------------------------------------------------------------

JOBS = module("jobs").JOBS


def test_there_are_ten_jobs() -> None:
    assert len(JOBS) >= 10
    assert len({job.command for job in JOBS}) == len({job.page for job in JOBS}) == len(JOBS)
    assert {path.name for path in DOCS.glob("how-to-*.md")} == {job.file for job in JOBS}


def test_every_job_is_on_its_page() -> None:
    """What each answers there is run by cog, in ``make check``."""
    listed = (DOCS / "jobs.md").read_text(encoding="utf-8")
    for job in JOBS:
        assert f"({job.file}) | `{job.command}` | `{job.line}" in listed
        text = (DOCS / job.file).read_text(encoding="utf-8")
        assert text.startswith(f"# {job.question}?\n")
        assert f"```console\n$ {job.command}\n" in text
        assert f"```\n\n{job.words}\n\n* {job.more[0]}\n" in text


def test_ci_is_shown_as_it_is_copied(checkout: Path) -> None:
    copied = (checkout / "configs" / "ci" / "github-actions.yml").read_text(encoding="utf-8")
    shown = "".join(line for line in copied.splitlines(keepends=True) if not line.startswith("#"))
    assert f"```yaml\n{shown}```" in (DOCS / "how-to-stop-in-ci.md").read_text(encoding="utf-8")


# -- the notebook ----------------------------------------------------------------------------------

NOTEBOOK = DOCS / "python.ipynb"


ANSWERS = """
import memplan
shown = [Out.get(number) for number in range(1, len(In) - 1)]
assert shown[0] == 8_030_261_248
assert isinstance(shown[1], memplan.Estimate)
assert shown[2][1:] == ("backward", "optimizer_states")
assert {verdict for *_, verdict in shown[3]} >= {"fits", "OOM"}
for value in shown:
    if hasattr(value, "_repr_html_"):
        assert value._repr_html_().startswith("<pre")
assert [setup.setup.zero_stage.value for setup in plan.setups] == [3, 3, 3]
"""
"""A last cell, which looks at what those before it show."""


def test_the_notebook_runs_in_jupyter_and_answers(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import os
    import subprocess

    code = (
        "import json, sys, nbformat, nbclient\n"
        "book = nbformat.read(sys.argv[1], as_version=4)\n"
        "book.cells.append(nbformat.v4.new_code_cell(sys.argv[2]))\n"
        "nbclient.NotebookClient(book, timeout=120, kernel_name='python3').execute()\n"
        "outputs = [each for cell in book.cells for each in cell.get('outputs', ())]\n"
        "kinds = sorted({kind for each in outputs for kind in each.get('data', {})})\n"
        "print(json.dumps([kinds, ''.join(each.get('text', '') for each in outputs)]))"
    )
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(NOTEBOOK), ANSWERS],
        env=settings, cwd=tmp_path, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kinds, printed = json.loads(done.stdout)
    assert kinds == ["text/html", "text/plain"]
    assert printed.startswith("zero_stage: only deepspeed has ZeRO stages")


def test_the_notebook_is_stored_without_answers() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


# -- the package's papers --------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def test_the_licence_is_there() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


def test_the_pythons_are_named_alike() -> None:
    named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if ":: 3." in text]
    assert tuple(named) == PYTHONS
    assert PROJECT["requires-python"] == ">=3.11"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"PYTHONS ?= {' '.join(f'python{each}' for each in PYTHONS)}\n" in makefile


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == memplan.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Homepage"]


@pytest.mark.parametrize("what", ["model", "GPU", "optimizer", "engine", "measurement"])
def test_contributing_says_how_to_add(what: str) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.search(rf"^## Add an? {what}$", text, flags=re.MULTILINE)


def test_what_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:memplan|tests|docs|configs)/[\w./-]+)`", text))
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", ["bug", "measurement", "model"])
def test_an_issue_form_asks_for_the_version(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form.keys() >= {"name", "description", "body"}
    labels = [part["attributes"]["label"] for part in form["body"]]
    assert any("memplan --version --verbose" in label for label in labels)
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids)


def test_the_version_with_what_a_report_needs(run: Any) -> None:
    outcome = run("--version", "--verbose")
    assert outcome.exit_code == 0
    lines = dict(line.split(": ", 1) for line in outcome.stdout.splitlines()[1:])
    assert outcome.stdout.startswith(f"memplan {memplan.__version__}\n")
    assert lines["python"].endswith(".".join(map(str, sys.version_info[:3])))
    for text in PROJECT["dependencies"]:
        name = re.split(r"[>=<]", text)[0]
        assert any(key.replace("-", "_") == name for key in lines), name
    assert lines.keys() >= {"platform", "installed in", "config cache"}


def test_verbose_alone_is_refused(run: Any) -> None:
    outcome = run("--verbose")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "--verbose means nothing without --version" in outcome.stderr
