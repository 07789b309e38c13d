"""The address of a model's page, as it is copied from a browser."""

from memplan.errors import ModelNotFoundError, UsageError
from memplan.fast_dataclass import dataclass

HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_OTHER_KINDS = ("datasets", "spaces", "papers", "collections", "docs", "models")
_VIEWS = ("tree", "blob", "resolve", "raw", "commit", "commits")
"""What may stand between a repository and a revision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubPage:
    """What an address names."""

    repo_id: str
    revision: str | None
    """None: the usual one."""


def is_url(text: str) -> bool:
    """Whether a text is an address of the web.

    >>> is_url("https://huggingface.co/google-t5/t5-3b"), is_url("google-t5/t5-3b")
    (True, False)
    """
    return text.lower().startswith(("https://", "http://", *(f"{host}/" for host in HOSTS)))


def read_hub_url(text: str, *, revision: str | None = None) -> HubPage:
    """The repository and revision of a page of the hub; ``revision`` is one named beside it.

    Raises ``ModelNotFoundError`` for an address of something else, and ``UsageError`` where the
    address and ``revision`` disagree.

    >>> page = read_hub_url("https://huggingface.co/google-t5/t5-3b/tree/refs%2Fpr%2F1?x=1#files")
    >>> page.repo_id, page.revision
    ('google-t5/t5-3b', 'refs/pr/1')
    """
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(text if "://" in text else f"https://{text}")
    words = [unquote(word) for word in parts.path.split("/") if word]
    if (parts.hostname or "") not in HOSTS or not words or words[0] in _OTHER_KINDS:
        msg = (
            f"{text}: is no page of a model on huggingface.co; give a built-in name, a path, "
            "owner/name, or such a page"
        )
        raise ModelNotFoundError(msg)
    place = next(
        (spot for spot in (1, 2) if words[spot : spot + 1] and words[spot] in _VIEWS), None
    )
    repo = words[: min(place if place is not None else 2, 2)]
    named = words[place + 1] if place is not None and len(words) > place + 1 else None
    if named == "main":
        named = None
    if named is not None and revision not in (None, named):
        msg = f"revision: the address names {named!r}, and {revision!r} is given beside it: which?"
        raise UsageError(msg)
    return HubPage(repo_id="/".join(repo), revision=named or revision)
