"""Sizes that recurrent token mixers derive from others."""

from memplan.model.config import ConfigReader

MAX_EXPANSION = 1024.0
"""No mixer is wider than this many times the hidden size."""


def expanded(reader: ConfigReader, key: str, hidden_size: int) -> int:
    """The mixer's inner width: a multiple of the hidden size, rounded down."""
    factor = reader.number(key, default=2.0, maximum=MAX_EXPANSION)
    width = int(factor * hidden_size)
    if width < 1:
        raise reader.fail(key, f"{factor} of {hidden_size} leaves no width")
    return width


def automatic(reader: ConfigReader, key: str, derived: int) -> int:
    """A whole number, or what the class derives where the config says ``auto`` or nothing."""
    value = reader.raw(key)
    if value is None or value == "auto":
        return derived
    return reader.integer(key)


def time_step_rank(reader: ConfigReader, key: str, hidden_size: int) -> int:
    """Width of Mamba's narrow vector of time steps: a sixteenth of the hidden size, rounded up."""
    return automatic(reader, key, -(-hidden_size // 16))


def check_heads(
    reader: ConfigReader, heads_key: str, heads: int, head_dim: int, inner: int
) -> None:
    """Refuse heads that do not fill the mixer, as the config classes do."""
    if heads * head_dim != inner:
        raise reader.fail(heads_key, f"{heads} heads of {head_dim} do not make {inner}")
