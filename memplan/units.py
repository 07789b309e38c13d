"""Bytes as people read them: the only place where a byte count becomes text.

Everything inside memplan is an ``int`` number of bytes. ``GIB`` (2^30) is what GPU tools print,
often under the label "GB"; ``GB`` (10^9) is what papers and data sheets mean.
"""

import re

from memplan.errors import UsageError

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9

_BINARY = {
    "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40,
    "k": KIB, "m": MIB, "g": GIB, "t": 2**40,
}  # fmt: skip
"""A letter alone is what Slurm, Docker and PyTorch's tools mean by it."""
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": GB, "tb": 10**12}
_UNITS = {**_BINARY, **_DECIMAL}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*")


def format_gib(num_bytes: int, *, digits: int = 2) -> str:
    """Render a byte count in GiB.

    >>> format_gib(5 * 2**30)
    '5.00 GiB'
    """
    return f"{num_bytes / GIB:,.{digits}f} GiB"


def size_text(num_bytes: int) -> str:
    """Bytes in the unit that suits them.

    >>> size_text(3 * 2**30), size_text(1536), size_text(12)
    ('3.00 GiB', '1.50 KiB', '12 B')
    """
    for limit, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:,.2f} {unit}"
    return f"{num_bytes} B"


def format_count(count: int) -> str:
    """Render a number of parameters the way people say it.

    >>> format_count(2851598336), format_count(737668608), format_count(512)
    ('2.85B', '737.67M', '512')
    """
    for limit, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= limit:
            return f"{count / limit:,.2f}{suffix}"
    return str(count)


def parse_bytes(text: str) -> int:
    """Read a size with its unit, such as ``46GiB``, ``46G`` (the same) or ``24 GB`` [bytes].

    Raises ``UsageError`` when the unit is missing or unknown: 46 alone could mean either.

    >>> parse_bytes("46GiB") == 46 * 2**30
    True
    >>> parse_bytes("24 GB")
    24000000000
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        msg = f"cannot read the size {text!r}: write a number and a unit, such as 46GiB or 24GB"
        raise UsageError(msg)
    return int(float(match[1]) * unit)


_COUNT = re.compile(r"(\d{1,18})([kKmM]?)")
_MULTIPLES = {"": 1, "k": KIB, "m": MIB}


def parse_count(text: str) -> int | None:
    """Read a whole number such as ``8192`` or ``8k``, where k is 1,024; None for anything else.

    >>> parse_count("8k"), parse_count("1M"), parse_count("512"), parse_count("8.5")
    (8192, 1048576, 512, None)
    """
    match = _COUNT.fullmatch(text.strip()) if text.isascii() else None
    return int(match[1]) * _MULTIPLES[match[2].lower()] if match else None


def is_size(text: str) -> bool:
    """Whether a text is a size with its unit.

    >>> is_size("46 GiB"), is_size("3090"), is_size("a100")
    (True, False, False)
    """
    match = _SIZE.fullmatch(text)
    return match is not None and match[2].lower() in _UNITS


def decimal_note(text: str) -> str:
    """What to say of a size in GB, which many write who mean GiB; empty for other sizes.

    >>> decimal_note("80GB")
    '80GB is 80 x 10^9 bytes = 74.5 GiB; a card sold as 80 GB mostly has 80 GiB: write 80GiB'
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() != "gb":
        return ""
    return (
        f"{text.strip()} is {match[1]} x 10^9 bytes = {format_gib(parse_bytes(text), digits=1)}; a "
        f"card sold as {match[1]} GB mostly has {match[1]} GiB: write {match[1]}GiB"
    )


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up.

    >>> ceil_div(7, 2)
    4
    """
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below ``value``.

    >>> round_up(513, 512)
    1024
    """
    return -(-value // multiple) * multiple
