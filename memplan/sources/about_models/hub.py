"""Fetches a model's ``config.json`` from the Hugging Face hub: that one file, through its cache; of a
diffusers pipeline the one of its transformer, which its ``model_index.json`` names.

huggingface_hub retries for half a minute when the hub cannot be reached, and for as long as the hub
asks when it is rate-limited. A command that reads one small file should say so at once: the file's
metadata is asked for first, which does not retry, and decides what follows.
"""

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memplan.errors import (
    HubError,
    HubGatedError,
    HubNotFoundError,
    HubOfflineError,
    HubRateLimitError,
)
from memplan.fast_dataclass import dataclass
from memplan.sources.files import MAX_JSON_BYTES, read_json_mapping
from memplan.units import MIB

CONFIG_FILE = "config.json"

_UNAUTHORIZED = 401
_FORBIDDEN = 403
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
_COMMIT_LENGTH = 40
_SHOWN_COMMIT_LENGTH = 7
_INSTEAD = "or give the path of its config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    repo_id: str
    revision: str | None
    token: str | None
    file_name: str = CONFIG_FILE


def cache_folder() -> Path:
    """Where the hub's files are kept on this machine."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def fetch_config(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    file_name: str = CONFIG_FILE,
) -> tuple[dict[str, object], str]:
    """Return a model's config and the text that says where it came from.

    ``file_name`` is its path in the repository. ``revision`` is a branch, a tag or a commit; ``token`` replaces the one that ``hf auth login``
    or ``HF_TOKEN`` left. A copy in the cache serves where the hub cannot be reached or
    ``HF_HUB_OFFLINE`` is set.

    Raises ``HubGatedError``, ``HubNotFoundError``, ``HubOfflineError``, ``HubRateLimitError`` or,
    for what is none of these, ``HubError``; ``ConfigError`` when the file is not a JSON object.
    """
    from importlib.util import find_spec

    if find_spec("huggingface_hub") is None:
        msg = (
            f"{repo_id} is no built-in name, and there is no hub client here to ask: {_INSTEAD[3:]}"
        )
        raise HubOfflineError(msg)
    request = _Request(repo_id=repo_id, revision=revision, token=token, file_name=file_name)
    from memplan.upward import provided

    with _silence(), provided("waiting", f"asking the Hugging Face hub for {repo_id}"):
        path = Path(_download_in_time(request))
    config = read_json_mapping(path, label=f"{file_name} of {repo_id}")
    commit = path.parents[file_name.count("/")].name
    known = f"@{commit[:_SHOWN_COMMIT_LENGTH]}" if len(commit) == _COMMIT_LENGTH else ""
    return config, f"{repo_id}{known} on the Hugging Face hub"


MAX_SECONDS = 60.0
"""How long a file of a few kilobytes may take: a server that never ends its answer is no hub."""


def _download_in_time(request: _Request) -> str:
    """Download in a thread that is left behind when the time is up.

    The client's own limits are on the pauses of an answer, not on its length.
    """
    answers: list[str] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(_download(request))
        except BaseException as error:  # noqa: BLE001 - handed on to who waits
            failures.append(error)

    thread = threading.Thread(target=work, name="memplan-hub", daemon=True)
    thread.start()
    thread.join(MAX_SECONDS)
    if failures:
        raise failures[0]
    if not answers:
        msg = f"the hub did not answer for {request.repo_id} in {MAX_SECONDS:g} s: {_INSTEAD[3:]}"
        raise HubOfflineError(msg)
    return answers[0]


def _download(request: _Request) -> str:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    expected = _expected_errors()
    try:
        url = hf_hub_url(request.repo_id, request.file_name, revision=request.revision)
        metadata = get_hf_file_metadata(url, token=request.token)
    except expected as error:
        return _read_cache(request, error)
    if (metadata.size or 0) > MAX_JSON_BYTES:
        raise _too_large(request.repo_id)
    try:
        return hf_hub_download(
            request.repo_id,
            request.file_name,
            revision=request.revision,
            token=request.token,
            tqdm_class=_counter(request.repo_id),
        )
    except HubError:
        raise
    except expected as error:
        raise _explain(request, error) from error


def _too_large(repo_id: str) -> HubError:
    limit = f"{MAX_JSON_BYTES // MIB} MiB"
    return HubError(f"{CONFIG_FILE} of {repo_id} is larger than {limit}: it is no model's config")


def _counter(repo_id: str) -> Any:
    """A progress bar that shows nothing and stops a download that says less than it sends."""
    from huggingface_hub.utils.tqdm import tqdm

    class Counter(tqdm):
        received = 0

        def update(self, n: Any = 1) -> Any:
            self.received += int(n or 0)
            if self.received > MAX_JSON_BYTES:
                raise _too_large(repo_id)
            return super().update(n)

    return Counter


def _expected_errors() -> tuple[type[Exception], ...]:
    """Return what a request may raise.

    The bases of ``HfHubHTTPError`` are ``OSError`` and the error of whichever HTTP library
    huggingface_hub uses (httpx2 in 2.x), which lets some of its errors through. ``ValueError`` is
    a repository id or a header that cannot be written.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, *HfHubHTTPError.__bases__)


def _read_cache(request: _Request, failure: Exception) -> str:
    """Return the path of a cached copy, or raise what kept the hub from serving the file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if _says_absent(failure) or isinstance(failure, HFValidationError):
        raise _explain(request, failure) from failure
    try:
        return hf_hub_download(
            request.repo_id, request.file_name, revision=request.revision, local_files_only=True
        )
    except LocalEntryNotFoundError:
        raise _explain(request, failure) from failure
    except _expected_errors() as error:
        raise _explain(request, error) from error


def _says_absent(error: Exception) -> bool:
    """Say whether the hub knows that the revision or the file does not exist."""
    from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError

    return isinstance(error, RevisionNotFoundError | RemoteEntryNotFoundError)


def _explain(request: _Request, error: Exception) -> HubError:
    """Say in one line what the hub's refusal means and what to do about it.

    Subclasses come first: a gated repository is also reported as one that was not found.
    """
    from huggingface_hub import errors

    repo, page = request.repo_id, f"https://huggingface.co/{request.repo_id}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        # The reason is the cause; without one, nothing but the cache was asked.
        cause = error.__cause__
        return _explain(request, cause) if isinstance(cause, Exception) else _offline(repo)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return _offline(repo)
    if isinstance(error, errors.GatedRepoError):
        return HubGatedError(
            f"{repo} is gated: accept its terms at {page}, then log in with `hf auth login` or "
            "give `token`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubNotFoundError(
            f"the hub has no model {repo!r} that you may see: check the name; for a private one, "
            "log in with `hf auth login` or give `token`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubNotFoundError(
            f"{repo} has no revision {request.revision!r}: see {page}/commits/main, or leave "
            "`revision` out"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return HubNotFoundError(
            f"{repo} holds no {request.file_name}: it is not in the format of transformers; give a "
            "config or a YAML spec of its shape"
        )
    if isinstance(error, errors.HFValidationError):
        return HubNotFoundError(f"{repo!r} is not a hub id: write owner/name")
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_status(request, error)
    return _explain_other(request, error)


def _offline(repo_id: str) -> HubError:
    return HubOfflineError(
        f"{repo_id} is not in the cache and HF_HUB_OFFLINE is set: unset it, {_INSTEAD}"
    )


def _explain_status(request: _Request, error: Exception) -> HubError:
    """Explain an answer that says no more than its HTTP status."""
    response = getattr(error, "response", None)
    status = int(getattr(response, "status_code", 0) or 0)
    if status == _TOO_MANY_REQUESTS:
        return HubRateLimitError(
            f"the hub refuses more requests for now (429): {_waiting_time(response)}, log in with "
            f"`hf auth login` for a higher limit, {_INSTEAD}"
        )
    if status == _UNAUTHORIZED:
        return HubError(
            f"the hub accepts no token, or not this one, for {request.repo_id} (401): check "
            "`token` and HF_TOKEN, or log in anew with `hf auth login`"
        )
    if status == _FORBIDDEN:
        return HubError(
            f"the hub forbids reading {request.repo_id} (403): the model is disabled or the token "
            "lacks the permission; give a token that may read it"
        )
    if status >= _SERVER_ERROR:
        return HubOfflineError(f"the hub fails to answer ({status}): try again later, {_INSTEAD}")
    return HubError(f"the hub refused {request.repo_id} ({status}): {_reason(error)}")


def _waiting_time(response: object) -> str:
    """Read how long to wait from ``Retry-After: 12`` or the hub's ``RateLimit: "api";r=0;t=12``."""
    import re

    headers = getattr(response, "headers", {})
    text = f"{headers.get('retry-after', '')};{headers.get('ratelimit', '')}"
    seconds = re.match(r"\d+", text) or re.search(r"(?<=;t=)\d+", text)
    return f"wait {seconds[0]} seconds" if seconds else "wait some minutes"


def _explain_other(request: _Request, error: Exception) -> HubError:
    """Explain what did not come from the hub: this machine, its network, or what was sent."""
    from huggingface_hub.errors import FileMetadataError

    if "Bearer" in str(error):
        # The HTTP library repeats the header that it cannot send, and with it the secret.
        return HubError("the token holds characters that cannot be sent: check `token`, HF_TOKEN")
    reason = _reason(error)
    if isinstance(error, FileMetadataError):
        return HubOfflineError(
            "what answered is not the Hugging Face hub: check HF_ENDPOINT, the proxy and the "
            f"firewall, {_INSTEAD}"
        )
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return HubError(f"cannot write the hub's cache: {reason}; set HF_HOME to another folder")
    if isinstance(error, ValueError):
        return HubError(f"cannot ask the hub for {request.repo_id}: {reason}")
    return HubOfflineError(
        f"cannot reach the hub for {request.repo_id} ({reason}): check the connection, {_INSTEAD}"
    )


_DISK_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT})


def _reason(error: Exception) -> str:
    """Return the first line of an error, or what kind it is."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__


@contextmanager
def _silence() -> Iterator[None]:
    """Keep progress bars, warnings and log lines off the terminal, which belongs to the tables.

    What the client would ask beside the file, for its own statistics, stays unasked: it reads the
    answer whole, however long it is.
    """
    import logging
    import warnings

    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    # All logging at once: the client sets the levels of its loggers while it is imported, in parts.
    logged = logging.root.manager.disable
    had_bars, quiet = not are_progress_bars_disabled(), constants.HF_HUB_DISABLE_TELEMETRY
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        disable_progress_bars()
        constants.HF_HUB_DISABLE_TELEMETRY = True
        try:
            yield
        finally:
            constants.HF_HUB_DISABLE_TELEMETRY = quiet
            logging.disable(logged)
            if had_bars:
                enable_progress_bars()
