"""Numbers as people write them: counts, shares, rates."""

import re

_NUMBER = re.compile(r"(\d+)(?:\.(\d+))?(?:e\+?(\d{1,2}))?([kmbt])?")
_SUFFIXES = {"k": 3, "m": 6, "b": 9, "t": 12}
"""Powers of ten, as people count parameters."""
_MAX_DIGITS = 18


def read_number(text: str) -> int:
    """Read a whole number that may be written 2851e6, 2_851_000_000 or 2.851B.

    >>> read_number("2851e6"), read_number("1.5e3"), read_number("10B")
    (2851000000, 1500, 10000000000)
    """
    match = _NUMBER.fullmatch(text.strip().replace("_", "").lower())
    whole, fraction, exponent, suffix = match.groups() if match else ("", None, None, None)
    fraction = (fraction or "").rstrip("0")
    places = int(exponent or 0) + _SUFFIXES.get(suffix or "", 0) - len(fraction)
    if match is None or places < 0 or len(whole + fraction) + places > _MAX_DIGITS:
        msg = f"{text!r} is not a whole number of at most {_MAX_DIGITS} digits, such as 2851e6 or 2.85B"
        raise ValueError(msg)
    return int(whole + fraction + "0" * places)


_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmbgt]?)", re.IGNORECASE)
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_MAX_AMOUNT = 10**18
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([gt]?)(bit|bps|b|b/s|bit/s)?", re.IGNORECASE)


def read_amount(text: str | int) -> int:
    """Read how many tokens or examples a run has: decimal, as people say it.

    >>> read_amount("1T"), read_amount("15.6B"), read_amount("52002"), read_amount("3e11")
    (1000000000000, 15600000000, 52002, 300000000000)
    """
    plain = str(text).strip().replace("_", "").replace(",", "")
    match = _AMOUNT.fullmatch(plain)
    if match is None:
        return read_number(plain)
    amount = round(float(match[1]) * _DECIMAL[match[2].lower()])
    if not 1 <= amount <= _MAX_AMOUNT:
        msg = f"{text!r} is not a number of tokens or examples, such as 300B or 1T"
        raise ValueError(msg)
    return amount


def read_share(text: str | float) -> float:
    """Read a share: 0.45, 45%, or 45.

    >>> read_share("0.45"), read_share("45%"), read_share("45")
    (0.45, 0.45, 0.45)
    """
    plain = str(text).strip()
    try:
        value = float(plain.removesuffix("%"))
    except ValueError:
        value = 0.0
    if plain.endswith("%") or value > 1:
        value /= 100
    if not 0 < value <= 1:
        msg = f"{text!r} is not a utilisation, such as 0.45 or 45%"
        raise ValueError(msg)
    return value


def read_rate(text: str | float) -> float:
    """Read a GPU's share of the network [bytes/s]: 400 or 400Gbit, a data sheet's way.

    >>> read_rate("400"), read_rate("400Gbit"), read_rate("0.8Tbps")
    (50000000000.0, 50000000000.0, 100000000000.0)
    """
    match = _RATE.fullmatch(str(text).strip())
    value = float(match[1]) if match else 0.0
    if match is None or not value:
        msg = f"{text!r} is not a rate, such as 400 or 400Gbit: Gbit/s for one GPU, one way"
        raise ValueError(msg)
    scale = {"": 10**9, "g": 10**9, "t": 10**12}[match[2].lower()]
    return value * scale / 8


_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h)?", re.IGNORECASE)
_UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


def read_seconds(text: str | float) -> float:
    """Read how long something takes [s]: seconds where no unit stands.

    >>> read_seconds("3.1s"), read_seconds("310 ms"), read_seconds(2), read_seconds("30m")
    (3.1, 0.31, 2.0, 1800.0)
    """
    match = _SECONDS.fullmatch(str(text).strip())
    value = float(match[1]) * _UNITS_S[(match[2] or "s").lower()] if match else 0.0
    if not value:
        msg = f"{text!r} is not a time, such as 3.1s, 310ms or 30m"
        raise ValueError(msg)
    return value


_SHARD = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


def read_shard(text: str) -> tuple[int, int]:
    """Read which part of how many, from the first on.

    >>> read_shard("2/4")
    (2, 4)
    """
    match = _SHARD.fullmatch(str(text).strip())
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        msg = f"{text!r} is no part: write 1/4 to 4/4"
        raise ValueError(msg)
    return number, count


def shard_of(num_pieces: int, shard: tuple[int, int] | None) -> range:
    """The pieces of one part: parts differ by one piece at most, and follow one another.

    >>> [shard_of(10, (number, 4)) for number in (1, 2, 3, 4)]
    [range(0, 2), range(2, 5), range(5, 7), range(7, 10)]
    """
    number, count = shard or (1, 1)
    return range(num_pieces * (number - 1) // count, num_pieces * number // count)
