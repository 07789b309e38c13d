"""The page that runs memplan in a browser: the same bytes as the command line, and nothing sent away."""

import html
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from docs.browser import build
from tests.browser.chromium import find_browser

pytestmark = pytest.mark.long

COLUMNS = 96
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
    "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 32000,
}  # fmt: skip
QUESTIONS = (
    ["estimate", "gpt2", "--gpus", "8"],
    ["estimate", "llama-3.1-8b", "--gpu", "h100", "--lora", "16", "--format", "json"],
    ["explain", "t5-small", "--engine", "ddp", "--gpus", "2", "--gpu", "a100"],
    ["plan", "gpt2", "--gpu", "h100", "--gpus", "8", "--engine", "ddp"],
    ["sweep", "gpt2", "--batch-size", "1,2", "--checkpointing", "none,full", "--format", "csv"],
    ["estimate", "config.json", "--gpu", "a100", "--precision", "bf16"],
    ["estimate", "lama-3.1-8b"],
    ["estimate", "someone/model"],
)
ASK = """
const frame = document.querySelector("iframe");
const told = (what) => fetch("/told", {method: "POST", body: JSON.stringify(what)});
const until = async (test) => {
  for (;;) {
    const found = test();
    if (found) return found;
    await new Promise((again) => setTimeout(again, 50));
  }
};
try {
  const given = await (await fetch("/given")).json();
  const view = frame.contentWindow, page = frame.contentDocument;
  const memplan = await until(() => frame.contentWindow.memplan);
  const doc = frame.contentDocument, root = doc.documentElement;
  await until(() => root.dataset.answered);
  const wide = (element) => element.getBoundingClientRect().right > root.clientWidth + 1;
  const seen = {
    line: doc.querySelector("[name=line]").value,
    model: doc.querySelector("[name=model]").value,
    screen: doc.querySelector("#screen").innerText,
    verdict: doc.querySelector("#verdict").innerText,
    coloured: doc.querySelectorAll("#screen .ink-green").length,
    scrollWidth: root.scrollWidth, width: root.clientWidth,
    outside: [...doc.querySelectorAll("#question *, #answer [role=tab]")].filter(wide).map((each) => each.outerHTML.slice(0, 80)),
  };
  const select = doc.querySelector("[name=zero]");
  select.value = "2";
  select.dispatchEvent(new Event("input", {bubbles: true}));
  seen.composed = doc.querySelector("[name=line]").value;
  delete root.dataset.answered;
  doc.querySelector("[data-view=report]").click();
  await until(() => root.dataset.answered);
  seen.report = (doc.querySelector("#report").srcdoc || "").length;
  const answers = [];
  for (const args of given.questions) {
    const {code, out, err} = await memplan.ask(args, {columns: given.columns, beside: given.files});
    answers.push({code, out, err});
  }
  delete root.dataset.answered;
  const carried = new view.DataTransfer();
  carried.items.add(new view.File([given.files["config.json"]], "config.json"));
  doc.querySelector("#question").dispatchEvent(
    new view.DragEvent("drop", {bubbles: true, cancelable: true, dataTransfer: carried}));
  await until(() => root.dataset.answered);
  seen.dropped = doc.querySelector("[name=line]").value;
  doc.querySelector("[data-view=answer]").click();
  await until(() => root.dataset.answered?.startsWith("answer"));
  seen.droppedAnswer = doc.querySelector("#screen").innerText;
  await until(() => root.dataset.offline);
  seen.offline = root.dataset.offline;
  const fetched = [...view.performance.getEntriesByType("resource")].map((each) => each.name);
  await fetch("/down", {method: "POST", body: ""});
  const began = performance.now();
  frame.src = "/in-the-browser/";
  await until(() => frame.contentDocument !== doc && frame.contentDocument?.querySelector("#screen"));
  seen.first = frame.contentDocument.querySelector("#screen").innerText;
  seen.firstSeconds = (performance.now() - began) / 1000;
  const ask = await until(() => frame.contentDocument.querySelector(".ask"));
  await until(() => ask.textContent !== "Loading Python …");
  seen.second = ask.textContent;
  await told({seen, answers, fetched});
} catch (error) {
  await told({error: String(error), stack: error.stack});
}
"""
HARNESS = """<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe style="border:0;width:{width}px;height:1400px" src="/in-the-browser/{hash}"></iframe>
<script type="module">{script}</script>"""


@dataclass(kw_only=True)
class Told:
    """What the browser said, and what it asked the server for."""

    answer: dict[str, Any] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    is_down: bool = False
    """From here on there is no network but for what is told."""


class Handler(SimpleHTTPRequestHandler):
    """The built site, a page around it, and the place where that page reports."""

    extensions_map: ClassVar = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm",
    }  # fmt: skip

    def __init__(self, *arguments: Any, told: Told, harness: str, directory: str) -> None:
        self.told, self.harness = told, harness
        super().__init__(*arguments, directory=directory)

    def log_message(self, *_: Any) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        if self.path == "/":
            return self.say(self.harness, "text/html")
        if self.path == "/given":
            given = {
                "questions": QUESTIONS,
                "columns": COLUMNS,
                "files": {"config.json": json.dumps(CONFIG)},
            }
            return self.say(json.dumps(given), "application/json")
        self.told.requests.append(f"GET {self.path}")
        if self.told.is_down:
            self.close_connection = True
            return None
        return super().do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/down":
            self.told.is_down = True
        elif self.path == "/told":
            self.told.answer = json.loads(body)
            self.told.done.set()
        else:
            self.told.requests.append(f"POST {self.path}")
        self.say("", "text/plain")

    def say(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    """The site as ``make docs`` builds it, where a warning is an error."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=checkout, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def site(pages: Path) -> Path:
    """The same with what runs in the browser."""
    if shutil.which("npm") is None:
        pytest.skip("no npm: the page's Python comes from its registry")
    build.main(pages)
    return pages


@pytest.fixture(scope="module")
def told(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The page opened on a phone with a question in its link, then asked more."""
    browser, told = find_browser(), Told()
    harness = HARNESS.format(
        width=390, hash="#q=memplan%20estimate%20gpt2%20--gpu%20h100", script=ASK
    )
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, told=told, harness=harness, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    profile = tmp_path_factory.mktemp("profile")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
        "--disable-dev-shm-usage", f"--user-data-dir={profile}", "--window-size=500,1400",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-port=0",
        f"http://127.0.0.1:{server.server_port}/",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert told.done.wait(300), told.requests
        finally:
            process.kill()
            server.shutdown()
            server.server_close()
    assert "error" not in told.answer, told.answer
    return told


def test_the_site_has_every_page(pages: Path, checkout: Path) -> None:
    """That it builds without a warning is what its fixture wants; CI has no other build."""
    for page in (checkout / "docs").glob("*.md"):
        name = "index.html" if page.stem == "index" else f"{page.stem}/index.html"
        assert "<h1" in (pages / name).read_text(encoding="utf-8"), page.name


@pytest.mark.browser
def test_it_answers_as_the_command_line_does(
    told: Told, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "question"  # the name that a config.json without one is given
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    for question, found in zip(QUESTIONS, told.answer["answers"], strict=True):
        done = run(*question)
        assert found["out"] == done.stdout, question
        assert found["code"] == done.exit_code, question
        if "/" not in question[1]:  # there it says that it asks no hub
            assert found["err"] == done.stderr, question
    assert "no hub client here" in told.answer["answers"][-1]["err"]


@pytest.mark.browser
def test_the_link_holds_the_question(told: Told) -> None:
    seen = told.answer["seen"]
    assert seen["line"] == "memplan estimate gpt2 --gpu h100"
    assert seen["model"] == "gpt2"
    assert "gpt2 (causal-lm)" in seen["screen"]
    assert "fits" in seen["screen"]
    assert seen["coloured"]
    assert [line.split()[0] for line in seen["verdict"].splitlines()] == [
        "H100-80",
        "needs",
        "batch",
    ]
    assert seen["composed"] == "memplan estimate gpt2 --gpu h100 --zero 2"
    assert seen["report"] > 10_000


@pytest.mark.browser
def test_it_fits_a_phone(told: Told) -> None:
    seen = told.answer["seen"]
    assert seen["width"] == 390
    assert seen["scrollWidth"] <= 390
    assert seen["outside"] == []


@pytest.mark.browser
def test_nothing_is_sent_away(told: Told) -> None:
    assert all(each.startswith("GET /") and "?" not in each for each in told.requests)
    assert [each for each in told.answer["fetched"] if "//127.0.0.1:" not in each] == []


@pytest.mark.browser
def test_a_config_is_dropped_on_it(told: Told) -> None:
    seen = told.answer["seen"]
    assert seen["dropped"].startswith("memplan estimate config.json")
    assert "question (causal-lm) · 45.42M" in seen["droppedAnswer"]
    assert "fits" in seen["droppedAnswer"]


@pytest.mark.browser
def test_the_second_time_it_needs_no_network(told: Told) -> None:
    seen = told.answer["seen"]
    assert seen["offline"] == "kept"
    assert seen["second"] == "Estimate", "Python came up without a network"


@pytest.mark.browser
def test_the_first_answer_is_there_beforehand(
    told: Told, site: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = told.answer["seen"]
    assert "t5-3b (seq2seq-lm)" in seen["first"]
    assert seen["firstSeconds"] < 2
    page = (site / "in-the-browser" / "index.html").read_text(encoding="utf-8")
    assert "{%" not in page
    held = html.unescape(page.partition('<pre id="screen" tabindex="0">')[2].partition("</pre>")[0])
    monkeypatch.setenv("COLUMNS", "80")
    assert held == run("estimate", "t5-3b", "--gpus", "8").stdout.rstrip("\n")
