"""The engine's own settings, written KEY=VALUE."""

from collections.abc import Mapping, Sequence


def parse_engine_options(
    pairs: str | Sequence[str] | Mapping[str, object] | None,
) -> dict[str, object]:
    """Read ``KEY=VALUE`` pairs, or what they say; numbers, true and false become what they are.

    Raises ``UsageError`` for a pair without ``=``.

    >>> parse_engine_options(["overlap_comm=true", "reduce_bucket_size=5e8"])
    {'overlap_comm': True, 'reduce_bucket_size': 500000000}
    """
    from memplan.errors import UsageError

    if isinstance(pairs, Mapping):
        return dict(pairs)
    found: dict[str, object] = {}
    for pair in [pairs] if isinstance(pairs, str) else pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            msg = f"--engine-option: {pair!r} is not KEY=VALUE, such as overlap_comm=true"
            raise UsageError(msg)
        found[key] = _plain_value(value)
    return found


def _plain_value(text: str) -> object:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number
