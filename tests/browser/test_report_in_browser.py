"""The report as a browser shows it: laid out on a desk and on a phone, light, dark and printed."""

import html
import json
import re
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.estimator import estimate
from memplan.report.html import html_report
from memplan.report.pages.palette import COMPONENTS, LIGHT
from memplan.report.pictures.picture import page
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.models import load_model
from memplan.training.setup import TrainingSetup
from tests.browser.chromium import find_browser

pytestmark = pytest.mark.browser

DESK = 1280
WIDTHS = (400, 800, 1600)
SCHEMES = {"light": 1, "dark": 0}
"""Blink's ``preferredColorScheme``."""

MEASURE = """
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement, view = frame.contentWindow;
  const box = (selector) => {
    const found = page.querySelector(selector).getBoundingClientRect();
    return {left: found.left, right: found.right, top: found.top, width: found.width,
            height: found.height};
  };
  const outside = [...page.querySelectorAll("main *")].filter((each) =>
    !each.closest(".scroll > *") && each.getBoundingClientRect().right > root.clientWidth + 1);
  const measured = {
    title: page.title,
    width: root.clientWidth,
    scrollWidth: root.scrollWidth,
    outside: outside.map((each) => each.outerHTML.slice(0, 80)),
    background: view.getComputedStyle(page.body).backgroundColor,
    ink: view.getComputedStyle(page.body).color,
    fetched: view.performance.getEntriesByType("resource").length,
    badge: box(".badge"),
    areas: [...page.querySelector("svg").querySelectorAll(".mp-area")].map((each) =>
      ({fill: view.getComputedStyle(each).fill, height: each.getBoundingClientRect().height})),
    drawings: [...page.querySelectorAll("svg")].map((each) => ({
      width: each.getBoundingClientRect().width,
      height: each.getBoundingClientRect().height,
      words: [...each.querySelectorAll("text")].map((text) => {
        const found = text.getBoundingClientRect();
        return {text: text.textContent, left: found.left, right: found.right, top: found.top,
                bottom: found.bottom};
      }),
    })),
    keyboard: [...page.querySelectorAll("figure")].map((each) =>
      each.querySelectorAll("details > summary").length *
      each.querySelectorAll("table > caption").length *
      each.querySelectorAll('[tabindex="0"][aria-label]').length),
    cells: page.querySelectorAll(".heat td").length,
    marks: [...page.querySelectorAll(".heat td")].map((each) => each.innerText),
    text: page.body.innerText,
  };
  const out = document.createElement("pre");
  out.id = "measured";
  out.textContent = JSON.stringify(measured);
  document.body.append(out);
};
"""


@pytest.fixture(scope="module")
def browser() -> str:
    return find_browser()


@pytest.fixture(scope="module")
def report() -> str:
    setup = TrainingSetup(precision="bf16", micro_batch_size=2, seq_len=2048)  # type: ignore[arg-type]
    found = estimate(load_model("llama-3.1-8b"), setup, load_gpu("a100-80gb"))
    return html_report([found], version="1")


def run_browser(browser: str, folder: Path, *arguments: str) -> str:
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--no-first-run", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000", *arguments,
    ]  # fmt: skip
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return outcome.stdout


def framed(report: str, width: int, folder: Path) -> str:
    """A page that shows the report in a frame as wide as the screen meant, and measures it."""
    page = folder / "frame.html"
    page.write_text(
        f'<meta charset="utf-8"><body style="margin:0"><iframe style="border:0;width:{width}px;'
        f'height:2400px" srcdoc="{html.escape(report)}"></iframe><script>{MEASURE}</script>',
        encoding="utf-8",
    )
    return page.as_uri()


def measure(
    browser: str, report: str, folder: Path, *, width: int, scheme: str = "light"
) -> dict[str, Any]:
    dom = run_browser(
        browser, folder, f"--window-size={max(width, 500)},2400",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--dump-dom",
        framed(report, width, folder),
    )  # fmt: skip
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[-2000:]
    measured: dict[str, Any] = json.loads(html.unescape(found[1]))
    return measured


@pytest.mark.parametrize("width", WIDTHS)
def test_layout(browser: str, report: str, tmp_path: Path, width: int) -> None:
    found = measure(browser, report, tmp_path, width=width)

    assert found["width"] == width
    assert found["scrollWidth"] <= width, "the page scrolls sideways"
    assert found["outside"] == []
    assert found["fetched"] == 0
    assert found["title"] == "llama-3.1-8b: 75.40 GiB"
    assert "A100-80 79.15 GiB" in found["text"]
    assert "8,030,261,248" in found["text"]
    assert found["cells"] == len(found["marks"]) >= 30
    assert {mark[-1] for mark in found["marks"]} == {"✓", "✗"}, "replayed: none is undecided"


@pytest.mark.parametrize("width", WIDTHS)
def test_drawings(browser: str, report: str, tmp_path: Path, width: int) -> None:
    found = measure(browser, report, tmp_path, width=width)

    assert len(found["drawings"]) == len(found["keyboard"]) == 3
    assert all(found["keyboard"]), "each has a table behind it, and scrolls with the keyboard"
    for drawing in found["drawings"]:
        assert drawing["width"] >= min(0.8 * width, 640)
        is_lanes = any(each["text"] == "critical path" for each in drawing["words"])
        assert drawing["height"] >= (100 if is_lanes else 150)
        assert drawing["words"]
        for place, one in enumerate(drawing["words"]):
            assert one["bottom"] - one["top"] >= 8, "words can be read"
            for other in drawing["words"][place + 1 :]:
                assert not overlaps(one, other), (one["text"], other["text"])
    assert all(area["height"] > 0 for area in found["areas"])
    told = [each["text"] for each in found["drawings"][0]["words"]]
    assert [each for each in told if each in ("load", "forward", "backward", "step")] == [
        "load", "forward", "backward", "step",
    ]  # fmt: skip
    assert any(each.startswith(("▼ peak 75.40", "peak 75.40")) for each in told)


PICTURE_WORDS = """
const out = document.createElement("pre");
out.id = "measured";
out.textContent = JSON.stringify([...document.querySelectorAll("svg")].map((each) =>
  [...each.querySelectorAll("text")].map((text) => {
    const found = text.getBoundingClientRect();
    return {text: text.textContent, left: found.left, right: found.right, top: found.top,
            bottom: found.bottom};
  })));
document.body.append(out);
"""


@pytest.mark.parametrize("width", WIDTHS)
def test_no_picture_has_words_on_words(browser: str, tmp_path: Path, width: int) -> None:
    pictures = [
        memplan.estimate(
            "llama-3.2-1b", gpus=4, engine="megatron", pipeline_parallel=4, gradient_accumulation=4
        ).plot("ranks"),
        memplan.sweep("gpt2", batch_size="1..64", seq_len=[128, 1024], gpu=["t4", "h100"]).plot(),
        memplan.plan("gpt2-xl", gpus=[2, 4, 8], gpu="a100", seq_len=512).plot(),
    ]
    text = page(pictures, title="Pictures")  # type: ignore[arg-type]
    place = tmp_path / "pictures.html"
    place.write_text(
        text.replace("</body>", f"<script>{PICTURE_WORDS}</script></body>"), encoding="utf-8"
    )
    dom = run_browser(
        browser, tmp_path, f"--window-size={max(width, 500)},2000", "--dump-dom", place.as_uri()
    )
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None
    drawings = json.loads(html.unescape(found[1]))
    assert len(drawings) == len(pictures)
    for words in drawings:
        assert words
        for number, one in enumerate(words):
            assert not any(overlaps(one, other) for other in words[number + 1 :]), one


def overlaps(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two boxes share more than a line's leading."""
    wide = min(one["right"], other["right"]) - max(one["left"], other["left"])
    high = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
    return bool(wide > 1 and high > 4)


def test_dark(browser: str, report: str, tmp_path: Path) -> None:
    light = measure(browser, report, tmp_path, width=DESK)
    dark = measure(browser, report, tmp_path, width=DESK, scheme="dark")

    assert light["background"] == "rgb(255, 255, 255)"
    assert brightness(dark["background"]) < 60
    assert brightness(dark["ink"]) > 180
    fills = [area["fill"] for area in dark["areas"]]
    assert fills != [area["fill"] for area in light["areas"]]
    assert all(brightness(fill) > 60 for fill in fills)


def brightness(colour: str) -> float:
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return 0.3 * red + 0.59 * green + 0.11 * blue


def test_pixels(browser: str, report: str, tmp_path: Path) -> None:
    """What is on the screen: the areas cover what they should, and the dashed line is there."""
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(report, encoding="utf-8")

    run_browser(
        browser, tmp_path, "--window-size=1280,900", f"--screenshot={picture}", page.as_uri()
    )

    colours = pixels(picture)
    known = LIGHT | {kind.label: code for kind, (code, _) in COMPONENTS.items()}
    found = {name: colours[tuple(bytes.fromhex(code[1:]))] for name, code in known.items()}
    assert found["parameters"] > 20_000, "what is held the whole run"
    assert found["activations"] > 20_000, "from forward to backward"
    assert found["added"] > 500, "what lies beside the allocator"
    assert found["red"] > 300, "the GPU's memory"
    assert colours[0xFF, 0xFF, 0xFF] > 400_000


def pixels(picture: Path) -> Counter[tuple[int, ...]]:
    """Count the colours of a PNG of 8 bits a channel, without a library for it."""
    content = picture.read_bytes()
    position, data, header = 8, b"", b""
    while position < len(content):
        (size,) = struct.unpack(">I", content[position : position + 4])
        kind = content[position + 4 : position + 8]
        body = content[position + 8 : position + 8 + size]
        header = body if kind == b"IHDR" else header
        data += body if kind == b"IDAT" else b""
        position += size + 12
    width, height, depth, colour, *_, interlaced = struct.unpack(">IIBBBBB", header)
    assert (depth, interlaced) == (8, 0)
    channels = {2: 3, 6: 4}[colour]
    raw, stride = zlib.decompress(data), width * channels
    previous, found = bytearray(stride), Counter[tuple[int, ...]]()
    for row in range(height):
        start = row * (stride + 1)
        line = unfiltered(raw[start], raw[start + 1 : start + 1 + stride], previous, channels)
        reds, greens, blues = line[0::channels], line[1::channels], line[2::channels]
        found.update(zip(reds, greens, blues, strict=True))
        previous = line
    return found


def unfiltered(kind: int, coded: bytes, above: bytearray, channels: int) -> bytearray:
    """Undo a PNG row's filter (PNG specification, section 9)."""
    line = bytearray(coded)
    if kind == 2:
        return bytearray((byte + up) & 255 for byte, up in zip(coded, above, strict=True))
    for index in range(len(line) if kind else 0):
        left = line[index - channels] if index >= channels else 0
        up = above[index]
        corner = above[index - channels] if index >= channels else 0
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + up) // 2
        else:
            nearest = min((left, up, corner), key=lambda byte: abs(left + up - corner - byte))
            guess = nearest
        line[index] = (line[index] + guess) & 255
    return line


def test_print(browser: str, report: str, tmp_path: Path) -> None:
    page, paper = tmp_path / "report.html", tmp_path / "report.pdf"
    page.write_text(report, encoding="utf-8")

    run_browser(
        browser, tmp_path, "--blink-settings=preferredColorScheme=0",
        f"--print-to-pdf={paper}", "--no-pdf-header-footer", page.as_uri(),
    )  # fmt: skip

    content = paper.read_bytes()
    assert content.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 8
