"""Pictures: one drawing, the table behind it, and every way to show both."""

import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import memplan
from memplan.memory.account import ComponentKind
from memplan.report.pages.palette import colour_of
from memplan.report.pictures.bars import CHART_FILLS
from memplan.report.pictures.canvas import Area, Words
from memplan.report.pictures.picture import Picture, page
from memplan.report.timeline import step_moments

PIPELINE: dict[str, Any] = {
    "gpus": 4, "engine": "megatron", "pipeline_parallel": 4, "gradient_accumulation": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def pictures() -> dict[str, Any]:
    """One of each kind."""
    run = memplan.estimate("llama-3.2-1b", seq_len=512, gpu="4090")
    sweep = memplan.sweep("gpt2", batch_size=[1, 64], seq_len=[256, 1024], gpu=["t4", "h100"])
    plan = memplan.plan("gpt2-xl", gpus=[4, 8], gpu="a100", seq_len=512, tokens="1B", price=2)
    return {
        "components": run.plot(),
        "step": run.plot("step"),
        "ranks": memplan.estimate("llama-3.2-1b", **PIPELINE).plot("ranks"),
        "heat": sweep.plot(),
        "front": plan.plot(),
    }


KINDS = ("components", "step", "ranks", "heat", "front")


@pytest.mark.parametrize("kind", KINDS)
def test_a_drawing_is_a_file_of_its_own(pictures: dict[str, Picture], kind: str) -> None:
    picture = pictures[kind]
    root = ElementTree.fromstring(picture.svg)
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text == f"{picture.title}. {picture.words}"
    assert "prefers-color-scheme:dark" in picture.svg
    assert not re.search(r"url\(|href=|<script|@import", picture.svg)
    for style in re.findall(r"<style>(.*?)</style>", picture.svg):
        drawn = set(re.findall(r'class="mp-([\w-]+)', picture.svg)) - {"none", "words"}
        assert all(f".mp-{name}{{" in style for name in drawn)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_drawn_outside_and_no_words_lie_on_words(
    pictures: dict[str, Picture], kind: str
) -> None:
    canvas = pictures[kind].canvas
    for each in canvas.shapes:
        if isinstance(each, Area):
            assert all(-1 <= x <= canvas.width + 1 for x, _ in each.points)
            assert all(-1 <= y <= canvas.height + 1 for _, y in each.points)
    words = [each for each in canvas.shapes if isinstance(each, Words)]
    spans = [(*_span(each), each.y, each.text) for each in words]
    for place, (left, right, y, text) in enumerate(spans):
        assert left >= -1, text
        assert right <= canvas.width + 1, text
        for other_left, other_right, other_y, other in spans[place + 1 :]:
            if abs(y - other_y) < 11:
                assert right <= other_left or other_right <= left, (text, other)


def _span(words: Words) -> tuple[float, float]:
    """Where the words begin and end, a character being 6.1 wide on average."""
    width = 6.1 * len(words.text)
    start = {"start": 0.0, "middle": width / 2, "end": width}[words.anchor]
    return words.x - start, words.x - start + width


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_behind_it_has_the_figures(pictures: dict[str, Picture], kind: str) -> None:
    picture = pictures[kind]
    assert picture.rows
    assert all(len(row) == len(picture.head) for row in picture.rows)
    html = picture._repr_html_()
    assert html.count("<tr") == 1 + len(picture.rows)
    assert "<table><caption>" in html
    assert 'tabindex="0" role="region"' in html
    assert picture.svg in html


@pytest.mark.parametrize("kind", KINDS)
def test_the_chart_fits_a_terminal(pictures: dict[str, Picture], kind: str) -> None:
    lines = str(pictures[kind]).splitlines()
    assert lines[0] == pictures[kind].title
    assert len(lines) > 4
    if kind != "front":  # which names setups in full
        assert max(map(len, lines)) <= 80


def test_components_and_phases_are_the_estimates() -> None:
    found = memplan.estimate("gpt2", gpu="t4")
    picture: Any = found.plot()
    rows = {row[0]: row for row in picture.rows}
    assert rows.keys() == found.phases.keys()
    for name, phase in found.phases.items():
        assert rows[name][-1] == f"{phase.peak_bytes / 2**30:,.2f}"
        for component, size in phase.components.items():
            cell = rows[name][picture.head.index(component.replace("_", " "))]
            assert cell == f"{size / 2**30:,.2f}"
    boxes = [each for each in picture.canvas.shapes if isinstance(each, Area) and each.words]
    assert len(boxes) == sum(
        size > 0 for phase in found.phases.values() for size in phase.components.values()
    )


def test_a_moment_tells_its_tensors() -> None:
    found = memplan.estimate("llama-3.2-1b", lora=8, seq_len=512, gpu="h100")
    moments = step_moments(found)
    peak = max(moments, key=lambda moment: moment.total_bytes)
    assert all(sum(each.components.values()) == each.total_bytes for each in moments)
    assert len(peak.largest) == 6
    sizes = [size for _, size in peak.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert peak.largest[0][0] == "parameters: mlp.gate_proj.weight"
    assert sum(sizes) <= peak.total_bytes
    picture: Any = found.plot("step")
    told = [
        each.words for each in picture.canvas.shapes if isinstance(each, Area) and not each.fill
    ]
    assert any("parameters: mlp.gate_proj.weight" in words for words in told)


def test_a_heat_map_says_verdicts_and_needs() -> None:
    sweep = memplan.sweep("gpt2", batch_size=[1, 64], seq_len=[256, 1024], gpu="t4")
    picture: Any = sweep.plot("seq-len", "batch")
    needs = {(f"{row['seq_len']:,}", str(row["micro_batch_size"])): row for row in sweep.rows()}
    assert picture.head[1:] == ("1", "64")
    for length, *cells in picture.rows:
        for batch, cell in zip(picture.head[1:], cells, strict=True):
            row = needs[length, batch]
            mark = {"fits": "✓", "OOM": "✗", "tight": "~"}[str(row["verdict"])]
            assert cell == f"{int(str(row['total_high_bytes'])) / 2**30:,.1f} {mark}"
    with pytest.raises(memplan.MemplanError, match="Did you mean 'batch'"):
        sweep.plot("bacth")


def test_what_there_is_no_picture_of() -> None:
    found = memplan.estimate("gpt2")
    with pytest.raises(memplan.MemplanError, match="Did you mean 'components'"):
        found.plot("component")
    with pytest.raises(memplan.MemplanError, match="no pipeline"):
        found.plot("ranks")


def test_it_is_saved(pictures: dict[str, Picture], tmp_path: Path) -> None:
    picture = pictures["heat"]
    for name in ("heat.svg", "heat.html"):
        picture.save(tmp_path / name)
        assert picture.svg in (tmp_path / name).read_text(encoding="utf-8")
    with pytest.raises(memplan.MemplanError, match=r"heat\.png: a picture is saved as"):
        picture.save(tmp_path / "heat.png")


def test_a_page_is_one_file(pictures: dict[str, Picture]) -> None:
    text = page(list(pictures.values()), title="All <of> them", lines=["A & b"])
    assert text.startswith("<!DOCTYPE html>")
    assert "<h1>All &lt;of&gt; them</h1><p>A &amp; b</p>" in text
    assert not re.search(r"url\(|https?://(?!www.w3.org)|<script|@import|<link", text)


def test_every_component_has_a_colour_and_a_character() -> None:
    for kind in ComponentKind:
        assert colour_of(kind.label, scheme=0) != colour_of(kind.label, scheme=1)
    assert len(CHART_FILLS) == len(set(CHART_FILLS)) == len(ComponentKind)


@pytest.mark.parametrize("kind", KINDS)
def test_matplotlib_draws_the_same(pictures: dict[str, Picture], kind: str) -> None:
    pytest.importorskip("matplotlib")
    figure = pictures[kind].to_figure()
    (axes,) = figure.axes
    assert {text.get_text() for text in axes.texts} == {
        each.text for each in pictures[kind].canvas.shapes if isinstance(each, Words)
    }
    figure.savefig(io.BytesIO(), format="png")


def test_without_matplotlib_it_says_so(
    pictures: dict[str, Picture], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(memplan.MemplanError, match="matplotlib is not installed"):
        pictures["heat"].to_figure()


# -- on the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("estimate gpt2 --gpu t4 --seq-len 512", "gpt2: bytes by phase and component"),
        ("sweep gpt2 --gpu t4 --batch-size 1,64 --seq-len 256,1024", "gpt2, T4, one GPU: batch by tokens"),
        ("plan gpt2-xl --gpu a100 --gpus 4 --limit 2", "gpt2-xl on A100-80: memory against time"),
    ],
    ids=["estimate", "sweep", "plan"],
)  # fmt: skip
def test_a_chart_and_a_page(run: Any, tmp_path: Path, words: str, title: str) -> None:
    report = tmp_path / "report.html"
    outcome = run(*words.split(), "--chart", "--report", str(report))
    assert outcome.exit_code == 0, outcome.stderr
    assert f"\n\n{title}\n" in outcome.stdout
    assert outcome.stdout.splitlines()[-1].startswith(f"Wrote {report}: ")
    text = report.read_text(encoding="utf-8")
    assert text.count("<svg") >= 1
    assert not re.search(r"url\(|https?://(?!www.w3.org)|<script|@import|<link", text)


def test_setups_side_by_side_are_a_page_too(run: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    outcome = run(
        "estimate",
        "gpt2",
        "--gpus",
        "2",
        "--gpu",
        "t4",
        "--engine",
        "ddp,fsdp",
        "--report",
        str(report),
    )
    assert outcome.exit_code == 0, outcome.stderr
    text = report.read_text(encoding="utf-8")
    assert text.count("<svg") == text.count("<figure") > 1
    assert "DDP on T4: fits" in text


@pytest.mark.parametrize(
    "command",
    ["estimate gpt2 --gpu t4", "sweep gpt2 --gpu t4 --batch-size 1,2 --seq-len 128,256", "explain gpt2 --gpu t4"],
)  # fmt: skip
def test_a_drawing_alone(run: Any, tmp_path: Path, command: str) -> None:
    drawing = tmp_path / "picture.svg"
    outcome = run(*command.split(), "--report", str(drawing))
    assert outcome.exit_code == 0, outcome.stderr
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("estimate gpt2 --report page.png", "--report: 'page.png' must end in .html"),
        (
            "estimate gpt2 --gpus 8 --zero 2,3 --gpu a100 --report page.svg",
            "a drawing is one picture",
        ),
        ("sweep gpt2 --chart --format json", "--format makes no use of --chart"),
        ("plan gpt2 --gpu t4,h100 --report page.html", "--report: a page is of one GPU: name one"),
    ],
)
def test_pictures_that_there_are_not(run: Any, words: str, said: str) -> None:
    outcome = run(*words.split())
    assert outcome.exit_code == 2
    assert said in outcome.stderr


def test_the_site_has_one_of_each_kind(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(checkout / "docs"))
    import site_hooks  # type: ignore[import-not-found]

    page = (checkout / "docs" / "python.md").read_text(encoding="utf-8")
    assert set(re.findall(r"pictures/(\w+)\.png", page)) == set(site_hooks.PICTURES) == set(KINDS)
    html = site_hooks.on_page_content('<p><img alt="a" src="../pictures/ranks.png" /></p>')
    assert html.startswith("<figure")
    written = {each.stem for each in (checkout / "docs" / "pictures").glob("*.png")}
    assert written == set(KINDS)
