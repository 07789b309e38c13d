"""The hub's answers, from a server of our own: one test for each that a user can meet."""

import contextlib
import json
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from memplan.errors import (
    ConfigError,
    HubError,
    HubGatedError,
    HubNotFoundError,
    HubOfflineError,
    HubRateLimitError,
)
from memplan.sources.about_models import hub as hub_module
from memplan.sources.about_models.hub import fetch_config
from memplan.sources.models import load_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"model_type": "t5", "d_model": 64}
REPO = "owner/model"
TOKEN = "hf_secretsecret"


@dataclass
class Answer:
    """What the server says to every request."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = json.dumps(CONFIG).encode()


@dataclass
class Hub:
    """A server on this machine that answers like the hub."""

    url: str
    answer: Answer = field(default_factory=Answer)
    files: dict[str, Answer] = field(default_factory=dict)
    """Other answers, by how the path ends."""
    requests: list[str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)


def point_hub_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", url)


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "/resolve/" in self.path:  # huggingface_hub has other questions now and then
                hub.requests.append(f"{self.command} {self.path}")
                hub.tokens.append(self.headers.get("authorization"))
            named = [each for end, each in hub.files.items() if self.path.endswith(end)]
            answer = named[0] if named else hub.answer
            body = answer.body
            headers = {
                "X-Repo-Commit": COMMIT,
                "ETag": '"etag"',
                "Content-Length": str(len(body)),
                **answer.headers,
            }
            self.send_response(answer.status)
            for name, value in headers.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(url=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    point_hub_at(hub.url, monkeypatch)
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def test_fetches_the_config_and_names_its_commit(hub: Hub) -> None:
    config, source = fetch_config(REPO)
    assert config == CONFIG
    assert source == "owner/model@0123456 on the Hugging Face hub"
    assert {request.split()[1] for request in hub.requests} == {
        "/owner/model/resolve/main/config.json"
    }


def test_sends_revision_and_token(hub: Hub) -> None:
    fetch_config(REPO, revision="v1.0", token=TOKEN)
    assert "/resolve/v1.0/config.json" in hub.requests[0]
    assert hub.tokens[0] == f"Bearer {TOKEN}"


def test_downloads_once(hub: Hub) -> None:
    fetch_config(REPO)
    fetch_config(REPO)
    assert sum(request.startswith("GET") for request in hub.requests) == 1


def test_prints_nothing(
    hub: Hub, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    hub.answer.headers = {"X-HF-Warning": "topic; an unrelated announcement"}
    with warnings.catch_warnings(record=True) as caught:
        fetch_config(REPO)
    assert capfd.readouterr() == ("", "")
    assert not caught
    assert not caplog.records


def test_leaves_the_settings_of_the_process_alone(hub: Hub) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    before = (logging.getLogger("huggingface_hub").level, are_progress_bars_disabled())
    hub.answer.status = 404
    with pytest.raises(HubError):
        fetch_config(REPO)
    after = (logging.getLogger("huggingface_hub").level, are_progress_bars_disabled())
    assert after == before


REFUSALS = [
    pytest.param(
        Answer(status=403, headers={"X-Error-Code": "GatedRepo"}),
        HubGatedError, ("is gated", "https://huggingface.co/owner/model", "hf auth login"),
        id="gated",
    ),
    pytest.param(
        Answer(status=401, headers={"X-Error-Code": "GatedRepo"}),
        HubGatedError, ("is gated", "`token`"),
        id="gated-without-a-token",
    ),
    pytest.param(
        Answer(status=404, headers={"X-Error-Code": "RepoNotFound"}),
        HubNotFoundError, ("no model 'owner/model'", "check the name"),
        id="missing-repository",
    ),
    pytest.param(
        Answer(status=401, headers={"X-Error-Message": "Invalid username or password."}),
        HubError, ("owner/model (401)", "hf auth login"),
        id="wants-a-token",
    ),
    pytest.param(
        Answer(status=404, headers={"X-Error-Code": "RevisionNotFound"}),
        HubNotFoundError, ("no revision 'v9'", "`revision`"),
        id="missing-revision",
    ),
    pytest.param(
        Answer(status=404, headers={"X-Error-Code": "EntryNotFound"}),
        HubNotFoundError, ("holds no config.json",),
        id="missing-config",
    ),
    pytest.param(
        Answer(
            status=401, headers={"X-Error-Message": "Invalid credentials in Authorization header"}
        ),
        HubError, ("(401)", "`token`", "HF_TOKEN"),
        id="bad-token",
    ),
    pytest.param(
        Answer(status=403, headers={"X-Error-Message": "Access to this resource is disabled."}),
        HubError, ("(403)", "disabled"),
        id="disabled",
    ),
    pytest.param(
        Answer(status=403), HubError, ("(403)", "permission"), id="forbidden",
    ),
    pytest.param(
        Answer(status=429, headers={"RateLimit": '"api";r=0;t=55'}),
        HubRateLimitError, ("(429)", "wait 55 seconds", "hf auth login"),
        id="rate-limited",
    ),
    pytest.param(
        Answer(status=429, headers={"Retry-After": "7"}),
        HubRateLimitError, ("wait 7 seconds",),
        id="rate-limited-retry-after",
    ),
    pytest.param(
        Answer(status=429), HubRateLimitError, ("wait some minutes",), id="rate-limited-no-time",
    ),
    pytest.param(
        Answer(status=503), HubOfflineError, ("(503)", "try again later"), id="hub-is-down",
    ),
    pytest.param(
        Answer(headers={"X-Repo-Commit": "", "ETag": ""}),
        HubOfflineError, ("not the Hugging Face hub", "HF_ENDPOINT"),
        id="not-the-hub",
    ),
    pytest.param(Answer(status=418), HubError, ("(418)",), id="any-other-refusal"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "expected", "words"), REFUSALS)
def test_says_in_one_line_what_was_refused(
    hub: Hub, answer: Answer, expected: type[HubError], words: tuple[str, ...]
) -> None:
    hub.answer = answer
    with pytest.raises(HubError) as caught:
        fetch_config(REPO, revision="v9")
    assert type(caught.value) is expected
    assert caught.value.exit_code == 4
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("status", [429, 503, 401])
def test_falls_back_on_the_cache(hub: Hub, status: int) -> None:
    fetch_config(REPO)
    hub.answer.status = status
    assert fetch_config(REPO)[0] == CONFIG


def test_offline_serves_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_config(REPO)
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_config(REPO)[0] == CONFIG
    assert len(hub.requests) == asked


def test_offline_and_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubOfflineError, match="not in the cache and HF_HUB_OFFLINE is set"):
        fetch_config(REPO)


def test_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    point_hub_at("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(HubOfflineError, match="cannot reach the hub") as caught:
        fetch_config(REPO)
    assert "\n" not in str(caught.value)


def test_a_bad_hub_id_is_not_asked_for(hub: Hub) -> None:
    with pytest.raises(HubNotFoundError, match="is not a hub id"):
        fetch_config("owner/--bad..name")
    assert not hub.requests


def test_a_token_that_cannot_be_sent_is_not_shown(hub: Hub) -> None:
    with pytest.raises(HubError) as caught:
        fetch_config(REPO, token=f"{TOKEN}\n")
    assert TOKEN not in str(caught.value)
    assert not hub.requests


def test_a_config_that_is_no_json_names_the_repository(hub: Hub) -> None:
    hub.answer.body = b"<html>"
    with pytest.raises(ConfigError, match=r"^config\.json of owner/model: is not JSON"):
        fetch_config(REPO)


def http_error(kind: Callable[..., Exception], status: int) -> Exception:
    return kind("refused", response=SimpleNamespace(status_code=status, headers={}, request=None))


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        pytest.param(http_error(errors.GatedRepoError, 403), HubGatedError, id="gated"),
        pytest.param(http_error(errors.RepositoryNotFoundError, 404), HubNotFoundError, id="repo"),
        pytest.param(http_error(errors.HfHubHTTPError, 429), HubRateLimitError, id="rate"),
        pytest.param(errors.LocalEntryNotFoundError("no"), HubOfflineError, id="not-cached"),
        pytest.param(PermissionError(13, "Permission denied"), HubError, id="cache-not-writable"),
        pytest.param(OSError(28, "No space left on device"), HubError, id="disk-full"),
        pytest.param(TimeoutError("timed out"), HubOfflineError, id="timeout"),
    ],
)
def test_a_download_that_fails_after_the_metadata(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[HubError]
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(HubError) as caught:
        fetch_config(REPO)
    assert type(caught.value) is expected
    assert len(hub.requests) == 1


@pytest.mark.network
def test_the_real_hub() -> None:
    config, source = fetch_config("google-t5/t5-small")
    assert config["d_model"] == 512
    assert source.startswith("google-t5/t5-small@")


class Server(BaseHTTPRequestHandler):
    """A hub whose answers to GET go wrong, each in its own way."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        for name, value in {
            "X-Repo-Commit": COMMIT,
            "ETag": '"etag"',
            "Content-Length": "20",
        }.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", '"etag"')
        self.end_headers()
        with contextlib.suppress(OSError):  # the client hangs up
            self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class EndlessServer(Server):
    def answer(self) -> None:
        for _ in range(100_000):
            self.wfile.write(b" " * 65536)


class SlowServer(Server):
    def answer(self) -> None:
        for _ in range(40):
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.05)


@contextlib.contextmanager
def serving(handler: type[Server], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    point_hub_at(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_stops_an_answer_that_never_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(EndlessServer, monkeypatch), pytest.raises(HubError, match="larger than 16 MiB"):
        fetch_config(REPO)
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert kept < 64 * 2**20
    assert capfd.readouterr() == ("", "")


def test_does_not_wait_for_an_answer_that_trickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_SECONDS", 0.3)
    start = time.monotonic()
    with (
        serving(SlowServer, monkeypatch),
        pytest.raises(HubOfflineError, match=r"did not answer .* in 0.3 s"),
    ):
        fetch_config(REPO)
    assert time.monotonic() - start < 10


def test_refuses_a_file_that_says_it_is_huge(hub: Hub) -> None:
    hub.answer.headers = {"Content-Length": str(10**12)}
    with pytest.raises(HubError, match="larger than 16 MiB"):
        fetch_config(REPO)
    assert not [request for request in hub.requests if request.startswith("GET")]


def test_log_lines_of_the_client_stay_away(
    hub: Hub, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    hub.answer.headers = {"Content-Length": str(len(hub.answer.body) + 20)}  # breaks off
    logging.getLogger("huggingface_hub.file_download").setLevel(logging.DEBUG)
    try:
        with pytest.raises(HubError):
            fetch_config(REPO)
    finally:
        logging.getLogger("huggingface_hub.file_download").setLevel(logging.NOTSET)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_of_a_pipeline_the_transformer_is_read(hub: Hub) -> None:
    config = {"_class_name": "FluxTransformer2DModel", "num_layers": 2, "num_single_layers": 1}
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    hub.answer = Answer(status=404, headers={"X-Error-Code": "EntryNotFound"}, body=b"")
    hub.files = {
        "transformer/config.json": Answer(
            body=json.dumps(config).encode(), headers={"ETag": '"another"'}
        ),
        "model_index.json": Answer(body=json.dumps(index).encode()),
    }
    model = load_model(REPO)
    assert (model.name, model.family) == (REPO, "FluxTransformer2DModel")
    assert model.source == "owner/model@0123456 on the Hugging Face hub"
    assert model.num_layers == 3


def test_a_pipeline_without_a_transformer_is_refused_by_name(hub: Hub) -> None:
    index = {
        "_class_name": "StableDiffusionPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
    }
    hub.answer = Answer(status=404, headers={"X-Error-Code": "EntryNotFound"}, body=b"")
    hub.files = {"model_index.json": Answer(body=json.dumps(index).encode())}
    with pytest.raises(ConfigError, match="its denoiser is a UNet2DConditionModel"):
        load_model(REPO)
