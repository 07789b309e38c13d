"""The report as a browser shows it: laid out on a desk and on a phone, light, dark and printed."""

import html
import json
import re
import struct
import subprocess
import zlib
from collections import Counter
from dataclasses import dataclass
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

pytestmark = [pytest.mark.browser, pytest.mark.long]

DESK = 1280
WIDTHS = (400, 800, 1600)
SCHEMES = {"light": 1, "dark": 0}
"""Blink's ``preferredColorScheme``."""

MEASURE = """
const measured = (page) => {
  const root = page.documentElement, view = page.defaultView;
  const outside = [...page.querySelectorAll("main *")].filter((each) =>
    !each.closest(".scroll > *") && each.getBoundingClientRect().right > root.clientWidth + 1);
  return {
    title: page.title,
    width: root.clientWidth,
    scrollWidth: root.scrollWidth,
    outside: outside.map((each) => each.outerHTML.slice(0, 80)),
    background: view.getComputedStyle(page.body).backgroundColor,
    ink: view.getComputedStyle(page.body).color,
    fetched: view.performance.getEntriesByType("resource").length,
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
};
window.onload = () => {
  const frames = [...document.querySelectorAll("iframe")].map((each) => each.contentDocument);
  const out = document.createElement("pre");
  out.id = "measured";
  out.hidden = true;
  out.textContent = JSON.stringify((frames.length ? frames : [document]).map(measured));
  document.body.append(out);
};
"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A page in the browser: what was measured of it, or of each frame in it, and the file it was also written to."""

    measured: list[dict[str, Any]]
    file: Path


@pytest.fixture(scope="module")
def report() -> str:
    setup = TrainingSetup(precision="bf16", micro_batch_size=2, seq_len=2048)  # type: ignore[arg-type]
    found = estimate(load_model("llama-3.1-8b"), setup, load_gpu("a100-80gb"))
    return html_report([found], version="1")


@pytest.fixture(scope="module")
def pictures() -> str:
    shown = [
        memplan.estimate(
            "llama-3.2-1b", gpus=4, engine="megatron", pipeline_parallel=4, gradient_accumulation=4
        ).plot("ranks"),
        memplan.sweep("gpt2", batch_size="1..64", seq_len=[128, 1024], gpu=["t4", "h100"]).plot(),
        memplan.plan("gpt2-xl", gpus=[2, 4, 8], gpu="a100", seq_len=512).plot(),
    ]
    return page(shown, title="Pictures")  # type: ignore[arg-type]


def look(text: str, folder: Path, file: str, option: str, *, scheme: str) -> Seen:
    """Open a page once, in a browser that takes a second to start: measure it, and write it down as it is asked to."""
    shown, written = folder / "page.html", folder / file
    shown.write_text(
        text.replace("</body>", f"<script>{MEASURE}</script></body>"), encoding="utf-8"
    )
    command = [
        find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--no-first-run", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000",
        f"--window-size={DESK},900", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--dump-dom", f"{option}={written}", "--no-pdf-header-footer", shown.as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<pre id="measured".*?>(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[-2000:]
    return Seen(measured=json.loads(html.unescape(found[1])), file=written)


def frame(text: str, width: int) -> str:
    """A page in a frame as wide as the screen meant."""
    return (
        f'<iframe style="border:0;display:block;width:{width}px;height:2400px" '
        f'srcdoc="{html.escape(text)}"></iframe>'
    )


@pytest.fixture(scope="module")
def light(report: str, pictures: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """By day: the report on a desk, which is what is on the screen, and report and pictures on each width."""
    frames = [frame(report, width) for width in (DESK, *WIDTHS)]
    frames += [frame(pictures, width) for width in WIDTHS]
    text = f'<meta charset="utf-8"><body style="margin:0">{"".join(frames)}</body>'
    folder = tmp_path_factory.mktemp("light")
    return look(text, folder, "report.png", "--screenshot", scheme="light")


@pytest.fixture(scope="module")
def dark(report: str, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """By night: the report itself, and on paper."""
    folder = tmp_path_factory.mktemp("dark")
    return look(report, folder, "report.pdf", "--print-to-pdf", scheme="dark")


@pytest.mark.parametrize("width", WIDTHS)
def test_layout(light: Seen, width: int) -> None:
    found = light.measured[1 + WIDTHS.index(width)]

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
def test_drawings(light: Seen, width: int) -> None:
    found = light.measured[1 + WIDTHS.index(width)]

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


@pytest.mark.parametrize("width", WIDTHS)
def test_no_picture_has_words_on_words(light: Seen, width: int) -> None:
    found = light.measured[1 + len(WIDTHS) + WIDTHS.index(width)]

    assert found["width"] == width
    assert len(found["drawings"]) == 3
    for words in (each["words"] for each in found["drawings"]):
        assert words
        for number, one in enumerate(words):
            assert not any(overlaps(one, other) for other in words[number + 1 :]), one


def overlaps(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two boxes share more than a line's leading."""
    wide = min(one["right"], other["right"]) - max(one["left"], other["left"])
    high = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
    return bool(wide > 1 and high > 4)


def test_dark(light: Seen, dark: Seen) -> None:
    day, (night,) = light.measured[0], dark.measured

    assert day["width"] == night["width"] == DESK
    assert day["background"] == "rgb(255, 255, 255)"
    assert brightness(night["background"]) < 60
    assert brightness(night["ink"]) > 180
    fills = [area["fill"] for area in night["areas"]]
    assert fills != [area["fill"] for area in day["areas"]]
    assert all(brightness(fill) > 60 for fill in fills)


def brightness(colour: str) -> float:
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return 0.3 * red + 0.59 * green + 0.11 * blue


def test_pixels(light: Seen) -> None:
    """What is on the screen: the areas cover what they should, and the dashed line is there."""
    colours = pixels(light.file)
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


def test_print(dark: Seen) -> None:
    content = dark.file.read_bytes()
    assert content.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 8
