"""The report as a file: one page, no network, both colour schemes."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from memplan.estimator import estimate
from memplan.estimator.time.step_time import step_time
from memplan.report.estimates.times import seconds_text
from memplan.report.html import heat_cells, html_report
from memplan.report.pictures.canvas import Area, Words
from memplan.report.pictures.lanes import lanes_picture
from memplan.report.pictures.steps import step_picture
from memplan.report.stages import pipeline_places
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from memplan.units import GIB

VOID = {"meta", "br", "img", "line", "path", "rect"}


class Page(HTMLParser):
    """Collects tags and text, and checks that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


def report(model: Any = "llama-3.2-1b", *gpus: str, **setup: Any) -> str:
    spec = load_model(model)
    cards = [load_gpu(gpu) for gpu in gpus] or [None]
    found = [estimate(spec, TrainingSetup(**setup), card) for card in cards]
    return html_report(found, version="1.2.3")


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    assert not page.open
    return page


@pytest.fixture(scope="module")
def page() -> Page:
    return parsed(report("llama-3.2-1b", "a100", "v100-16gb", precision="bf16"))


def test_sections(page: Page) -> None:
    ids = [attributes["id"] for tag, attributes in page.tags if tag == "section"]

    assert ids == [
        "the-step", "on-the-gpu", "its-time", "another-batch-or-sequence", "the-account", "flops",
        "what-other-methods-say", "assumptions",
    ]  # fmt: skip


def test_nothing_is_fetched(page: Page) -> None:
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    for _, attributes in page.tags:
        assert not {"src", "href"} & attributes.keys()
    assert "url(" not in report("gpt2")


def test_both_schemes_and_print() -> None:
    text = report("gpt2")

    assert "prefers-color-scheme:dark" in text
    assert "@media print" in text


def test_figures(page: Page) -> None:
    found = estimate(load_model("llama-3.2-1b"), TrainingSetup(precision="bf16"), load_gpu("a100"))  # type: ignore[arg-type]

    assert f"{found.peak_bytes / 2**30:,.2f} GiB" in page.text
    assert "A100-80" in page.text
    assert "V100-16" in page.text
    assert "optimizer adamw-fused" in page.text
    assert "Made by memplan 1.2.3." in page.text
    assert "Φ = 1,235,814,400 parameters" in page.text


def test_names_are_escaped() -> None:
    config = {
        "model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2, "vocab_size": 100,
        "n_positions": 64, "_name_or_path": "<script>alert(1)</script>",
    }  # fmt: skip
    text = report(config)

    assert "<script" not in text
    parsed(text)


def test_a_page_without_a_gpu_has_no_verdict() -> None:
    page = parsed(report("gpt2"))

    assert "No GPU was named" in page.text


def test_the_same_input_gives_the_same_bytes() -> None:
    assert report("gpt2", "a100") == report("gpt2", "a100")


def test_heat_map_has_the_setup_itself() -> None:
    found = estimate(load_model("gpt2"), TrainingSetup(micro_batch_size=3, seq_len=700))
    cells = {(cell.batch, cell.length): cell.found for cell in heat_cells(found)}

    own = cells[3, 700]
    assert own is not None
    assert own.peak_bytes == found.peak_bytes
    assert max(length for _, length in cells) == 1024  # as far as GPT-2 reads


@pytest.mark.parametrize(
    "setup", [{"zero_stage": 3}, {"engine": "fsdp"}, {"engine": "ddp"}], ids=str
)
def test_engines(setup: dict[str, Any]) -> None:
    page = parsed(report("gpt2", "a100", num_gpus=8, **setup))

    assert "on 8 GPUs" in page.text


def test_svg_is_xml() -> None:
    found = estimate(load_model("gpt2"), TrainingSetup(), load_gpu("v100-16gb"))
    root = ElementTree.fromstring(step_picture(found).svg)

    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "forward" in words
    assert any("peak" in (word or "") for word in words)
    paths = list(root.iter("{http://www.w3.org/2000/svg}path"))
    drawn = {str(path.get("class")).split()[0].removeprefix("mp-") for path in paths}
    held = {name for phase in found.phases.values() for name in phase.components}
    assert held | {"added", "line-ink"} <= drawn


@pytest.mark.parametrize("name", ["report.html", "timeline.svg"])
def test_command_writes_the_file(run: Callable[..., Any], tmp_path: Path, name: str) -> None:
    output = tmp_path / name
    outcome = run("explain", "gpt2", "--report", str(output))

    assert outcome.exit_code == 0
    assert outcome.stdout.splitlines()[-1].startswith(f"Wrote {output}: ")
    assert "peak" in output.read_text(encoding="utf-8")


def test_command_says_where_it_cannot_write(run: Callable[..., Any], tmp_path: Path) -> None:
    outcome = run("explain", "gpt2", "--report", str(tmp_path / "missing" / "report.html"))

    assert outcome.exit_code == 3
    assert "cannot be written" in outcome.stderr


def test_tables_and_drawings_are_read_aloud() -> None:
    found = estimate(
        load_model("gpt2"), TrainingSetup(seq_len=128, micro_batch_size=2), load_gpu("v100-16gb")
    )
    page = html_report([found], version="0")
    areas = re.findall(
        r'<div class="scroll" tabindex="0" role="region" aria-label="([^"]+)">', page
    )
    assert len(areas) == page.count("<table") == page.count("<caption>")
    assert all(areas)
    heads = page.count("<th") - page.count("<thead")
    assert heads == page.count('<th scope="col"') + page.count('<th scope="row"')
    drawn = re.search(r'role="img"[^>]*><title>([^<]+)</title>', page)
    assert drawn is not None
    for phase in found.account.phases:
        assert f"{phase.name} {phase.peak_bytes / 2**30:,.2f} GiB" in drawn[1]
    assert f"<title>{drawn[1]}</title>" in step_picture(found).svg


def test_the_head_says_what_would_make_it_fit() -> None:
    page = parsed(report("llama-3.2-1b", "v100-16gb", precision="bf16"))
    assert "to fit: --checkpointing full" in page.text
    assert "to fit:" not in parsed(report("gpt2", "a100")).text


def test_the_drawing_shows_what_lies_beside_the_allocator() -> None:
    found = estimate(load_model("gpt2"), TrainingSetup(num_gpus=8), load_gpu("v100-16gb"))
    drawing = step_picture(found).svg
    low, high = (each / 2**30 for each in (found.overhead_bytes.low, found.overhead_bytes.high))
    words = f"CUDA context and NCCL, {low:.1f}-{high:.1f} GiB"
    assert drawing.count('class="mp-added mp-area"') == 2, "the band, and its key"
    assert drawing.count(words) == 2, "in the title, and beside the key"
    assert words in parsed(html_report([found], version="1")).text


def test_a_pipeline_has_its_ranks() -> None:
    """The same rows as ``explain``: stages, layers, micro-batches in flight, bytes of each place."""
    model = load_model("llama-3.2-1b")
    setup = TrainingSetup(
        num_gpus=4,
        engine="megatron",
        pipeline_parallel=4,
        gradient_accumulation_steps=8,  # type: ignore[arg-type]
    )
    found = estimate(model, setup, None)
    page = parsed(html_report([found], version="1"))
    for place in pipeline_places(found):
        assert f"{place.account.peak.peak_bytes / GIB:,.2f}" in page.text
        assert all(stage.words in page.text for stage in place.stages)
    bars = [each for tag, each in page.tags if tag == "div" and each.get("class") == "stage"]
    assert len(bars) == 4
    assert 'id="the-pipeline"' not in report()


def test_the_step_is_drawn_over_time(page: Page) -> None:
    """Lanes with the critical path below them; the parts in the table behind them sum to the step."""
    setup = TrainingSetup(num_gpus=8, engine="fsdp")
    found = estimate(load_model("gpt2"), setup, load_gpu("h100"))
    time = step_time(found)
    picture = lanes_picture(found, time)
    words = [each for each in picture.canvas.shapes if isinstance(each, Words)]
    (path,) = [each for each in words if each.text == "critical path"]
    assert {each.text for each in words} >= {"compute", "communication", "backward"}
    row = [
        each
        for each in picture.canvas.shapes
        if isinstance(each, Area) and each.words and each.points[2][1] > path.y
    ]
    assert sum(each.points[1][0] - each.points[0][0] for each in row) == pytest.approx(880)
    assert picture.rows[-1][1] == seconds_text(time.expected_s)
    assert "critical path" in page.text
    assert "products of matrices" in page.text
